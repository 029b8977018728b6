"""python -m tests.mutants [--only TEXT,...] [--every N] [--workers N] [--json FILE]: are the tests worth something?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.mutants.by_hand import BY_HAND, mutants_by_hand, rare
from tests.mutants.generate import Mutant, mutants_of
from tests.mutants.report import complaints, table
from tests.mutants.run import Results, Worker, judge, reach
from tests.mutants.survivors import explained, gone, not_needed
from tests.mutants.targets import SEEDS_MAX, TARGETS, source_of


def all_mutants() -> list[Mutant]:
    """Those written by hand last: of them none is left out by ``--every``."""
    generated = [mutant for path in TARGETS for mutant in mutants_of(path, source_of(path))]
    return [*generated, *mutants_by_hand()]


def chosen(mutants: list[Mutant], only: str, every: int) -> list[Mutant]:
    texts = only.split(",")
    found = [m for m in mutants if any(text in m.id or text in m.title for text in texts)]
    return [m for m in found if m.function == BY_HAND or sum(m.id.encode()) % every == 0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose id or title has one of these texts in it")
    parser.add_argument("--every", type=int, default=1, help="every N-th, always the same ones, and all written by hand")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS_MAX,
        help="of the simulator, for each mutant that tests leave alive",
    )
    parser.add_argument("--json", type=Path, help="also write every result to this file")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted run found")
    parser.add_argument(
        "--keep-killed", action="store_true", help="what was killed before a test changed counts as killed"
    )
    options = parser.parse_args()
    began, mutants, why = time.monotonic(), all_mutants(), explained()
    stale = gone(why, mutants)
    mutants = chosen(mutants, options.only, options.every)
    if not mutants:
        parser.error(f"no mutant has {options.only!r} in its id or title, such as core/protocol/machine/joining.py")
    results = Results(fresh=options.fresh, keep_killed=options.keep_killed)
    workers = [Worker() for _ in range(options.workers)]
    try:
        judge(mutants, workers, reach(workers), results, options.seeds)
    finally:
        for worker in workers:
            worker.stop()
    stale += not_needed(why, {mutant.id: results.known[mutant.id] for mutant in mutants})
    why |= rare()
    wrong = complaints(mutants, results.known, why, stale)
    print(table(mutants, results.known, why))
    print("\n".join(wrong) or "every survivor is explained")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    if options.json:
        rows = [
            {"id": m.id, "title": m.title, "why": why.get(m.id), **asdict(results.known[m.id])}
            for m in mutants
        ]
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
