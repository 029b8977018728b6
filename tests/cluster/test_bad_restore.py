"""restore() of what does not fit or is not there: every rank raises, everything is named, nothing is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Trainer, TrainerError, together
from tests.waiting import until

JOB = "misfit"


def protected(world: list[Trainer], steps: int = 2) -> str:
    """Train, and have the last step held by two nodes; its digest."""
    together(world, "train", steps=steps)
    together(world, "snapshot", must=True)
    waited = together(world, "wait", level="protected")
    assert waited == ["protected"] * len(world), waited
    return str(together(world, "digest")[0])


def anew(world: list[Trainer], kinds: list[str], job: str = JOB) -> list[Any]:
    """A new start of the job in the same processes, each rank with its own kind of model."""
    for trainer, kind in zip(world, kinds, strict=True):
        trainer.do("again", job=job, kind=kind)
    return together(world, "digest")


def refused(world: list[Trainer], kind: str, *named: str) -> None:
    """The second rank's model is another: both ranks raise, the error names all of ``named``, nobody was written to."""
    before = anew(world, ["plain", kind])
    errors = together(world, "restore")
    for error in errors:
        assert isinstance(error, TrainerError), errors
        assert str(error).startswith("CkptdError"), error
        assert "rank 1" in str(error), error
        assert [name for name in named if name not in str(error)] == [], error
    assert together(world, "digest") == before


def test_what_does_not_fit_on_one_rank_is_refused_on_all(nodes: Cluster) -> None:
    """P1, D11: wrong shape, wrong dtype, a key missing in the snapshot, a key that nobody registered."""
    world = nodes.world(nodes.several(2), JOB)
    assert together(world, "restore") == [None, None]
    digest = protected(world)
    shapes = [f"model.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.running_mean", "2.weight")]
    refused(world, "other", *shapes, "F32[128, 64] here, F32[64, 64] in the snapshot", "register the same objects")
    refused(world, "double", *shapes, "F64[64] here, F32[64] in the snapshot")
    refused(world, "head", "head.weight, head.bias: not in the snapshot (2 in all)")
    refused(world, "model", "in the snapshot, saved by this rank, but not registered on it now", "extra.loader", "and 15 more")
    # A step that is not there, and one that nobody can have: named, not hung up on.
    anew(world, ["plain", "plain"])
    for error in together(world, "restore", step=77):
        assert "77" in str(error) and str(error).startswith("CkptdError"), error
    for error in together(world, "restore", source="durable"):
        assert str(error).startswith("CkptdError"), error
    # The memory has outlived all of it, and strict=False takes what fits.
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == [digest, digest]
    anew(world, ["model", "model"])
    assert together(world, "restore", strict=False) == [2, 2]


def test_a_job_that_was_never_seen_and_one_whose_memory_is_out_of_reach(nodes: Cluster) -> None:
    """D11: None only when proven. A node that may hold the newest step does not answer: an error, unless allow_fresh."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB)
    assert together(world, "restore") == [None, None]
    protected(world)
    shown = json.loads(first.cli("ls", "--json").stdout)["rows"]
    assert {row["job"].partition("/")[2] for row in shown} == {JOB}
    assert first.job("unheard-of") == {} and first.job(JOB)["newest"]["protected"] == 2
    for trainer in world:
        trainer.kill()
    second.kill()
    first.kill()
    second.start()  # it remembers the job, its memory went with it
    (lost,) = nodes.world([second], JOB)
    error = _error(lost)
    assert error.startswith("CkptdError") and first.name in error and "allow_fresh" in error, error
    assert lost.do("restore", allow_fresh=True) is None
    (other,) = nodes.world([second], "unheard-of")
    assert other.do("restore") is None


def _error(trainer: Trainer) -> str:
    (answer,) = together([trainer], "restore")
    assert isinstance(answer, TrainerError), answer
    return str(answer)


def test_two_daemons_with_one_node_id(nodes: Cluster) -> None:
    """Their ranks would wait for each other at the wrong daemon: all raise at once, naming the node and both addresses."""
    one, two = nodes.several(2, node_id="twin")
    world = nodes.world([one, two], JOB)
    for error in together(world, "restore"):
        assert str(error).startswith("CkptdError") and "twin" in str(error), error
        assert one.get("/status")["node"]["control"] in str(error), error
    assert world[0].do("train", steps=2)["step"] == 2  # training goes on without protection


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("lost", "said"),
    [("daemon", "ranks 0"), ("node", "led the restore and is gone"), ("member", "n1, which the job was being restored to")],
)
def test_nobody_hangs_when_a_node_dies_in_mid_restore(nodes: Cluster, lost: str, said: str) -> None:
    """Its own ranks are gone, or raised; the others heard nothing for 300 s and more (an operator, with SIGKILL)."""
    made, world, _ = nodes.protected(JOB, 3, "replicas=1", steward_timeout_s=2, restore_timeout_s=300)
    made[1].kill()
    made[1].start(failpoint="epoch.persisted:sleep=90")  # so long nobody can complete it
    again = nodes.again(world, on=made)
    for trainer in again:
        trainer.ask("restore")
    until(lambda: "epoch=2 opened" in made[2].log.read_text(), 60, "the restore to begin")
    at = 1 if lost == "member" else 0
    if lost == "daemon":
        made[at].crash()
    else:
        made[at].kill()
        again[at].kill()
    for rank in {0, 2} - {at}:
        if (lost, rank) != ("daemon", 0):
            with pytest.raises(TrainerError, match=said):
                again[rank].answer(timeout=60)
