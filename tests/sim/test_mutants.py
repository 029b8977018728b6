"""The simulator must find deliberate mistakes: a model that never complains proves nothing."""

from __future__ import annotations

import pytest

from tests.sim.mutants import FIRST, MUTANTS, RARE
from tests.sim.world import World

SEEDS_MAX = 400


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
