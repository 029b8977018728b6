"""The very core that ships, under seeded faults (P1-P3, P6, P9, P12, P14): every seed holds, every named situation happens."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.sim.oracle import SITUATIONS
from tests.sim.world import World

SEEDS = 500
CHUNK = 25
WORKERS_MAX = 2


def run_chunk(first: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + CHUNK):
        try:
            counts += World(seed).run().counts
        except Exception:
            said = traceback.format_exc().splitlines()[-1]
            failures.append(f"seed {seed}: {said}\n  python -m tests.sim --seed {seed} --trace")
    return counts, failures


@pytest.mark.timeout(900)
def test_every_seed_holds_and_every_situation_happens() -> None:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    # spawn: the test runner has threads, a forked child may find a lock held for ever.
    workers, context = min(WORKERS_MAX, os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for found, failed in pool.map(run_chunk, range(0, SEEDS, CHUNK)):
            counts += found
            failures += failed
    assert not failures, "\n".join(failures)
    never = [name for name in SITUATIONS if not counts[name]]
    assert not never, f"never happened in {SEEDS} seeds: {never}"
