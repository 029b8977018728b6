"""P1, P4, P11, P12: whole lives of a node, each ended by a power cut at another point; a handful in every run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.power.__main__ import told
from tests.power.disk import NoDisk
from tests.power.episode import Bench

pytestmark = pytest.mark.root


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.chaos)])
def test_what_was_promised_survives(kind: str, tmp_path: Path) -> None:
    try:
        with Bench(kind, tmp_path) as bench:
            outcome = bench.episode(0)
    except NoDisk as why:
        pytest.skip(str(why))
    assert not outcome.broken, "\n".join(told(kind, "", cut) for cut in outcome.broken)
    assert len({cut.where for cut in outcome.cuts}) > 1


def test_a_mistake_is_found(tmp_path: Path) -> None:
    """The others are in `make chaos`."""
    try:
        with Bench("xfs", tmp_path) as bench:
            outcomes = (bench.episode(seed, mutant="no_fsync") for seed in range(5))
            found = any(outcome.shown for outcome in outcomes)
    except NoDisk as why:
        pytest.skip(str(why))
    assert found, "nobody noticed"
