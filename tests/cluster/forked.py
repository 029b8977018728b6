"""Processes that a template forks (tests/cluster/template.py), and the templates, one of each module for the whole run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.waiting import until

REPO = Path(__file__).resolve().parents[2]
TEMPLATE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


@functools.cache
def template(module: str = "tests.cluster.template") -> socket.socket:
    """A way to the one of this run that processes are forked from. Whichever of pytest's workers needs it first has started it, as
    its imports take seconds; it ends with the last that has a way to it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    address = f"\0ckptd-tests-{run}-{module}"  # abstract: nobody else has it, and it is gone with the socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            pass  # another has started it
        else:
            listener.listen()
            start(module, listener)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(TEMPLATE_TIMEOUT_S)
    until(lambda: link.connect_ex(address) == 0, TEMPLATE_TIMEOUT_S)  # it may be bound and not listen yet
    assert link.recv(16) == b"ready", f"{module} did not start"
    atexit.register(link.close)
    return link


def start(module: str, listener: socket.socket) -> None:
    os.set_inheritable(listener.fileno(), True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    os.posix_spawn(
        sys.executable, [sys.executable, "-m", module, str(listener.fileno())], env, file_actions=[nothing], setsid=True
    )


class Forked:
    """A process that the template of this module has forked. ``fds`` become 0, 1, 2 and, where there is one more, 3."""

    def __init__(self, module: str, order: dict[str, Any], fds: list[int]) -> None:
        link = template(module)
        socket.send_fds(link, [json.dumps(order).encode()], fds)
        self.pid = int(link.recv(16))
        self._pidfd = os.pidfd_open(self.pid)
        self._over = False

    def ended(self, timeout: float | None = 0.0) -> bool:
        """Within so many seconds; None: however long it takes."""
        if not self._over and select.select([self._pidfd], [], [], timeout)[0]:
            os.close(self._pidfd)
            self._over = True
        return self._over

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self.ended():
                signal.pidfd_send_signal(self._pidfd, number)


class ForkedCommand(Forked):
    """``ckptd ARGUMENTS`` in a process forked from tests/cluster/node_template.py, with what of Popen's is used here.
    ``before``: a module that it imports first."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], out: IO[bytes], err: IO[bytes], before: str = "") -> None:
        self.returncode: int | None = None
        self._said, status = os.pipe()
        order = {"env": env, "uid": 0, "job": json.dumps(arguments), "kind": before}
        with open(os.devnull, "rb") as nothing:
            super().__init__("tests.cluster.node_template", order, [nothing.fileno(), out.fileno(), err.fileno(), status])
        os.close(status)

    def poll(self) -> int | None:
        if self.returncode is None and self.ended():
            said = os.read(self._said, 1)
            os.close(self._said)
            self.returncode = said[0] if said else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self.ended(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("ckptd", timeout or 0.0)
        return code
