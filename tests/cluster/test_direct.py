"""restore() where there is no room for a second copy: direct mode, in parts, from every source (P1, P8, P9, D11)."""

from __future__ import annotations

from typing import Any

from tests.cluster.nodes import Cluster, Trainer, TrainerError, together
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB, KIND = "direct", "wide_fsdp"  # 3.2 MB of state, half of it on each of two ranks
NO_ROOM = "1MiB"  # neither for a slot, nor for a replica that comes between two attempts, nor for half of the state


def how(trainer: Trainer) -> tuple[str, dict[str, int]]:
    said: dict[str, Any] = trainer.do("last_restore")
    return said["mode"], said["bytes"]


def killed(world: list[Trainer]) -> None:
    for trainer in world:
        trainer.kill()


def test_from_durable_storage(nodes: Cluster) -> None:
    """Everything died; a fresh daemon without room gives the step back, bit by bit."""
    storage = nodes.root / "storage"
    storage.mkdir()
    world = nodes.world(nodes.several(2, storage_root=storage), JOB, kind=KIND)
    assert together(world, "restore") == [None, None]
    digest = protected(world)
    assert together(world, "wait", level="durable") == ["durable", "durable"]
    killed(world)
    for node in nodes.nodes:
        node.kill()
    fresh = nodes.node(storage_root=storage, memory_budget=NO_ROOM)
    (alone,) = nodes.world([fresh], JOB, kind=KIND)
    assert alone.do("restore") == 2
    assert alone.do("digest") == digest
    mode, moved = how(alone)
    assert mode == "direct" and moved["own"] == moved["peer"] == 0 and moved["durable"] > 3e6
    until(lambda: fresh.get("/status")["memory"]["used_bytes"] == 0, 45, "the scratch memory to be given back")


def test_from_a_peer_and_a_failure_in_the_middle_of_it(nodes: Cluster) -> None:
    """One rank's daemon has room, the other's has not and fails in mid-direct: both raise and say that objects are dirty.
    The same processes restore the very same snapshot when they ask again."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind=KIND)
    together(world, "restore")
    digest = protected(world)
    killed(world)
    second.kill()
    fresh = nodes.node(memory_budget=NO_ROOM, start=False).start(failpoint="restore.part:error")
    world = nodes.world([first, fresh], JOB, kind=KIND)
    before = world[1].do("bytes_of", name="0.weight")
    for error in together(world, "restore"):
        assert isinstance(error, TrainerError) and str(error).startswith("CkptdError"), error
        assert "rank 1: it had begun to write" in str(error) and "its objects are dirty" in str(error), error
        assert "restore() again" in str(error), error
    assert world[1].do("bytes_of", name="0.weight") != before, "it was written to"
    fresh.kill()
    fresh.start()
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [digest, digest]
    (mode, moved), (direct, fetched) = how(world[0]), how(world[1])
    assert mode == "verified" and moved["peer"] == 0
    assert direct == "direct" and fetched["peer"] > 1.5e6


def test_from_own_memory_and_a_peers_together(nodes: Cluster) -> None:
    """What lies here is taken from where it lies, and only the other half comes in parts."""
    here = nodes.node(replicas=0, memory_budget="3600KiB", start=False).start(wait=False)
    there = nodes.node(replicas=0, start=False).start(wait=False)
    for node in (here, there):
        node.until_up()
    world = nodes.world([here, there], JOB, kind=KIND)
    assert together(world, "restore") == [None, None]
    together(world, "train", steps=1)
    together(world, "snapshot", must=True)
    assert together(world, "wait", level="sealed") == ["sealed", "sealed"]
    digest = together(world, "digest")[0]
    killed(world)
    (alone,) = nodes.world([here], JOB, kind=KIND)
    assert alone.do("restore") == 1
    assert alone.do("digest") == digest
    mode, moved = how(alone)
    assert mode == "direct" and moved["own"] > 1.5e6 and moved["peer"] > 1.5e6
