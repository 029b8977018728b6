"""A process that has imported everything once and forks for each life: a life costs its work, not a start of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.power.life import Running
from tests.power.notes import Life

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 10.0


class Zygote:
    """Used by the tests: one life at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.power.zygote"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # all is imported

    def live(self, life: Life) -> int:
        """Its exit status, CUT when it cut the power itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(life) + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=STOP_TIMEOUT_S)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            _be(msgspec.json.decode(line, type=Life))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _be(life: Life) -> None:
    status = 1
    try:
        Running(life).run()
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
