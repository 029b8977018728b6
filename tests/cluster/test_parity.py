"""Parity with real daemons, ranks and kills: what no slot holds any more comes back bit-exact (P3, P9, P10; REFT, section 4)."""

from __future__ import annotations

import pytest

from tests.cluster.damage import flip_in_memory
from tests.cluster.nodes import Cluster, together
from tests.waiting import until

JOB = "parity"


@pytest.mark.parametrize("lost", [0, *(pytest.param(lost, marks=pytest.mark.chaos) for lost in (1, 2))])
def test_xor_gives_back_what_any_one_node_held(nodes: Cluster, lost: int) -> None:
    made, world, digests = nodes.protected(JOB, 3, "xor(3)")
    made[lost].kill()
    world[lost].kill()
    left = [node for at, node in enumerate(made) if at != lost]
    again = nodes.again(world, on=left)
    assert together(again, "restore") == [3, 3]
    assert together(again, "digest") == digests[:2]
    assert sum(rank.do("last_restore")["bytes"]["parity"] for rank in again) > 0


@pytest.mark.chaos
def test_reed_solomon_gives_back_what_any_two_nodes_held(nodes: Cluster) -> None:
    made, world, digests = nodes.protected(JOB, 4, "rs(2,2)")
    for at in (1, 2):
        made[at].kill()
        world[at].kill()
    again = nodes.again(world, on=[made[0], made[3]])
    assert together(again, "restore") == [3, 3]
    assert together(again, "digest") == digests[:2]


@pytest.mark.chaos
def test_parity_is_taken_back_after_a_crash_and_used(nodes: Cluster) -> None:
    """P7: kill -9 of the daemons that hold it; what their keepers kept is what a loss is made good from."""
    made, world, digests = nodes.protected(JOB, 3, "xor(3)")
    for node in made[:2]:
        node.crash()
    until(lambda: made[0].newest(JOB, "protected") == 3, 45, "the level to be certified anew")
    made[2].kill()
    again = nodes.again(world, on=made[:2])
    assert together(again, "restore") == [3, 3]
    assert together(again, "digest") == digests[:2]


def test_one_corrupt_block_counts_as_the_loss(nodes: Cluster) -> None:
    """P10: a bit of rank 0's own slot: found before training sees it, and made good from parity."""
    made, world, digests = nodes.protected(JOB, 3, "xor(3)")
    ours = bytes.fromhex(world[0].do("bytes_of", name="2.weight"))
    assert flip_in_memory(made[0].daemon_pid(), ours) == 1
    again = nodes.again(world)
    assert together(again, "restore") == [3, 3, 3]
    assert together(again, "digest") == digests
    assert again[0].do("last_restore")["bytes"]["parity"] > 0
    assert "slot" in made[0].problems()["damage"]


@pytest.mark.chaos
def test_what_only_parity_can_bring_becomes_durable(nodes: Cluster) -> None:
    """P14: a node and its rank are gone, nobody comes back: the step is written from what is left, the lost part too."""
    storage = nodes.root / "storage"
    storage.mkdir()
    made, world, digests = nodes.protected(JOB, 3, "xor(3)", storage_root=storage, breakpoint_grace_s=2)
    made[1].kill()
    for trainer in world:
        trainer.kill()
    until(lambda: made[0].newest(JOB, "durable") == 3, 60, "the step to be written")
    for node in (made[0], made[2]):
        node.kill()
    fresh = nodes.several(2, redundancy="replicas=1", storage_root=storage)
    again = nodes.world(fresh, JOB, kind="fsdp")
    assert together(again, "restore") == [3, 3]
    assert together(again, "digest") == digests[:2]


@pytest.mark.chaos
def test_a_lost_part_is_made_again_where_there_is_room_for_it(nodes: Cluster) -> None:
    """A daemon loses its memory and comes back empty: protection returns to what is wanted without a new snapshot."""
    made, *_ = nodes.protected(JOB, 4, "xor(3)")
    made[3].kill()
    until(lambda: made[0].job(JOB)["level"] == 0, 45, "the loss to be noticed")
    made[3].start()
    until(lambda: made[0].job(JOB)["level"] == 1, 60, "the lost parity and slot to be made again")
    assert made[0].newest(JOB, "protected") == 3
