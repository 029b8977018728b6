"""keep=True is undone from the program that asked for it: client.release() (P12)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckptd_client import CkptdError, Client

from tests.cluster.nodes import REPO, Cluster, Trainer, TrainerError, together
from tests.waiting import until

JOB = "kept"


def rows(trainer: Trainer) -> dict[int, bool]:
    """step -> kept, of what is on storage."""
    return {row["step"]: row["keep"] for row in trainer.do("steps") if row["durable"]}


def saved(world: list[Trainer], steps: int, **how: bool) -> None:
    together(world, "train", steps=steps, snapshot=False)
    together(world, "snapshot", must=True, **how)
    assert [str(said) for said in together(world, "wait", level="durable")] == ["durable"] * len(world)


def test_what_was_kept_may_go_with_the_next_retention(nodes: Cluster) -> None:
    """By any rank, and by a client that is none."""
    storage = nodes.root / "storage"
    made = nodes.several(2, storage_root=storage, keep_last=1)
    world = nodes.world(made, JOB, kind="fsdp")
    together(world, "restore")
    for kept in (True, True, True, False):
        saved(world, 2, keep=kept)
    first, second = world
    until(lambda: rows(second) == {2: True, 4: True, 6: True, 8: False}, 20, "four, of which three are kept")
    assert [second.do("release", step=step) for step in (4, 8, 5)] == ["released", "not kept", "no such step"]
    until(lambda: rows(first) == {2: True, 6: True, 8: False}, 20, "retention to take step 4 out of sight")
    assert together(world, "release", step=4) != ["released", "released"]
    with Client.connect(job=JOB, socket=made[0].socket, required=True) as beside:
        assert beside.release(2) == "released"
    until(lambda: rows(first) == {6: True, 8: False}, 20, "retention to take step 2 out of sight")
    assert not list(storage.rglob("released/*"))


@pytest.mark.chaos
def test_another_user_releases_nothing(nodes: Cluster) -> None:
    """P13: under the same name he has a job of his own, whatever he says of epochs."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    node = nodes.node(storage_root=nodes.root / "storage", replicas=0, keep_last=1)
    (trainer,) = world = nodes.world([node], JOB)
    trainer.do("restore")
    saved(world, 2, keep=True)
    script = (
        "import os, sys; from ckptd.wire import rank; from ckptd.wire.seqpacket import RankSocket\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "link = RankSocket.connect(sys.argv[1])\n"
        "link.send(rank.Hello(rank.PROTOCOL_VERSION, sys.argv[2], os.getpid())); link.recv(10)\n"
        "link.send(rank.Release(1, 2, 1)); print(link.recv(20)[0].outcome)"
    )
    command = [sys.executable, "-c", script, str(node.socket), JOB]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPO)
    assert answer.stdout == "no such step\n"
    assert rows(trainer) == {2: True}


@pytest.mark.parametrize("at", ["persist.commit.checked", "persist.commit.visible"])
def test_what_is_not_on_storage_yet_is_not_kept_when_it_is(nodes: Cluster, at: str) -> None:
    """Released while it is captured, while it is committed, or a moment before that is said: it comes, and goes like any other."""
    storage = nodes.root / "storage"
    node = nodes.node(storage_root=storage, replicas=0, keep_last=1, start=False)
    node.start(failpoint=f"{at}:sleep=1")
    (trainer,) = world = nodes.world([node], JOB)
    trainer.do("restore")
    trainer.do("train", steps=2, snapshot=False)
    trainer.do("snapshot", must=True, keep=True)
    assert trainer.do("release", step=2) == "released"
    assert "failed: captured before under this step, without this: keep=" in trainer.do("snapshot", keep=True)
    assert trainer.do("wait", level="durable") == "durable"
    until(lambda: rows(trainer) == {2: False}, 20, "step 2 on storage without a mark")
    saved(world, 2)
    until(lambda: rows(trainer) == {4: False}, 20, "retention to take step 2 out of sight")


def test_as_many_are_kept_as_a_library_says(nodes: Cluster) -> None:
    """Given up when a newer one is durable, by one rank; where storage is away meanwhile, with the next save."""
    storage = nodes.root / "storage"
    made = nodes.several(2, storage_root=storage, keep_last=1)
    first, second = world = nodes.world(made, JOB, kind="fsdp")
    together(world, "restore")

    def kept(limit: int, durable: bool = True, **how: object) -> list[int]:
        steps = together(world, "keep", limit=limit, **how)
        assert steps[0] == steps[1]
        if durable:
            assert [str(said) for said in together(world, "wait", level="durable")] == ["durable"] * 2
        return list(steps[0])

    assert [kept(2, stays=[1]) for _ in range(3)] == [[1], [1, 2], [1, 3]]
    assert rows(first) == {1: True, 2: True, 3: True}, "until the next look"
    away = storage.rename(nodes.root / "away")
    together(world, "look")
    assert any("a step that is to be kept no more stays" in text for text in Path(first.log).read_text().splitlines())
    away.rename(storage)
    together(world, "look")
    assert rows(second)[2], "training is held up once for each save"
    assert kept(2) == [3, 4]
    together(world, "look")
    until(lambda: rows(second) == {3: True, 4: True}, 20, "steps 1 and 2 to be out of sight")


def test_what_it_cannot_do_it_says(nodes: Cluster, tmp_path: Path) -> None:
    storage = nodes.root / "storage"
    bare, node = nodes.node(replicas=0), nodes.node(replicas=0, storage_root=storage)
    (trainer,) = nodes.world([bare], "bare")
    trainer.do("restore")
    trainer.do("train")
    with pytest.raises(TrainerError, match=r"(?s)step 1 is not released: this daemon has no storage.*without a storage root"):
        trainer.do("release", step=1)
    assert "no storage root" not in Path(trainer.log).read_text()
    trainer.do("snapshot", keep=True)
    assert "nothing becomes durable: the daemon has no storage root" in Path(trainer.log).read_text()
    world = nodes.world([node], JOB)
    together(world, "restore")
    saved(world, 2, keep=True)
    (old,), (new,) = world, nodes.world([node], JOB)
    assert new.do("restore") == 2
    with pytest.raises(TrainerError, match="another start of the job has taken over"):
        old.do("release", step=2)
    assert new.do("release", step=2) == "released"
    away = storage.rename(nodes.root / "away")
    with pytest.raises(TrainerError, match=r"step 2 is not released: .*the storage directory has vanished"):
        new.do("release", step=2)
    away.rename(storage)
    assert new.do("release", step=2) == "not kept"
    with Client.connect(job=JOB, socket=tmp_path / "nobody") as alone:
        with pytest.raises(CkptdError, match="step 2 is not released: no daemon at"):
            alone.release(2)
        with pytest.raises(TypeError):
            alone.release("2")  # type: ignore[arg-type]
    with pytest.raises(CkptdError, match="the client is closed"):
        alone.release(2)
    assert os.path.isdir(storage)
