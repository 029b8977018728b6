"""Frozen parameters end to end: in memory once per node, sent once to each peer, and in every snapshot all the same (D6)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.damage import flip_in_memory
from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB = "adapters"
MIB = 1 << 20
FROZEN_BYTES = 16 * MIB  # of the whole job; each of two ranks has half of it
QUARANTINED = f'ckptd_quarantines_total{{job="{os.getuid()}/{JOB}",where="memory"}}'


def trained(nodes: Cluster, steps: int) -> tuple[Node, Node, list[Trainer], str]:
    """Two nodes with a rank each, after so many protected steps; the newest one's digest."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="adapters_fsdp")
    together(world, "restore")
    return first, second, world, [protected(world, steps=1) for _ in range(steps)][-1]


def test_frozen_parameters_lie_in_memory_once_and_come_back_from_a_peer(nodes: Cluster) -> None:
    """P3, P9: a node dies; the survivor has both halves of the frozen part, though they were sent once."""
    first, second, world, digest = trained(nodes, 5)
    memory = first.get("/status")["memory"]
    slots = int(first.settings.get("own_slots", 3))
    assert memory["own_bytes"] < slots * 4 * MIB + FROZEN_BYTES // 2 + 4 * MIB, memory
    assert FROZEN_BYTES // 2 < memory["peer_bytes"] < FROZEN_BYTES // 2 + 3 * 4 * MIB, memory
    second.kill()
    for trainer in world:
        trainer.kill()
    (alone,) = nodes.world([first], JOB, kind="adapters_fsdp")
    assert alone.do("restore") == 5
    assert alone.do("digest") == digest
    moved = alone.do("last_restore")["bytes"]
    assert moved["durable"] == 0 and moved["own"] > FROZEN_BYTES
    assert protected_alone(alone, first) == 6


def protected_alone(trainer: Trainer, node: Node) -> int:
    """One more step of a job on one node, after which what it had before is not needed any more."""
    trainer.do("train", steps=1, snapshot=False)
    assert "skipped" not in trainer.do("snapshot", must=True)
    until(lambda: node.newest(JOB, "sealed") == 6, 45, "the next step")
    return 6


def test_a_killed_daemon_finds_the_frozen_part_again(nodes: Cluster) -> None:
    """P7: nothing is copied; what was sealed before leans on what the keeper kept."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    trainer.do("restore")
    trainer.do("train", steps=3, snapshot=False)
    digest = trainer.do("digest")
    assert "skipped" not in trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="sealed") == "sealed"
    node.crash()
    until(lambda: node.newest(JOB, "sealed") == 3, 45, "the step that was sealed before")
    trainer.kill()
    (again,) = nodes.world([node], JOB, kind="adapters")
    assert again.do("restore") == 3
    assert again.do("digest") == digest
    assert again.do("last_restore")["bytes"]["own"] > FROZEN_BYTES


def test_training_goes_on_over_a_killed_daemon(nodes: Cluster) -> None:
    """What the trainer had captured is still good for the daemon that took it back: no new memory."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    trainer.do("restore")
    trainer.do("train", steps=2)
    trainer.do("snapshot", must=True)
    node.crash()
    until(lambda: "skipped" not in trainer.do("train", steps=1)["statuses"][0], 45, "snapshots to go on")
    trainer.do("train", steps=2)
    until(lambda: node.newest(JOB, "sealed") > 3, 45, "a newer step")
    assert node.get("/status")["memory"]["own_bytes"] < 2 * FROZEN_BYTES


@pytest.mark.chaos
def test_a_trainer_that_starts_again_leans_on_what_was_kept(nodes: Cluster) -> None:
    """P14: no memory beyond what there is, and nothing is sent to the peer again."""
    first, second, world, _ = trained(nodes, 3)
    memory = [node.get("/status")["memory"] for node in (first, second)]
    world = nodes.again(world)
    assert together(world, "restore") == [3, 3]
    for _ in range(3):
        digest = protected(world, steps=1)
        for node, before in zip((first, second), memory, strict=True):
            now = node.get("/status")["memory"]
            assert now["own_bytes"] <= before["own_bytes"], "captured into what was there"
            assert now["peer_bytes"] < before["peer_bytes"] + FROZEN_BYTES // 4, "and not sent again"
    world = nodes.again(world)
    assert together(world, "restore") == [6, 6]
    assert together(world, "digest") == [digest, digest]


def test_a_start_with_another_base_model_does_not_lean_on_the_old_one(nodes: Cluster) -> None:
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    trainer.do("restore")
    trainer.do("train", steps=1, snapshot=False)
    assert "skipped" not in trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="sealed") == "sealed"
    trainer.kill()
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    assert trainer.do("restore") == 1
    trainer.do("thaw")
    until(lambda: _taken(trainer), 45, "a snapshot of the new one")
    digest, step = trainer.do("digest"), node.newest(JOB, "sealed")
    trainer.kill()
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    assert trainer.do("restore") == step > 1
    assert trainer.do("digest") == digest


def _taken(trainer: Trainer) -> bool:
    trainer.do("train", steps=1, snapshot=False)
    trainer.do("snapshot", must=True)
    return str(trainer.do("wait", level="sealed")) == "sealed"


@pytest.mark.chaos
def test_a_new_base_model_is_captured_and_the_old_one_goes(nodes: Cluster) -> None:
    first, second, world, _ = trained(nodes, 3)
    before = [node.get("/status")["memory"] for node in (first, second)]
    together(world, "thaw")
    for _ in range(5):
        digest = protected(world, steps=1)
    for node, memory in zip((first, second), before, strict=True):
        until(lambda: node.get("/status")["memory"]["own_bytes"] <= memory["own_bytes"], 45, "the old copy to go")  # noqa: B023
        until(lambda: node.get("/status")["memory"]["peer_bytes"] <= memory["peer_bytes"], 45, "the old copy to go")  # noqa: B023
    world = nodes.again(world)
    assert together(world, "restore") == [8, 8]
    assert together(world, "digest") == [digest, digest]


def test_storage_has_the_frozen_part_in_every_checkpoint(nodes: Cluster) -> None:
    """P4: the format knows nothing of it."""
    storage: Path = nodes.root / "storage"
    storage.mkdir()
    node = nodes.node(replicas=0, storage_root=storage)
    (trainer,) = nodes.world([node], JOB, kind="adapters")
    trainer.do("restore")
    trainer.do("train", steps=2, snapshot=False)
    digest = trainer.do("digest")
    trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="durable") == "durable"
    trainer.kill()
    node.kill()
    (again,) = nodes.world([nodes.node("later", replicas=0, storage_root=storage)], JOB, kind="adapters")
    assert again.do("restore") == 2
    assert again.do("digest") == digest
    assert again.do("last_restore")["bytes"]["durable"] > FROZEN_BYTES


@pytest.mark.chaos
def test_damage_in_a_frozen_part_is_found_and_it_is_captured_anew(nodes: Cluster) -> None:
    """P10: every snapshot that leans on it is damaged; the peer's copies serve, and the next snapshot gets a sound one."""
    first, second, world, digest = trained(nodes, 2)
    ours = bytes.fromhex(world[0].do("bytes_of", name="3.1.weight"))
    assert flip_in_memory(first.daemon_pid(), ours) == 1, "rank 0's own copy, once"
    world = nodes.again(world)
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [digest, digest]
    assert world[0].do("last_restore")["bytes"]["peer"] > 0
    assert first.metric(QUARANTINED) >= 1 and second.metric(QUARANTINED) == 0
    for _ in range(3):
        digest = protected(world, steps=1)
    world = nodes.again(world)
    assert together(world, "restore") == [5, 5]
    assert together(world, "digest") == [digest, digest]
    assert first.metric(QUARANTINED) >= 1 and second.metric(QUARANTINED) == 0
