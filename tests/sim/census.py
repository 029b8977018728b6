"""Many seeds on both cores: what failed, and how often everything that must happen did."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from tests.sim.watch import Watch
from tests.sim.world import World

CHUNK = 25  # seeds that one process runs at a time
WORKERS_MAX = 2
SAID_MAX = 300  # characters of a failure


@dataclass
class Census:
    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Census) -> None:
        self.seeds += other.seeds
        self.counts += other.counts
        self.failures += other.failures


def run_seed(seed: int, *, mutant: str = "", coverage: bool = False, verbose: bool = False) -> Counter[str]:
    """Raises what the world raises. The counts of situations; with coverage, of transitions too."""
    world = World(seed, mutant=mutant, verbose=verbose)
    world.watch = Watch() if coverage else None
    counts = world.run().counts
    return counts + world.watch.seen if world.watch is not None else counts


def run_chunk(first: int, size: int = CHUNK, mutant: str = "", coverage: bool = False) -> Census:
    census = Census()
    for seed in range(first, first + size):
        census.seeds += 1
        try:
            with _collected_at_its_end():
                census.counts += run_seed(seed, mutant=mutant, coverage=coverage)
        except Exception:
            said = traceback.format_exc().splitlines()[-1][:SAID_MAX]
            census.failures.append(
                f"seed {seed}: {said}\n  .venv/bin/python -m tests.sim --seed {seed} --trace"
            )
    return census


@contextmanager
def _collected_at_its_end() -> Iterator[None]:
    """A world is a heap of objects that lives as long as its seed: looking for garbage meanwhile took a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _settled() -> None:
    """What a worker has imported is no garbage: looking through it once per seed took a fifth of the time."""
    gc.collect()
    gc.freeze()


def run_all(first: int, last: int | None, *, mutant: str = "", coverage: bool = False) -> Iterator[Census]:
    """The census so far, each time a chunk is done. last None: for as long as the caller takes."""
    starts = count(first, CHUNK) if last is None else iter(range(first, last, CHUNK))
    workers = min(WORKERS_MAX, os.cpu_count() or 1)
    context = multiprocessing.get_context(
        "spawn"
    )  # the caller has threads: a forked child may find a lock held for ever
    census, running = Census(), set[Future[Census]]()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_settled) as pool:
        try:
            while True:
                while len(running) < 2 * workers and (start := next(starts, None)) is not None:
                    size = CHUNK if last is None else min(CHUNK, last - start)
                    running.add(pool.submit(run_chunk, start, size, mutant, coverage))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    census.add(one.result())
                yield census
        finally:
            for one in running:
                one.cancel()


def for_seconds(seconds: float, first: int, *, coverage: bool = False) -> Iterator[Census]:
    began = time.monotonic()
    for census in run_all(first, None, coverage=coverage):
        yield census
        if time.monotonic() - began >= seconds:
            return
