"""The simulator must find deliberate mistakes: a model that never complains proves nothing."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, RARE
from tests.sim.world import World

SEEDS_MAX = 400
# Where they are rare, in the world as it is: the same promise is kept with fewer seeds. A wrong number here costs time and no more.
FIRST = {
    "level: copies are domains": 1371, "level: parity survives all": 3, "level: prefixes are whole": 48,
    "level: the best rank counts": 3, "no epoch check": 21, "no file sync": 68, "no manifest sync": 89, "no pins": 17,
    "no second copy": 61, "trust a return": 21,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(RARE)))
def test_the_mistake_is_found(name: str) -> None:
    first = FIRST.get(name, 0)
    assert any(breaks(seed, name) for seed in range(first, first + SEEDS_MAX)), f"{name!r} went unnoticed in {SEEDS_MAX} seeds"


def breaks(seed: int, name: str) -> bool:
    """A promise or an invariant."""
    try:
        World(seed, mutant=name).run()
    except AssertionError:
        return True
    return False
