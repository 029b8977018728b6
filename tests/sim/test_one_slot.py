"""Memory for one snapshot of each rank (P14): storage takes over what fills the slot, and the next one gets it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.world import World


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.chaos), *range(1, 12)])
def test_snapshots_keep_completing_with_one_slot(seed: int) -> None:
    """Under faults, in whatever world; without the flush none of these seeds ends."""
    first = World(seed)
    for world in first.everyone:
        world.policy = replace(world.policy, own_slots=1, durable=True)
    assert first.run().counts["certified"] > 0
