"""``python -m tests.fuzz --seconds N [TARGET...]`` mutates as long as told; ``python -m tests.fuzz TARGET FILE`` replays.

Exit status 1 when a parser broke its contract. The input of each finding is saved below --save.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.findings import FOLDER, SAVED_PER_KIND_MAX, save
from tests.fuzz.mutate import mutant
from tests.fuzz.registry import TARGETS
from tests.fuzz.soak import guided
from tests.fuzz.target import Target, judge

MEMORY_BYTES_MAX = 8 << 30  # of address space: an input that asks for more meets MemoryError, not the machine
MEASURED_EVERY = 8  # inputs; measuring memory makes one several times slower


def main() -> int:
    arguments = _arguments()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.getrlimit(resource.RLIMIT_AS)[1]))
    sys.set_int_max_str_digits(4300)
    if arguments.seconds is None:
        return _replay(TARGETS[arguments.what[0]], Path(arguments.what[1]))
    chosen = [TARGETS[name] for name in arguments.what or TARGETS]
    if arguments.guided:
        ended = [_guide(target.name, arguments.seconds / len(chosen), arguments.save) for target in chosen]
        return 1 if any(ended) else 0
    found = [
        _run(target, arguments.seconds / len(chosen), arguments.seed, arguments.save) for target in chosen
    ]
    return 1 if any(found) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="in all, shared equally by the targets")
    parser.add_argument("--guided", action="store_true", help="by coverage, with atheris")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--save", type=Path, default=FOLDER)
    parser.add_argument("what", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.what[: None if arguments.seconds else 1] if name not in TARGETS]
    if unknown or (arguments.seconds is None and len(arguments.what) != 2):
        parser.error(f"no such target: {unknown}" if unknown else "--seconds N [TARGET...], or TARGET FILE")
    return arguments


def _replay(target: Target, file: Path) -> int:
    finding = judge(target, file.read_bytes(), memory=True)
    print(f"{target.name}: {finding.kind}: {finding.text}" if finding else f"{target.name}: no finding")
    return 1 if finding else 0


def _guide(name: str, seconds: float, folder: Path) -> bool:
    found, said = guided(name, max(1, round(seconds)), folder)
    done = next((line for line in said.splitlines() if "\tDONE" in line), "did not end")
    print(f"{name}: {done}, findings: {len(found)}", flush=True)
    print("".join(f"  {line.strip()}\n" for line in said.splitlines() if line.startswith("  ")), end="")
    return bool(found)


def _run(target: Target, seconds: float, seed: int, folder: Path) -> bool:
    """One line: executions, their rate, findings by kind."""
    chance, kinds, count = random.Random(seed), Counter[str](), 0
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        finding = judge(target, mutant(target, chance), memory=count % MEASURED_EVERY == 0)
        count += 1
        if finding is not None:
            kinds[finding.kind] += 1
            if kinds[finding.kind] <= SAVED_PER_KIND_MAX:
                print(f"  {finding.kind}: {finding.text}\n    {save(target, finding, folder)}")
    told = ", ".join(f"{kind} ×{n}" for kind, n in kinds.most_common()) or "none"
    print(
        f"{target.name}: {count} executions, {count / passed:.0f}/s, findings: {told} (seed {seed})",
        flush=True,
    )
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
