"""python -m tests.sim --seed N [--trace] | --seeds A:B | --seconds S, with --coverage: how often everything happened"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.census import Census, for_seconds, run_all, run_seed
from tests.sim.mutants import MUTANTS
from tests.sim.transitions import rare, table

TOLD_EVERY = 1000  # seeds: how far a long run is


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:100", help="A:B, when no seed is given")
    parser.add_argument("--seconds", type=float, default=0.0, help="from seed A on, for so long")
    parser.add_argument("--trace", action="store_true", help="every event and instruction")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS])
    parser.add_argument(
        "--coverage", action="store_true", help="every transition, and those met too seldom"
    )
    options = parser.parse_args()
    began = time.monotonic()
    census = _one(options) if options.seed is not None else _many(options)
    print(f"{len(census.failures)} of {census.seeds} failed in {time.monotonic() - began:.1f} s")
    print(
        table(census.counts)
        if options.coverage
        else "\n".join(f"{n:8d}  {what}" for what, n in sorted(census.counts.items()))
    )
    if options.coverage:
        print(f"too seldom: {rare(census.counts) or 'none'}")
    return 1 if census.failures else 0


def _one(options: argparse.Namespace) -> Census:
    try:
        counts = run_seed(
            options.seed, mutant=options.mutant, coverage=options.coverage, verbose=options.trace
        )
    except Exception:  # whatever it is, it is the result
        text = traceback.format_exc()
        print(f"seed {options.seed}: {text}")
        return Census(1, Counter(), [text])
    return Census(1, counts)


def _many(options: argparse.Namespace) -> Census:
    first, last = map(int, options.seeds.split(":"))
    census, said, told = Census(), 0, 0
    found = (
        for_seconds(options.seconds, first, coverage=options.coverage)
        if options.seconds
        else run_all(first, last, mutant=options.mutant, coverage=options.coverage)
    )
    for census in found:
        for failure in census.failures[said:]:
            print(failure, flush=True)
        said = len(census.failures)
        if census.seeds // TOLD_EVERY > told:
            told = census.seeds // TOLD_EVERY
            print(f"{census.seeds} seeds from {first} on, {said} failed", file=sys.stderr, flush=True)
    return census


if __name__ == "__main__":
    sys.exit(main())
