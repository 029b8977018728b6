"""ckptd beside other systems that save a training's state, measured from outside, in one run: how long training is held, and
how long it takes until the state is on storage.

    pip install -e '.[bench]'      # the others; whoever is not installed is left out, with a word
    python -m bench.peers --directory /mnt/checkpoints --json out.json

Everyone saves the same state (a model and its AdamW moments) through the calls that its users make, in turn. Held: the wall time
of these calls, up to where the optimizer may write again. Stored: from the first of them until whoever saves says that all is
stored, and then every file of it, its directories and the one above them have been fsynced. ckptd has done that by itself by then,
DCP syncs its files; DLRover and torchsnapshot leave it to the kernel.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench.common import Report, Row, arguments
from bench.contenders import CONTENDERS, Ckptd, Contender
from bench.stall import calibrated
from bench.training import Copies, Training

WARM = 2
WRITE_BYTES = 8 << 20


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_all(root: Path) -> None:
    """Every file and directory below ``root``, it, and the directory above."""
    for folder, _, files in os.walk(root):
        for name in files:
            with suppress(FileNotFoundError):  # ckptd reads back what it has written, into a file that goes again
                sync(Path(folder, name))
        sync(Path(folder))
    sync(root.parent)


def write(training: Training, path: Path) -> None:
    """The machine's limit: the same bytes into one file, as they are, with the same fsyncs."""
    with path.open("wb", buffering=0) as file:
        for tensor in training.tensors():
            view = memoryview(tensor.numpy().data).cast("B")
            for at in range(0, len(view), WRITE_BYTES):
                file.write(view[at : at + WRITE_BYTES])
    sync(path)
    sync(path.parent)


class Run:
    """Seconds by row, one entry per counted round."""

    def __init__(self, training: Training, memcpy: Copies, directory: Path) -> None:
        self.training, self._memcpy, self._limit = training, memcpy, directory / "limit"
        self.held: dict[str, list[float]] = {}
        self.beside: dict[str, list[float]] = {}  # held, with forward and backward before the fence
        self.stored: dict[str, list[float]] = {}
        self.memcpy: list[float] = []
        self.limit: list[float] = []

    def measure(self, contenders: Sequence[Contender], repeats: int) -> None:
        for turn in range(WARM + repeats):
            if turn == WARM:
                for taken in (self.held, self.beside, self.stored, self.memcpy, self.limit):
                    taken.clear()
            self._round(contenders)

    def _round(self, contenders: Sequence[Contender]) -> None:
        for contender in contenders:
            held, stored = self._save(contender)
            self.held.setdefault(contender.name, []).append(held)
            self.stored.setdefault(contender.name, []).append(stored)
            if contender.aside:
                self.beside.setdefault(contender.name, []).append(self._beside(contender))
        self.memcpy.append(timed(self._memcpy))
        os.sync()
        self.limit.append(timed(lambda: write(self.training, self._limit)))
        self._limit.unlink()

    def _save(self, contender: Contender) -> tuple[float, float]:
        """Seconds held with nothing to hide behind, and until all is stored."""
        os.sync()  # what the one before left behind is nobody's
        started, held = self._begin(contender)
        held += timed(contender.fence)
        sync_all(contender.stored())
        stored = time.perf_counter() - started
        contender.clean()
        return held, stored

    def _beside(self, contender: Contender) -> float:
        _, held = self._begin(contender)
        self.training.compute()
        held += timed(contender.fence)
        contender.stored()
        contender.clean()
        return held

    def _begin(self, contender: Contender) -> tuple[float, float]:
        """When the save began, and how long its call took. One that saves nothing is made again after the next step: ckptd grants
        its snapshots to some steps ahead."""
        while True:
            self.training.optimize()
            started = time.perf_counter()
            if contender.save(self.training.step):
                return started, time.perf_counter() - started

    def prove(self, contender: Contender) -> None:
        """What was measured is a checkpoint: everything comes back bit by bit."""
        self._begin(contender)
        contender.fence()
        where, digests = contender.stored(), self.training.digests()
        self.training.spoil()
        contender.load(where)
        assert self.training.digests() == digests, f"{contender.name}: what was loaded is not what was saved"
        contender.clean()


def tell(run: Run) -> Report:
    report = Report("peers: how long a save holds training, and until it is stored")
    nbytes = run.training.nbytes
    memcpy = report.add(Row("memcpy, warm", run.memcpy, nbytes))
    held = {name: report.add(Row(f"{name}: held", s, kind="time"), memcpy) for name, s in run.held.items()}
    beside = {
        name: report.add(Row(f"{name}: held, behind compute", s, kind="time"), memcpy) for name, s in run.beside.items()
    }
    for rows in (held, {**held, **beside}):  # behind any of the others is a bug
        rows[Ckptd.name].floor = round(min(row.ratio for name, row in rows.items() if name != Ckptd.name and row.ratio), 3)
    limit = report.add(Row("one file, write + fsync", run.limit, nbytes))
    for name, seconds in run.stored.items():
        report.add(Row(f"{name}: stored, fsynced", seconds, nbytes), limit)
    report.facts["state"] = f"{nbytes / 1e9:.2f} GB in {len(run.training.tensors())} tensors"
    return report


class Field:
    """Everyone that is installed, and why the others are not here. ``with Field(...) as field``: closed at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.contenders, self.absent = directory, list[Contender](), dict[str, str]()

    def __enter__(self) -> Field:
        for kind in CONTENDERS:
            own = self._directory / str(len(self.contenders))
            own.mkdir(exist_ok=True)
            try:
                self.contenders.append(kind(own))
            except (ImportError, TimeoutError) as error:  # DLRover: its saver process may not come up
                self.absent[kind.name] = f"left out: {error} (pip install -e '.[bench]' installs all)"
        return self

    def __exit__(self, *exception: object) -> None:
        for contender in self.contenders:
            contender.close()


def main() -> int:
    extra: dict[str, Any] = {
        "threads": {"type": int, "default": max(1, (os.cpu_count() or 2) - 1)},
        "directory": {"type": Path, "default": None},
    }
    args = arguments(__doc__ or "", **extra)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, as intended
    directory = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir=args.directory))
    try:
        with Field(directory) as field:
            torch.set_num_threads(args.threads)
            training = Training(args.bytes)
            for contender in field.contenders:
                contender.begin(training)
            run = Run(training, calibrated(training), directory)
            run.measure(field.contenders, args.repeats)
            for contender in field.contenders:
                run.prove(contender)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report = tell(run)
    report.facts |= {"directory": str(directory.parent), **field.absent}
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
