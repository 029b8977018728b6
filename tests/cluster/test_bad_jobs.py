"""Jobs that get in each other's way, ranks that do not keep step, names that mean different things on different ranks."""

from __future__ import annotations

import os
import signal

import pytest
from ckptd_client.snapshots import REFUSED

from tests.cluster.nodes import Cluster, Trainer, TrainerError, together
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB = "jobs"
NOBODY = 65534


def sealed(trainer: Trainer, steps: int) -> str:
    trainer.do("train", steps=steps)
    trainer.do("snapshot", must=True)
    assert trainer.do("wait", level="sealed") == "sealed"
    return str(trainer.do("digest"))


def steps_of(trainer: Trainer) -> list[int]:
    return sorted(row["step"] for row in trainer.do("steps"))


def test_two_jobs_on_one_daemon(nodes: Cluster) -> None:
    """P1: each gets its own back."""
    node = nodes.node(replicas=0)
    (one,), (two,) = nodes.world([node], "one"), nodes.world([node], "two")
    assert one.do("restore") is None and two.do("restore") is None
    digests = {one: sealed(one, 2), two: sealed(two, 3)}
    assert digests[one] != digests[two]
    assert steps_of(one)[-1] == 2 and steps_of(two)[-1] == 3
    for trainer, job, step in ((one, "one", 2), (two, "two", 3)):
        trainer.do("again", job=job, kind="plain")
        assert trainer.do("restore") == step
        assert trainer.do("digest") == digests[trainer]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users")
def test_two_users_with_one_job_name(nodes: Cluster) -> None:
    """P13: jobs of equal name are different jobs; one user neither restores nor sees the other's."""
    node = nodes.node(replicas=0)
    (ours,) = nodes.world([node], JOB)
    (theirs,) = nodes.world([node], JOB, uid=NOBODY)
    assert ours.do("restore") is None
    digest = sealed(ours, 2)
    assert theirs.do("restore") is None
    assert theirs.do("steps") == []
    sealed(theirs, 5)
    assert steps_of(theirs)[-1] == 5 and 5 not in steps_of(ours)
    assert sorted(job["job"] for job in node.get("/status")["jobs"]) == [f"0/{JOB}", f"{NOBODY}/{JOB}"]
    ours.do("again", job=JOB, kind="plain")
    assert ours.do("restore") == 2
    assert ours.do("digest") == digest


def test_a_stale_trainer_and_the_same_job_started_twice(nodes: Cluster) -> None:
    """P12: of an earlier start nothing is taken any more, wherever it lives; what the newer one saved is untouched."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB)
    together(world, "restore")
    digest = protected(world)
    world[0].kill()
    stale = world[1]
    stale.signal(signal.SIGSTOP)
    (newer,) = nodes.world([first], JOB)  # restarted by somebody who did not know of the second rank
    assert newer.do("restore") == 2
    assert newer.do("digest") == digest
    newest = sealed(newer, 3)
    stale.signal(signal.SIGCONT)
    until(lambda: "superseded" in stale.do("train", steps=1)["statuses"][0], 10, "the stale rank to hear of it")
    assert "superseded" in stale.do("snapshot", must=True)
    assert any("opened elsewhere" in text for text in stale.do("health")["problems"])
    # The same name once more, on the same daemon, while the newer one runs on.
    (latest,) = nodes.world([first], JOB)
    assert latest.do("restore") == 5
    assert latest.do("digest") == newest
    assert "superseded" in newer.do("train", steps=4)["statuses"][-1]
    # Steps must grow; one that does not is refused without harm.
    last = sealed(latest, 1)
    assert "backwards" in latest.do("snapshot", step=3, must=True)
    newer.kill()
    latest.kill()
    (after,) = nodes.world([first], JOB)
    assert after.do("restore") == 6
    assert after.do("digest") == last


def test_who_takes_the_job_back_goes_on_at_once(nodes: Cluster) -> None:
    """P12, P15: its first snapshot was void for "layout unknown", and its health said "no more snapshots" for good."""
    node = nodes.node(replicas=0)
    (first,) = nodes.world([node], JOB)
    assert first.do("restore") is None
    sealed(first, 3)
    (second,) = nodes.world([node], JOB)
    assert second.do("restore") == 3
    digest = sealed(second, 1)
    second.do("close")
    assert any("opened elsewhere" in text for text in first.do("health")["problems"])
    assert first.do("restore") == 4
    assert first.do("digest") == digest
    sealed(first, 1)
    assert not [cause for cause in first.do("lost") if cause.startswith("void")]
    assert first.do("health")["problems"] == []


def test_after_a_restore_that_failed_the_job_is_not_begun_anew(nodes: Cluster) -> None:
    """P12: the next snapshot joined without a restore, which left all steps so far behind, and retention deleted them."""
    node = nodes.node(replicas=0)
    (trainer,) = nodes.world([node], JOB)
    trainer.do("restore")
    digest = sealed(trainer, 3)
    with pytest.raises(TrainerError, match="77"):
        trainer.do("restore", step=77)
    assert trainer.do("train", steps=1)["statuses"] == [f"skipped: {REFUSED}"]
    assert trainer.do("snapshot", must=True) == f"skipped: {REFUSED}"
    assert trainer.do("health")["problems"] == [f"not protected: {REFUSED}"]
    assert trainer.do("restore") == 3
    assert trainer.do("digest") == digest
    sealed(trainer, 1)
    assert trainer.do("health")["problems"] == []


def test_a_rank_that_skips_one_snapshot(nodes: Cluster) -> None:
    """P1, P14: that step exists nowhere, later ones do."""
    first, second = nodes.several(2, own_slots=4)
    world = nodes.world([first, second], JOB, kind="ddp")
    together(world, "restore")
    protected(world)
    for trainer in world:
        trainer.ask("train", steps=1, snapshot=trainer.rank == 0)
    assert [trainer.answer()["statuses"] for trainer in world][1] == []
    newest = until(lambda: in_step(world), 45, "later steps to be protected")
    for trainer in world:
        shown = {row["step"]: row["level"] for row in trainer.do("steps")}
        assert 3 not in shown and shown[newest] == 1
    digests = together(world, "digest")
    together(world, "again", job=JOB, kind="ddp")
    for error in together(world, "restore", step=3):
        assert isinstance(error, TrainerError) and "step 3" in str(error), error
    assert together(world, "restore") == [newest, newest]
    assert together(world, "digest") == digests


def in_step(world: list[Trainer]) -> int:
    """One more step; its number when it is protected. The skip voids the steps that were granted ahead, as many as there
    are slots."""
    (step, _) = (answer["step"] for answer in together(world, "train", steps=1))
    waited = together(world, "wait", level="protected", timeout=3)
    return int(step) if waited == ["protected", "protected"] else 0


def test_equal_names_with_other_values_on_each_rank(nodes: Cluster) -> None:
    """D7: pipeline stages. Each rank gets its own back in the same world; another world is told which key."""
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="stages")
    together(world, "restore")
    protected(world)
    digests = together(world, "digest")
    assert digests[0] != digests[1]
    together(world, "again", job=JOB, kind="stages")
    assert together(world, "restore") == [2, 2]
    assert together(world, "digest") == digests
    for trainer in world:
        trainer.kill()
    (alone,) = nodes.world([first], JOB, kind="plain")
    (error,) = together([alone], "restore")
    assert isinstance(error, TrainerError) and "model.0.weight" in str(error) and "2 ranks" in str(error), error
    # One name for tensors of different shapes: the same, each rank's own.
    clash = nodes.world([first, second], "clash", kind="shapes")
    assert together(clash, "restore") == [None, None]
    protected(clash)
    digests = together(clash, "digest")
    together(clash, "again", job="clash", kind="shapes")
    assert together(clash, "restore") == [2, 2]
    assert together(clash, "digest") == digests
