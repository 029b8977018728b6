"""Processes that die or stand still at the worst moment: the previous snapshot is whole, the rest goes on (P5, P6, P7, P14)."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Node, Trainer, TrainerError, together
from tests.cluster.test_bad_jobs import sealed
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB = "deaths"
RESTORE_BOUND_S = 40.0  # far below every timeout that would mean hanging


def once(nodes: Cluster, *points: str) -> tuple[str, list[Path]]:
    """Failpoints that kill a daemon once each, and the files that show that they did."""
    files = [nodes.root / f"killed-{point}" for point in points]
    return ",".join(f"{point}:kill_once={file}" for point, file in zip(points, files, strict=True)), files


def test_a_wait_takes_again_what_its_daemon_lost_amid_a_seal(nodes: Cluster) -> None:
    """P15: it was "captured" until the wait's time was over, and no memory held any of it."""
    node = nodes.node(start=False, replicas=0)
    point, (mark,) = once(nodes, "seal.begin")
    node.start(failpoint=point)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    trainer.do("train", steps=1, snapshot=False)
    trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="sealed") == "sealed"
    assert mark.exists(), "the daemon was killed"


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_two_ranks_that_wait_take_again_what_one_daemon_lost_amid_a_seal(nodes: Cluster, killed: int) -> None:
    """P15: one of them took the step again first, and the slot that this gave the other one hid that nobody held its first capture.
    killed: the steward's, or the other one."""
    pair = [nodes.node(start=False, replicas=0) for _ in range(2)]
    point, (mark,) = once(nodes, "seal.summed")
    for at, node in enumerate(pair):
        node.start(failpoint=point if at == killed else "")
    world = nodes.world(pair, JOB)
    together(world, "restore")
    together(world, "train", steps=1, snapshot=False)
    together(world, "snapshot", must=True)
    assert together(world, "wait", level="sealed") == ["sealed", "sealed"]
    assert mark.exists(), "the daemon was killed"


def test_a_wait_takes_again_what_was_void_as_its_daemon_was_lost(nodes: Cluster) -> None:
    """P14: it said so at once, and went on to where its rank met the others, which waited for it to take the step again with them
    for ten minutes."""
    pair = nodes.several(2, replicas=0)
    world = nodes.world(pair, JOB)
    together(world, "restore")
    together(world, "train", steps=1, snapshot=False)
    world[1].do("arm", failpoints="capture.sealing:sleep=1")
    together(world, "snapshot", must=True)
    pair[1].signal_daemon(signal.SIGKILL)
    assert together(world, "wait", level="sealed") == ["sealed", "sealed"]


def test_a_trainer_goes_on_with_a_daemon_that_lost_its_memory(nodes: Cluster) -> None:
    """P7, P14: it gives its own back; for the rest of its life nothing was granted to it any more (a trainer's author)."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    sealed(trainer, 2)
    node.kill()
    node.start()
    until(lambda: node.newest(JOB, "sealed") == 2, 45, "the trainer to give it back")
    digest = sealed(trainer, 1)
    assert node.newest(JOB, "sealed") == 3
    (trainer,) = nodes.again([trainer])
    assert (trainer.do("restore"), trainer.do("digest")) == (3, digest)


def test_a_trainer_killed_in_mid_capture_and_in_mid_restore(nodes: Cluster) -> None:
    """P6: the previous snapshot is restorable bit by bit, the half-written slot is free again."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB, kind="wide")
    trainer.do("restore")
    digest = sealed(trainer, 2)
    step = 2
    for point in ("capture.tensor", "capture.sealing", "restore.load"):
        # whichever thread copies first: the engine's own, or the training thread that has caught up
        trainer.do("arm", failpoints=f"{point}:kill,capture.helping:kill")
        if point == "restore.load":
            trainer.do("again", job=JOB, kind="wide")
            trainer.ask("restore")
        else:
            trainer.do("train", snapshot=False)
            trainer.ask("snapshot", must=True)
        assert trainer.until_ended(), point
        (trainer,) = nodes.world([node], JOB, kind="wide")
        assert trainer.do("restore") == step, point
        assert trainer.do("digest") == digest, point
        digest = sealed(trainer, 1)  # a slot is there for it
        step += 1
    own = node.get("/status")["memory"]["own_bytes"]
    digest = sealed(trainer, 4)
    assert node.get("/status")["memory"]["own_bytes"] == own  # nothing leaks into slots that nobody fills


def test_one_rank_dies_in_mid_restore(nodes: Cluster) -> None:
    """D11: all ranks or none; the next start gets it."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    digest = protected(world)
    together(world, "again", job=JOB, kind="fsdp")
    world[1].do("arm", failpoints="restore.load:kill")
    for trainer in world:
        trainer.ask("restore")
    world[1].until_ended()
    started = time.monotonic()
    with pytest.raises(TrainerError, match="rank 1"):
        world[0].answer()
    assert time.monotonic() - started < RESTORE_BOUND_S
    world[0].kill()
    world = nodes.world([first, second], JOB, kind="fsdp")
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [digest, digest]


def test_daemons_killed_while_they_protect_and_flush(nodes: Cluster) -> None:
    """P4, P7, P14: each dies at three places and is brought back by its keeper; training goes on, all becomes durable."""
    settings: dict[str, Any] = {"storage_root": nodes.root / "storage", "flush_every_steps": 1}
    sender, sent = once(nodes, "protect.push", "persist.write.chunk", "persist.commit.manifest")
    receiver, received = once(nodes, "protect.seal", "persist.write.synced")
    first = nodes.node(start=False, **settings).start(wait=False, failpoint=sender)
    second = nodes.node(start=False, **settings).start(wait=False, failpoint=receiver)
    for node in (first, second):
        node.until_up()
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")

    def all_died() -> bool:
        answers = together(world, "train", steps=1)
        assert not any(isinstance(answer, TrainerError) for answer in answers), answers
        return all(file.exists() for file in (*sent, *received))

    until(all_died, 60, f"all of {sent + received} to be there")
    until(lambda: back(first) and back(second), 45, "both daemons to be back")
    step = until(lambda: durable_step(world), 60, "durable again")
    digests = together(world, "digest")
    for trainer in world:
        trainer.kill()
    for node in (first, second):
        node.kill()
    assert first.cli("verify", nodes.root / "storage").returncode == 0
    fresh = nodes.node(storage_root=nodes.root / "storage")
    (alone,) = nodes.world([fresh], JOB, kind="fsdp")
    assert alone.do("restore", allow_fresh=False) == step
    assert alone.do("digest") == digests[0]


def durable_step(world: list[Trainer]) -> int:
    """One more step; its number when it is durable."""
    step = int(together(world, "train", steps=1)[0]["step"])
    return step if together(world, "wait", level="durable", timeout=5) == ["durable", "durable"] else 0


def back(node: Node) -> bool:
    try:
        return bool(node.get("/status"))
    except OSError:
        return False


@pytest.mark.chaos
def test_a_daemon_that_dies_while_it_serves_a_restore(nodes: Cluster) -> None:
    """P9, D11: every rank gets the state or an error, in bounded time; the next try gets it."""
    first = nodes.node(start=False).start(wait=False)
    points, files = once(nodes, "fetch.serve")
    second = nodes.node(start=False).start(wait=False, failpoint=points)
    for node in (first, second):
        node.until_up()
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    digest = protected(world)
    for trainer in world:
        trainer.kill()
    first.kill()
    third = nodes.node()  # has nothing: the other node must serve
    world = nodes.world([third, second], JOB, kind="fsdp")
    started = time.monotonic()
    answers = together(world, "restore")
    assert time.monotonic() - started < RESTORE_BOUND_S
    assert files[0].exists(), "nothing was served"
    assert answers == [2, 2] or all(isinstance(answer, TrainerError) for answer in answers), answers
    if answers != [2, 2]:
        until(lambda: back(second), 45, "the daemon to be back")
        together(world, "again", job=JOB, kind="fsdp")
        assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [digest, digest]


def test_a_stopped_daemon_holds_nobody_up(nodes: Cluster) -> None:
    """P5, P14: while one daemon stands still its rank trains on as fast as ever; then everything is protected again."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="fsdp")
    together(world, "restore")
    protected(world)
    second.signal_daemon(signal.SIGSTOP)
    try:
        started = time.monotonic()
        answers = together(world, "train", steps=30)
        assert time.monotonic() - started < 20, "thirty tiny steps"
        assert [answer["step"] for answer in answers] == [32, 32]
        assert any("skipped" in status for status in answers[1]["statuses"])
    finally:
        second.signal_daemon(signal.SIGCONT)
    until(lambda: together(world, "train", steps=1) and first.newest(JOB, "protected") > 32, 45, "protection to go on")
    (nobody,) = nodes.world([nodes.node(start=False)], "nobody")  # and where no daemon ever was
    assert nobody.do("train", steps=1)["statuses"] == ["skipped: no daemon"]
    with pytest.raises(TrainerError, match="NoDaemon: no daemon for rank 0"):
        nobody.do("restore")
