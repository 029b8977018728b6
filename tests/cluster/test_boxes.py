"""An engine's own state, handed over by boxes, over real daemons: a node dies, and another world goes on (P1, P9, D18)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "boxes"
STEPS = 4


def trained(nodes: Cluster, on: Sequence[Node], job: str = JOB) -> list[Trainer]:
    world = nodes.world(on, job, kind="zero")
    assert together(world, "restore") == [None] * len(on)
    return world


def test_a_node_dies_and_fewer_ranks_go_on_as_if_nothing_had_been(nodes: Cluster) -> None:
    """Four digits of a loss would not tell a moment that is another rank's: the digests are of all bits."""
    three = nodes.several(3)
    world = trained(nodes, three)
    together(world, "train", steps=STEPS)
    digests = together(world, "digest")
    together(world, "snapshot", must=True)
    assert all("protected" in str(said) for said in together(world, "wait", level="protected")), three[0].log.read_text()[-3000:]
    after = together(world, "train", steps=2, snapshot=False)
    ends = together(world, "digest")
    assert len({*digests}) == len({*ends}) == 1
    for trainer in world:
        trainer.kill()
    three[2].kill()
    two = nodes.world(three[:2], JOB, kind="zero")
    assert together(two, "restore") == [STEPS] * 2
    assert together(two, "digest") == digests[:2]
    assert [said["loss"] for said in together(two, "train", steps=2)] == [said["loss"] for said in after[:2]]
    assert together(two, "digest") == ends[:2]
    sources = [source for said in together(two, "last_restore") for source, nbytes in said["bytes"].items() if nbytes]
    assert {*sources} == {"own", "peer"}


@pytest.mark.chaos
def test_copies_that_differ_void_the_snapshot_and_are_told(nodes: Cluster) -> None:
    """D7: copies by contract that differ are silent corruption."""
    pair = nodes.several(2)
    world = trained(nodes, pair)
    together(world, "train", steps=1)
    assert all("protected" in str(said) for said in together(world, "wait", level="protected"))
    world[1].do("spoil")
    together(world, "snapshot", step=2, must=True)
    told = "silent corruption: copies of model.0.weight at [0,0] differ between rank 0 and rank 1"
    until(lambda: all(told in str(said) for said in together(world, "lost")), 20, "both ranks are told")
    assert all(told in str(said["problems"]) for said in together(world, "health"))
