"""P1, P4, P11, P12 over hundreds of power cuts, and the proof that they would find a mistake: `make chaos`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.power.__main__ import summary, table, told
from tests.power.disk import MKFS, NoDisk
from tests.power.episode import Bench, Outcome
from tests.power.mutants import MUTANTS

pytestmark = [pytest.mark.root, pytest.mark.chaos]

EPISODES = 24  # per kind of file system, 6 power cuts each; beside other work some end before the point they were to be cut at
CUTS_MIN = 300  # of all kinds together
HITS_MIN = 3  # of each failpoint and each acknowledgement
MUTANT_EPISODES = 6  # per kind; each ends when the mistake shows


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    return {kind: Bench(kind, tmp_path_factory.mktemp(kind)) for kind in sorted(MKFS)}


def campaign(bench: Bench, episodes: int, mutant: str = "") -> list[Outcome]:
    try:
        with bench:
            return [bench.episode(seed, mutant=mutant) for seed in range(episodes)]
    except NoDisk as why:
        pytest.skip(str(why))


def test_hundreds_of_power_cuts(benches: dict[str, Bench], capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {kind: campaign(bench, EPISODES) for kind, bench in benches.items()}
    with capsys.disabled():
        print()
        for kind, found in outcomes.items():
            print(f"{kind}: {summary(found)}")
        print(table(outcomes))
    broken = [told(kind, "", cut) for kind, found in outcomes.items() for one in found for cut in one.broken]
    assert not broken, "\n".join(broken)
    cuts = [cut for found in outcomes.values() for one in found for cut in one.cuts]
    assert len(cuts) >= CUTS_MIN
    hits = Counter(cut.where for cut in cuts)
    named = {name for bench in benches.values() for name in bench.named()}
    assert not {name: hits[name] for name in named if hits[name] < HITS_MIN}
    assert sum(one.there for found in outcomes.values() for one in found), "no cut came after a rename"


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mistake_is_found(name: str, benches: dict[str, Bench], capsys: pytest.CaptureFixture[str]) -> None:
    """By a promise: that some lives fail by themselves as well, as where two attempts meet, shows nothing."""
    found = [one for kind in ("ext4", "xfs") for one in campaign(benches[kind], MUTANT_EPISODES, name)]
    caught, points = sum(len(one.shown) for one in found), sum(len(one.cuts) for one in found)
    with capsys.disabled():
        print(f"\n{name}: {caught} of {points} power cuts show it", end=" ")
    assert caught, f"{points} power cuts, and nobody noticed"
