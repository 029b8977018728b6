"""The journey end to end with real processes: snapshot, peer memory, durable, restore (P1-P4, P6, P7, P9)."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "spine"
SLOTS, SLOT_BYTES = 3, 2 << 20  # the default number, and the grain that a small state is rounded up to
STOPPED_S = 2.0  # more than half of the nodes' steward_timeout_s


def storage_of(nodes: Cluster) -> Path:
    path = nodes.root / "storage"
    path.mkdir(exist_ok=True)
    return path


def test_peer_memory_gives_the_step_back_into_a_smaller_world(nodes: Cluster) -> None:
    """P3, P9: a whole node dies; the survivor restores the newest protected step from memory, resharded."""
    first, second = nodes.node(), nodes.node()
    world = nodes.world([first, second], JOB, kind="fsdp")
    assert together(world, "restore") == [None, None]
    steps = 0

    def is_protected() -> bool:  # six steps may be over before anything is granted
        nonlocal steps
        steps = together(world, "train", steps=1)[0]["step"]
        return first.newest(JOB, "protected") >= 1

    until(is_protected, 45, "a protected step")
    digests = together(world, "digest")
    assert together(world, "snapshot", must=True)[0]
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    second.kill()
    for trainer in world:
        trainer.kill()
    (alone,) = nodes.world([first], JOB, kind="fsdp")
    assert alone.do("restore") == steps
    assert alone.do("digest") == digests[0]
    moved = alone.do("last_restore")["bytes"]
    assert moved["durable"] == 0 and moved["own"] > 0
    assert alone.do("train", steps=2)["step"] == steps + 2


def test_a_second_restore_in_the_same_processes_goes_on(nodes: Cluster) -> None:
    """P14: back to the last snapshot after a spike of the loss. What had been granted ahead is given back."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    for _ in range(3):
        together(world, "train", steps=1, snapshot=False)
        digests = together(world, "digest")
        together(world, "snapshot", must=True)
        assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    for _ in range(2):
        together(world, "train", steps=2, snapshot=False)
        assert together(world, "restore") == [3, 3]
        assert together(world, "digest") == digests
    for _ in range(4):  # more than there are slots
        together(world, "train", steps=1, snapshot=False)
        together(world, "snapshot", must=True)
        assert all("protected" in str(answer) for answer in together(world, "wait", level="protected", timeout=20))


def test_own_memory_survives_the_trainer(nodes: Cluster) -> None:
    """P6: a trainer is killed; its daemon's memory alone gives the state back."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB)
    assert trainer.do("restore") is None
    assert trainer.do("last_restore")["mode"] == "fresh" and trainer.do("last_restore")["bytes"] == {}
    trainer.do("train", steps=3)
    digest = trainer.do("digest")
    trainer.do("snapshot", must=True)
    trainer.do("wait", level="sealed")
    trainer.kill()
    (again,) = nodes.world([node], JOB)
    assert again.do("restore") == 3
    assert again.do("digest") == digest
    said = again.do("last_restore")
    moved = said["bytes"]
    assert said["mode"] == "verified"
    assert moved["own"] > 0 and moved["peer"] == moved["durable"] == 0


def test_a_killed_daemon_comes_back_with_its_memory(nodes: Cluster) -> None:
    """P5, P7: the keeper restarts it, nothing is copied, training did not notice."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    trainer.do("train", steps=3)
    trainer.do("snapshot", must=True)
    trainer.do("wait", level="sealed")
    until(lambda: node.get("/status")["memory"]["own_bytes"] == SLOTS * SLOT_BYTES, 45, "all slots")
    before, used = node.daemon_pid(), node.get("/status")["memory"]["own_bytes"]
    node.signal_daemon(signal.SIGKILL)
    trainer.do("train", steps=3)
    after = until(lambda: node.daemon_other_than(before), 45, "the daemon to be back")
    assert after != before
    assert node.get("/status")["memory"]["own_bytes"] == used
    until(lambda: node.newest(JOB, "sealed") >= 3, 45, "the step that was sealed before")
    until(lambda: "skipped" not in trainer.do("train", steps=1)["statuses"][0], 45, "snapshots to go on")
    until(lambda: goes_on(node, trainer) > 3, 45, "a newer step")


def goes_on(node: Node, trainer: Trainer) -> int:
    """One more step; the newest one that is sealed."""
    trainer.do("train", steps=1)
    return node.newest(JOB, "sealed")


def test_what_a_daemon_that_stood_still_had_not_certified_is_void_and_told(nodes: Cluster) -> None:
    """P3, P15: while it was stopped for half of steward_timeout_s another node might have spoken, so it begins anew. What was
    captured in that moment counts for nothing, its rank is told, and the next one is sealed."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    trainer.do("train", steps=1)
    trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="sealed") == "sealed"
    trainer.do("arm", failpoints=f"capture.sealing:sleep={STOPPED_S / 2}")  # the seal comes while it is stopped
    until(lambda: "capturing" in trainer.do("train", steps=1)["statuses"][0], 45, "a snapshot")
    node.signal_daemon(signal.SIGSTOP)
    stopped_at = time.monotonic()
    until(lambda: time.monotonic() - stopped_at > STOPPED_S)
    node.signal_daemon(signal.SIGCONT)
    until(lambda: "void: the steward began anew" in trainer.do("lost"), 45, "the rank to be told")
    assert node.newest(JOB, "sealed") == 1
    trainer.do("arm", failpoints="")
    until(lambda: goes_on(node, trainer) > 1, 45, "a newer step")


def test_durable_gives_the_step_back_after_everything_died(nodes: Cluster) -> None:
    """P4, P9: fresh daemons, another world, storage alone."""
    storage = storage_of(nodes)
    first, second = nodes.node(storage_root=storage), nodes.node(storage_root=storage)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    together(world, "train", steps=4)
    digests = together(world, "digest")
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    for trainer in world:
        trainer.kill()
    first.kill()
    second.kill()
    fresh = nodes.node(storage_root=storage)
    (alone,) = nodes.world([fresh], JOB, kind="fsdp")
    assert alone.do("restore") == 4
    assert alone.do("digest") == digests[0]
    moved = alone.do("last_restore")["bytes"]
    assert moved["durable"] > 0 and moved["own"] == moved["peer"] == 0
