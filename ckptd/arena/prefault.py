"""Bring a new memfd's pages into being, so that only a child can be killed for it (design D1)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ckptd.arena.budget import NoMemory
from ckptd.arena.toucher import EXIT_ERRNO
from ckptd.units import format_bytes

START_TIMEOUT_S = 60.0
TIMEOUT_S_PER_GIB = 60.0  # first touch is 0.3-3 s per GiB; a cgroup that never kills would wait for ever
SCRIPT = Path(__file__).with_name("toucher.py")
_HINT = "lower memory_budget, or raise the memory limit of the daemon's cgroup"


def prefault(fd: int, size: int) -> None:
    """Touch every page through a sacrificial child. Blocks for up to seconds per GiB. Raises NoMemory; then
    the caller closes the memfd and nothing is left."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), str(fd), str(size), str(os.getpid())]
    with subprocess.Popen(command, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        try:
            said, _ = child.communicate(timeout=START_TIMEOUT_S + TIMEOUT_S_PER_GIB * size / 2**30)
        except subprocess.TimeoutExpired:
            child.kill()
            raise NoMemory("the kernel gave no pages in time", where=format_bytes(size), hint=_HINT) from None
    if child.returncode != 0:
        raise NoMemory(_why(child.returncode, said), where=format_bytes(size), hint=_HINT)


def _why(code: int, said: bytes) -> str:
    if code == -signal.SIGKILL:
        return "the kernel's OOM killer ended the allocation"
    if code == EXIT_ERRNO and said.strip().isdigit():
        return f"allocation failed: {os.strerror(int(said))}"
    return f"allocation failed: its child ended with {code}"
