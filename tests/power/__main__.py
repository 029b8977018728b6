"""``python -m tests.power``: power cuts from seeds, the table of points, and the table of deliberate mistakes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.power.disk import LOG_FLUSH, MKFS
from tests.power.episode import LIVES, Bench, Cut, Outcome
from tests.power.mutants import MUTANTS


def main() -> int:
    args = _arguments()
    found: list[Cut] = []
    with tempfile.TemporaryDirectory() as place:
        for kind in args.fs:
            with Bench(kind, Path(place)) as bench:
                for name in args.mutant or [""]:
                    broken = campaign(bench, name, args)
                    found += [] if name else broken
    return 1 if found else 0


def campaign(bench: Bench, name: str, args: argparse.Namespace) -> list[Cut]:
    outcomes = [bench.episode(seed, args.lives, name) for seed in args.seeds]
    print(f"{bench.kind} {name}: {summary(outcomes)}", flush=True)
    if args.points:
        print(table({bench.kind: outcomes}))
    broken = [cut for outcome in outcomes for cut in outcome.broken]
    for cut in broken if not name or args.verbose else []:
        print(told(bench.kind, name, cut))
    return broken


def summary(outcomes: list[Outcome]) -> str:
    cuts = [cut for outcome in outcomes for cut in outcome.cuts]
    there, gone = sum(o.there for o in outcomes), sum(o.not_there for o in outcomes)
    flushed = sum(cut.flags == LOG_FLUSH for cut in cuts)
    return (
        f"{len(cuts)} power cuts ({flushed} with the log flushed) at {len({cut.where for cut in cuts})} different points, "
        f"{sum(len(o.shown) for o in outcomes)} broke a promise, "
        f"{sum(len(o.failed) for o in outcomes)} failed before the power did; not acknowledged: {there} there, {gone} not there"
    )


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """How often the power went at each point, per kind of file system."""
    counts = {
        kind: Counter(cut.where for one in found for cut in one.cuts) for kind, found in outcomes.items()
    }
    rows = sorted(set().union(*counts.values()))
    head = "".join(f"{kind:>11}" for kind in counts)
    return "\n".join(
        [head, *("".join(f"{counts[kind][row]:11}" for kind in counts) + f"  {row}" for row in rows)]
    )


def told(kind: str, name: str, cut: Cut) -> str:
    """The failure, and the line that does it again."""
    again = f"--fs {kind} --seeds {cut.seed}:{cut.seed + 1}" + (f" --mutant {name}" if name else "")
    return (
        f"{cut.broken}\n  power cut {cut.number} of the episode, at: {cut.where}\n"
        f"  again: sudo .venv/bin/python -m tests.power {again}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--fs", nargs="+", choices=sorted(MKFS), default=sorted(MKFS))
    parser.add_argument("--seeds", type=_span, default=range(10), help="FIRST:LAST, episodes, LAST excluded")
    parser.add_argument("--lives", type=int, default=LIVES, help="power cuts per episode")
    parser.add_argument(
        "--mutant",
        nargs="+",
        choices=sorted(MUTANTS),
        help="deliberate mistakes instead of the code as it is",
    )
    parser.add_argument("--points", action="store_true", help="print how often each point was cut at")
    parser.add_argument("--verbose", action="store_true", help="print what each mistake broke")
    return parser.parse_args()


def _span(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


if __name__ == "__main__":
    sys.exit(main())
