"""Little memory (P14): where it is one slot of each rank, storage takes over what fills it, and the next one gets it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.config import Config
from ckptd.core.redundancy.policies import Replicas
from tests.sim.world import World

SECONDS = 60.0  # simulated


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.chaos), *range(1, 12)])
def test_snapshots_keep_completing_with_one_slot(seed: int) -> None:
    """Under faults, in whatever world; without the flush none of these seeds ends."""
    first = World(seed)
    for world in first.everyone:
        world.policy = replace(world.policy, own_slots=1, durable=True)
    assert first.run().counts["certified"] > 0


def least(name: str) -> int:
    """That a daemon accepts."""
    return next(int(bound.ge) for bound in Config.model_fields[name].metadata if hasattr(bound, "ge"))


def test_with_the_least_that_may_be_configured_newer_snapshots_become_protected() -> None:
    """A peer with one place for each rank would never have one for a newer copy: the older goes only when that is there (P3)."""
    world = World(2)
    world.policy = replace(
        world.policy, redundancy=Replicas(1), replicas=1, own_slots=least("own_slots"), peer_sets=least("peer_sets"), durable=False
    )
    world.start_without_faults()
    world.clock.run(SECONDS)
    protected = [snapshot.step for snapshot, level in world.oracle.certified_ever.items() if level >= 1]
    assert len(protected) > 5, protected
