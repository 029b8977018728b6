"""Local rank 0 starts the daemon as a side process of torchrun: detached, so that it outlives the trainers (section 5).

Launchers that kill a whole cgroup (a Slurm step, a container) take it along all the same: run it as a service there.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from ckptd.core.errors import CkptdError

VARIABLE = "CKPTD_AUTOSTART"
START_TIMEOUT_S = 60.0
POLL_S = 0.05

# A process of its own session whose parent is init: torchrun signals its children and waits for them, this is neither.
_DETACH = """
import os, sys
told, command = int(sys.argv[1]), sys.argv[2:]
daemon = os.fork()
if daemon:
    os.write(told, str(daemon).encode())
    os._exit(0)
os.close(told)
os.setsid()
os.execv(command[0], command)
"""


def wanted(argument: bool) -> bool:
    return argument or os.environ.get(VARIABLE, "") not in ("", "0")


def ensure(path: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return once a daemon listens at ``path``. Raises CkptdError when it does not within ``timeout_s``."""
    if not listening(path) and os.environ.get("LOCAL_RANK", "0") == "0":
        _start_once(path)
    deadline = time.monotonic() + timeout_s
    while not listening(path):
        if time.monotonic() > deadline:
            raise CkptdError("the daemon did not come up", where=path, hint=f"see {log_path(path)}")
        time.sleep(POLL_S)


def listening(path: str) -> bool:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        probe.connect(path)
        return True
    except BlockingIOError:
        return True  # its queue is full: somebody is there
    except OSError:
        return False
    finally:
        probe.close()


def log_path(path: str) -> Path:
    return Path(path).with_suffix(".log")


def _start_once(path: str) -> None:
    """Under a lock: two jobs that start together on one node share one daemon."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(f"{path}.starting", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        hint = "start the machine's daemon again, or remove that file if there is to be none; CKPTD_SOCKET names another place"
        raise CkptdError("no daemon listens there, and this user may not start one", where=path, hint=hint) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listening(path):
            _wait_for(_spawn(path), path)
    finally:
        os.close(lock)


def _wait_for(daemon: int, path: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not listening(path) and time.monotonic() < deadline:
        if not os.path.exists(f"/proc/{daemon}"):
            raise CkptdError("the daemon ended while it started", where=path, hint=f"see {log_path(path)}")
        time.sleep(POLL_S)


def _spawn(path: str) -> int:
    """The daemon's pid."""
    command = [sys.executable, "-m", "ckptd", "run"]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["CKPTD_SOCKET"] = path
    reading, writing = os.pipe()
    try:
        with open(log_path(path), "ab") as log:
            subprocess.run(
                [sys.executable, "-c", _DETACH, str(writing), *command], env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, pass_fds=(writing,), check=True,
            )  # fmt: skip
        return int(os.read(reading, 32))
    finally:
        os.close(reading)
        os.close(writing)
