"""saving() and open() over real daemons: exactly what was handed over, by all ranks, and read by any number of them (P1, P9)."""

from __future__ import annotations

import pytest

from tests.cluster.nodes import Cluster, TrainerError, together

JOB = "explicit"


def column(step: int, at: int, ranks: int) -> list[list[float]]:
    """What ``ranks`` saved, as rank ``at`` reads it."""
    return [[1000 * rank + step + 40 * row + 2 * at + i for i in range(2)] for rank in range(ranks) for row in range(3)]


def test_what_two_ranks_saved_is_read_by_two_and_by_three(nodes: Cluster) -> None:
    three = nodes.several(3)
    pair = nodes.world(three[:2], JOB, kind="explicit")
    assert together(pair, "save", step=1) == [None, None]
    assert together(pair, "save", step=7) == [None, None]
    for trainer in pair:
        trainer.kill()
    three[0].kill()
    three[0].start()
    for ranks in (2, 3):
        world = nodes.world(three[:ranks], JOB, kind="explicit")
        for rank, found in enumerate(together(world, "load")):
            assert not isinstance(found, Exception), found
            assert (found["step"], found["plan"], found["tensors"]) == (7, "of 7", ["common", "rows"])
            assert found["own"] == (f"rank {rank}" if ranks == 2 else {"0": "rank 0", "1": "rank 1"})
            assert found["columns"] == column(7, rank, 2)
        for trainer in world:
            trainer.kill()


@pytest.mark.chaos
def test_jobs_of_their_own_and_steps_that_grow(nodes: Cluster) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "save", step=5, name="model") == [None, None]
    assert together(world, "save", step=3, name="optimizer") == [None, None]
    assert together(world, "save", step=4) == [None, None]
    said = together(world, "save", step=5, name="model")
    assert all("step 5 is not later than step 5, which the job has [explicit.model]" in str(one) for one in said), said
    assert [found["step"] for found in together(world, "load", name="optimizer")] == [3, 3]
    for trainer in world:
        trainer.kill()
    world = nodes.world(pair, JOB, kind="explicit")
    said = together(world, "save", step=5, name="model")
    assert all("not later than step 5" in str(one) for one in said), said
    assert together(world, "save", step=6, name="model") == [None, None]
    assert [found["step"] for found in together(world, "load", name="model")] == [6, 6]


@pytest.mark.chaos
def test_a_rank_that_fails_is_heard_by_all(nodes: Cluster) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "save", step=1) == [None, None]
    for step, how, why in ((2, {"fails": 1}, "no such key"), (3, {"leaves": 1}, "leaves the shape")):
        said = together(world, "save", step=step, **how)
        assert all(isinstance(one, TrainerError) for one in said), said
        assert why in str(said[1])
        assert "rank 1 missed it: not saved" in str(said[0]), said
    assert together(world, "save", step=4) == [None, None]
    assert [found["columns"] for found in together(world, "load")] == [column(4, rank, 2) for rank in range(2)]


def test_ranks_that_had_nothing_in_common_when_they_met_capture_all_they_have(nodes: Cluster) -> None:
    """What is handed over later is no copy of what others hold, whatever all of them had when they met: nothing."""
    pair = nodes.several(2, replicas=0)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "save", step=1, level="sealed") == [None, None]
    loaded = together(world, "load")
    assert not [one for one in loaded if isinstance(one, Exception)], loaded
    assert [found["columns"] for found in loaded] == [column(1, rank, 2) for rank in range(2)], loaded


def test_a_key_that_is_missing_on_one_rank_leaves_nobody_behind(nodes: Cluster) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "save", step=1) == [None, None]
    found = together(world, "read_twice", fails=0)
    assert [one["missed"] for one in found] == [True, False], found
    assert [one["columns"] for one in found] == [column(1, rank, 2) for rank in range(2)]
