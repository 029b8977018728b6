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

REPO = Path(__file__).resolve().parents[2]
TEMPLATE_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


@functools.cache
def template(module: str = "tests.cluster.template") -> socket.socket:
    """The one that processes are forked from; it ends with this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(its.fileno())], env=env, pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True, cwd=REPO,
        )  # fmt: skip
    ours.settimeout(TEMPLATE_TIMEOUT_S)
    assert ours.recv(16) == b"ready", f"{module} did not start"
    atexit.register(end_template, ours, process)
    return ours


def end_template(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    link.close()
    process.wait(END_TIMEOUT_S)


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
