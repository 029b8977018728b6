"""What is mutated, and what may kill it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ckptd"

_MACHINE, _STEWARD = "core/protocol/machine", "core/protocol/machine/steward"
_NAMES = {
    "core": ("retention",),
    "core/state_map": (
        "recovery", "pieces", "source_index", "box_index", "columns", "writes", "catalogue", "fragments", "agreement", "apart",
    ),
    "core/redundancy": ("placement", "protection", "parity_sets", "linear", "degradation"),
    "core/protocol": ("candidates", "life", "written"),
    _MACHINE: (
        "slots", "holdings", "levels", "replicate", "capture", "uplink", "asks", "opening", "joining", "writing", "lifetime",
        "encoding", "shortage",
    ),
    _STEWARD: (
        "certify", "guards", "snapshot", "grants", "table", "gather", "restore", "flush", "decide", "sessions", "waiting",
        "parity", "degradation", "protecting",
    ),
    "persist": ("commit", "index", "retention", "keeping", "lineage", "forget", "unchanged", "storage/tree"),
}  # fmt: skip
TARGETS = tuple(f"{folder}/{name}.py" for folder, names in _NAMES.items() for name in names)

# Reached lines are noted in these: somebody may have put a mistake into the others by hand.
TRACED = (*TARGETS, *(f"persist/{name}.py" for name in ("commits",)))

TESTS = ("tests/core/test_*.py", "tests/sim/test_*.py", "tests/node/test_persist_*.py")
NOT_TESTS = ("test_sim.py", "test_mutants.py")  # they are made of seeds, which are taken one by one here
TEST_S_MAX = 8.0  # of processor time, traced; a slower test is not used
SEEDS_LOOKED_AT = 100  # to see which lines they reach
SEEDS_MAX = 30  # for one mutant, of those that reach it


@cache
def source_of(path: str) -> str:
    """As it was when it was first read: a run goes on with it, whatever somebody edits meanwhile."""
    return (PACKAGE / path).read_text(encoding="utf-8")


def files_of_tests() -> list[str]:
    found = [str(path) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if Path(path).name not in NOT_TESTS]
