"""The simulator must find deliberate mistakes: a model that never complains proves nothing."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.sim.mutants import FIRST, MATTERS, MUTANTS, RARE
from tests.sim.world import World

SEEDS_MAX = 400


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(RARE)))
def test_the_mistake_is_found(name: str) -> None:
    worlds = (World(seed, mutant=name) for seed in count(FIRST.get(name, 0)))
    matters = MATTERS.get(name, lambda domains: True)
    some = islice((world for world in worlds if matters([host.domain for host in world.hosts.values()])), SEEDS_MAX)
    assert any(breaks(world) for world in some), f"{name!r} went unnoticed in {SEEDS_MAX} seeds"


def breaks(world: World) -> bool:
    """A promise or an invariant."""
    try:
        world.run()
    except AssertionError:
        return True
    return False
