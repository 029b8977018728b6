"""Cleans up after the demo, however it ended: waits for the end of its stdin (the demo closed it, or was killed), then kills
every process with the demo's mark and removes its temporary directory. ``python -m ckptd.demo.reaper RUN DIRECTORY``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ckptd.demo import processes

ROUNDS_MAX = 5  # a process that was just being started is found in the next round


def clean(run: str, directory: Path) -> None:
    for _ in range(ROUNDS_MAX):
        found = processes.find(run + ".")
        if not found:
            break
        processes.kill(f.pid for f in found)
    shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    run, directory = sys.argv[1], Path(sys.argv[2])
    while os.read(0, 4096):
        pass
    clean(run, directory)


if __name__ == "__main__":
    main()
