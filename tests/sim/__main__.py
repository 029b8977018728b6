"""python -m tests.sim --seed N [--trace] | --seeds A:B"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.mutants import MUTANTS
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", default="0:100", help="A:B, when no seed is given")
    parser.add_argument("--trace", action="store_true", help="every event and instruction")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS])
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    seeds = [options.seed] if options.seed is not None else range(first, last)
    counts: Counter[str] = Counter()
    failed, began = 0, time.monotonic()
    for seed in seeds:
        try:
            counts += World(seed, mutant=options.mutant, verbose=options.trace).run().counts
        except Exception:  # a report for each seed, then the next
            failed += 1
            text = traceback.format_exc() if options.seed is not None else traceback.format_exc().splitlines()[-1]
            print(f"seed {seed}: {text}")
    print(f"{failed} of {len(seeds)} failed in {time.monotonic() - began:.1f} s")
    for what, count in sorted(counts.items()):
        print(f"{count:8d}  {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
