"""restore() says None only of a job that never sealed anything, or that was forgotten by order (P1, P15)."""

from __future__ import annotations

import pytest

from tests.cluster.nodes import Cluster, TrainerError, together
from tests.waiting import until

JOB = "lost"


def test_a_finished_job_whose_memory_went_is_not_begun_anew_without_a_word(nodes: Cluster) -> None:
    node = nodes.node(replicas=0, job_linger_s=1)
    first = nodes.world([node], JOB)[0]
    assert first.do("restore") is None
    first.do("train", snapshot=False)
    first.do("snapshot", must=True)
    assert first.do("wait", level="sealed") == "sealed"
    first.do("close")
    first.kill()
    until(lambda: node.job(JOB).get("phase", "forgotten") == "forgotten", 45, "its memory to go")
    node.crash()  # what is remembered of it is written down
    again = nodes.again([first])[0]
    with pytest.raises(TrainerError) as error:
        again.do("restore")
    assert "snapshots of epoch 1 are held nowhere any more" in str(error.value) and "allow_fresh" in str(error.value)
    assert again.do("restore", allow_fresh=True) is None


def test_a_job_that_ended_before_its_first_snapshot_begins_anew_with_an_error(nodes: Cluster) -> None:
    made = nodes.several(2)
    world = nodes.world(made, JOB)
    assert together(world, "restore") == [None, None]
    together(world, "train", snapshot=False)
    world = nodes.again(world)
    assert together(world, "restore") == [None, None]
    text = "nothing was ever sealed: epoch 1 ran on n0, n1 and ended before a first snapshot was complete"
    assert text in made[0].problems().get("nothing_sealed", "")
    assert any("ERROR" in line and text in line for line in made[0].log.read_text().splitlines())
    assert all(any(text in problem for problem in rank.do("health")["problems"]) for rank in world)
    together(world, "train", snapshot=False)
    together(world, "snapshot", must=True)
    together(world, "wait", level="sealed")
    assert not any(text in problem for rank in world for problem in rank.do("health")["problems"])
    until(lambda: not any("nothing_sealed" in node.problems() for node in made), 45, "health to let go of a start that is over")


def test_snapshots_that_must_be_are_all_taken_although_nobody_called_restore(nodes: Cluster) -> None:
    """The first one waits until both ranks have met and joined, as the second rank calls it later."""
    world = nodes.world(nodes.several(2), JOB)
    together(world, "train", snapshot=False)
    for step in (1, 2, 3):
        world[0].ask("snapshot", must=True)
        world[1].ask("snapshot", must=True)
        said = [rank.answer() for rank in world]
        assert not [status for status in said if status.startswith(("skipped", "failed"))], (step, said)
        assert [status.startswith("protected") for status in together(world, "wait", level="protected")] == [True, True]
        together(world, "train", snapshot=False)


def test_a_new_job_is_no_trouble(nodes: Cluster) -> None:
    node = nodes.node(replicas=0)
    trainer = nodes.world([node], JOB)[0]
    assert trainer.do("restore") is None
    assert trainer.do("health") == {"ok": True, "problems": []}


def test_a_start_that_does_not_restore_says_so_and_takes_nothing_away_at_once(nodes: Cluster) -> None:
    """A script that forgot restore() lost the run that it was to go on with by its first checkpoint, without a word."""
    node = nodes.node(replicas=0, storage_root=nodes.root / "storage", flush_every_steps=1, keep_last=2)
    first = nodes.world([node], JOB)[0]
    assert first.do("restore") is None
    for _ in range(3):
        first.do("train", snapshot=False)
    first.do("snapshot", must=True)
    assert first.do("wait", level="durable") == "durable"
    again = nodes.again([first])[0]
    again.do("train", snapshot=False)
    again.do("snapshot", must=True)
    assert again.do("wait", level="durable") == "durable"
    text = "this start begins anew without restore(), and step 3 of epoch 1 is left behind"
    assert any(text in problem for problem in again.do("health")["problems"])
    assert text in node.problems().get("begins_anew", "")
    until(lambda: {row["step"]: row["abandoned"] for row in again.do("steps")} == {1: False, 3: True}, 10, "step 3 to be listed")
    third = nodes.again([again])[0]
    assert third.do("restore") == 1
    assert "begins_anew" not in node.problems(), "this one does not"
