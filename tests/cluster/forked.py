"""Processes that a template forks (tests/cluster/template.py), and the templates, one of each module for the whole run."""

from __future__ import annotations

import atexit
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


def fork(link: socket.socket, order: dict[str, Any], fds: list[int]) -> int:
    """Its process id. ``link``: to the template; ``fds`` become 0, 1, 2 and, where there is one more, 3."""
    socket.send_fds(link, [json.dumps(order).encode()], fds)
    return int(link.recv(16))


class ForkedCommand:
    """``ckptd ARGUMENTS`` in a process forked from tests/cluster/node_template.py, with what of Popen's is used here."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str], out: IO[bytes], err: IO[bytes]) -> None:
        self.returncode: int | None = None
        self._said, status = os.pipe()
        order = {"env": env, "uid": 0, "job": json.dumps(arguments), "kind": "ckptd"}
        with open(os.devnull, "rb") as nothing:
            fds = [nothing.fileno(), out.fileno(), err.fileno(), status]
            self.pid = fork(template("tests.cluster.node_template"), order, fds)
        os.close(status)
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            said = os.read(self._said, 1)
            self.returncode = said[0] if said else -signal.SIGKILL
            os.close(self._said)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("ckptd", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)
