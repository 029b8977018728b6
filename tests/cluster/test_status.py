"""`ckptd status` shows the whole job from any of its nodes, and says what fell (P2)."""

from __future__ import annotations

import json
import os

import pytest

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.storage.posix import PosixStorage
from tests.cluster.nodes import Cluster, together
from tests.waiting import until

JOB = "seen"


def test_any_node_shows_all_ranks_and_what_is_lost(nodes: Cluster) -> None:
    first, second = nodes.several(2, steward_timeout_s=2)
    world = nodes.world([first, second], JOB)
    assert together(world, "restore") == [None, None]
    together(world, "train", steps=2)
    together(world, "snapshot", must=True)
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    for node in (first, second):
        ranks = node.job(JOB)["ranks"]
        assert [(row["rank"], row["node"], row["up"]) for row in ranks] == [(0, "n0", True), (1, "n1", True)]
        assert all(peer["memory"]["budget_bytes"] > 0 for peer in node.job(JOB)["nodes"])
        assert not node.job(JOB)["degraded"]
    world[1].kill()
    until(lambda: [row["up"] for row in first.job(JOB)["ranks"]] == [True, False], 45, "rank 1 to be seen as gone")
    second.kill()
    until(lambda: first.job(JOB)["degraded"], 45, "the level to fall")
    assert first.newest(JOB, "protected") == -1 and first.newest(JOB, "sealed") == 2
    assert "n1" in first.problems()["degraded"]
    page = first.cli("status").stdout
    assert "DEGRADED" in page and "DOWN" in page
    assert [(row["rank"], row.get("silent", False)) for row in first.job(JOB)["ranks"]] == [(0, False), (1, True)]
    assert "its daemon does not answer" in page


def test_what_a_dead_steward_had_said_is_not_called_protection(nodes: Cluster) -> None:
    first, second = nodes.several(2, steward_timeout_s=60)
    world = nodes.world([first, second], JOB)
    assert together(world, "restore") == [None, None]
    together(world, "train", steps=2)
    assert second.job(JOB)["steward_up"] and "NOT KNOWN NOW" not in second.cli("status").stdout
    first.kill()
    until(lambda: not second.job(JOB)["steward_up"], 45, "the steward's node to be missed")
    assert "NOT KNOWN NOW: steward n0 is down" in " ".join(second.cli("status").stdout.split())


def test_a_replaced_stewards_node_shows_what_is_durable(nodes: Cluster) -> None:
    """Its memory is lost and with it what it knew; what is durable is in no memory any more (P2)."""
    storage = nodes.root / "storage"
    storage.mkdir()
    first, second = nodes.several(2, steward_timeout_s=2, storage_root=storage)
    world = nodes.world([first, second], JOB)
    assert together(world, "restore") == [None, None]
    together(world, "train", steps=2, snapshot=False)
    together(world, "snapshot", must=True)
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable"))
    for _ in range(3):  # newer ones take its memory
        together(world, "train", steps=1, snapshot=False)
        together(world, "snapshot", must=True)
        together(world, "wait", level="protected")
    until(lambda: [n.newest(JOB, "durable") for n in (first, second)] == [2, 2], 45, "both nodes to know it")
    first.kill()
    first.start()
    until(lambda: len(first.job(JOB).get("ranks", [])) == 2, 45, "the job to be known again")
    until(lambda: first.newest(JOB, "durable") == 2, 45, "step 2 to be shown")
    assert second.newest(JOB, "durable") == 2


def test_a_job_that_ended_is_shown_as_finished_and_can_be_planned_for(nodes: Cluster) -> None:
    node = nodes.node()
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") is None
    rank.do("train", steps=2)
    assert node.job(JOB)["phase"] == "running"
    plan = json.loads(node.cli("plan", "--json").stdout)
    size = int(node.job(JOB)["ranks"][0]["state_bytes"])
    budget = node.job(JOB)["nodes"][0]["memory"]["budget_bytes"]
    assert (plan["memory"]["own_bytes"], plan["memory"]["budget_bytes"]) == (3 * size, budget)
    rank.do("close")
    until(lambda: node.job(JOB)["phase"] == "finished", 45, "the job to be seen as finished")
    page = node.cli("status").stdout
    assert "epoch 1, finished" in page and "GONE" not in page


@pytest.mark.parametrize(("finished", "process"), [(False, "none yet"), pytest.param(True, "finished", marks=pytest.mark.chaos)])
def test_a_job_of_which_only_storage_is_left_has_lost_nothing(nodes: Cluster, finished: bool, process: str) -> None:
    """It was shown as degraded, -1 of 0 domains, 2 steps less than none behind, its ranks gone. Whether it had finished depends on
    what its daemon had heard before it died."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(storage_root=nodes.root / "storage")
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") is None
    rank.do("train", steps=2)
    assert "durable" in str(rank.do("wait", level="durable"))
    if finished:
        rank.do("close")
        until(lambda: node.job(JOB)["phase"] == "finished", 45, "its end to be known")
    node.kill()
    if not finished:
        rank.do("close")
    node.start()
    until(lambda: node.newest(JOB, "durable") == 2, 45, "step 2 to be shown")
    job = node.job(JOB)
    assert (job["newest"]["sealed"], job["lag"], job["degraded"]) == (-1, {"durable": 0}, False)
    page = node.cli("status").stdout
    assert "protection: nothing in memory (replicas=" in page
    assert "DEGRADED" not in page and "GONE" not in page
    assert process in page


def test_commits_that_another_start_shuts_out_are_said_with_what_to_do(nodes: Cluster) -> None:
    """A claim that hung in storage was carried out when its start of the job was over: nothing of this epoch becomes durable."""
    storage = nodes.root / "storage"
    storage.mkdir()
    node = nodes.node(storage_root=storage, replicas=0, flush_every_steps=1)
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") is None
    me = NodeInfo("n9", "tcp://127.0.0.9:1", "127.0.0.9:1", "n9")
    late = EpochRecord(9, "a start that is over", ("n9",), (me,), before=(-1, ()))
    assert claim_epoch(PosixStorage(storage), f"{os.getuid()}/{JOB}", late) == (True, 9)
    rank.do("train", steps=2, snapshot=False)
    rank.do("snapshot", must=True)
    until(lambda: "flush" in node.problems(), 45, "the flush to fail")
    page = " ".join(node.cli("status").stdout.split())
    assert "claimed by another start" in page and "start the job once more" in page, page


@pytest.mark.chaos
def test_a_daemon_that_was_restarted_never_lists_its_memory_as_nothing(nodes: Cluster) -> None:
    """An operator looks at that moment: "nothing yet", with status 0, while the only copy was there."""
    made, world, _ = nodes.protected("kept", 2, "replicas=1")
    for trainer in world:
        trainer.kill()
    made[0].kill()  # the steward's
    made[1].crash()
    told: list[int] = []

    def listed() -> bool:
        shown = made[1].cli("ls", "--json")
        steps = [row["step"] for row in json.loads(shown.stdout)["rows"]]
        assert 3 in steps or (shown.returncode, "step 3 of epoch 1" in shown.stdout) == (1, True), shown
        told.append(len(steps))
        return 3 in steps

    until(listed, 60, "a steward that says what there is")
