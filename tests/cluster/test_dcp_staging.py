"""dcp.async_save through CkptdStagingWriter: one copy, made before it returns, and nothing that training writes then (P1, P5)."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, TrainerError, together
from tests.cluster.test_dcp import JOB, expected


def test_what_is_saved_is_what_was_there_when_async_save_was_called(nodes: Cluster) -> None:
    """The worker writes over all of it, objects too, as soon as async_save has returned. Slots grow with the first save."""
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    for step in (1, 2):
        assert together(world, "dcp_save", step=step, how="staged") == [None] * 2
    world = nodes.again(world)
    assert together(world, "dcp_load", way="column") == [expected(2)] * 2


def test_one_copy_and_how_long_it_takes(nodes: Cluster) -> None:
    alone = nodes.world(nodes.several(1), JOB, kind="explicit")[0]
    told = alone.do("dcp_cost", megabytes=80, rounds=5)
    late = {kind: {what: values[2:] for what, values in found.items()} for kind, found in told.items()}  # slots are mapped by then
    for kind, found in late.items():
        print(f"{kind}: {median(found['seconds']) * 1000:.0f} ms until async_save returns, {max(found['megabytes']):.0f} MB more")
    assert max(late["ckptd"]["megabytes"]) < 8 < 72 < min(late["default"]["megabytes"]), told


def test_a_save_that_is_late_is_no_save_of_what_was_written_meanwhile(nodes: Cluster) -> None:
    """Rank 0 has its grant and copies when training has gone on long since."""
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "dcp_save", step=1, how="staged") == [None] * 2
    world[0].do("arm", failpoints="capture.granted:sleep=1")
    said = together(world, "dcp_save", step=2, how="staged", hold_s=0.3, timeout=30.0)
    assert all(isinstance(one, TrainerError) and "async_save returned after 0.3 s" in str(one) for one in said), said
    assert all("step 2 was not saved" in str(one) and "training went on" in str(one) for one in said), said
    world[0].do("arm", failpoints="")
    assert together(world, "dcp_load") == [expected(1)] * 2
    assert together(world, "dcp_save", step=3, how="staged") == [None] * 2
    assert together(world, "dcp_load") == [expected(3)] * 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"how": "staged", "fails": 1}, "this planner has no plan"),
        pytest.param(
            {"how": "staged_process"}, "AsyncCheckpointerType.PROCESS is not supported",
            marks=pytest.mark.chaos,  # torch starts an interpreter first
        ),
    ],
)
def test_who_cannot_save_holds_nobody(nodes: Cluster, how: dict[str, Any], said: str) -> None:
    """The save ends before anything is to be copied."""
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    found = together(world, "dcp_save", step=1, **how)
    assert all(isinstance(one, TrainerError) and said in str(one) for one in found), found
    assert not any("after 60" in str(one) for one in found), found
    assert together(world, "dcp_save", step=1, how="staged") == [None] * 2
    assert together(world, "dcp_load") == [expected(1)] * 2


@pytest.mark.chaos
def test_a_daemon_that_is_gone_lets_training_go_on(nodes: Cluster) -> None:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB, kind="explicit")
    assert together(world, "dcp_save", step=1, how="staged") == [None] * 2
    pair[1].kill()
    found = together(world, "dcp_save", step=2, how="staged", timeout=5.0, hold_s=1.0)
    assert all(isinstance(one, TrainerError) and "async_save returned after 1.0 s" in str(one) for one in found), found
