"""A job's life as the operator sees it, with real daemons and trainers (D19): killed, crashed daemons, forgotten, come back."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.chaos import points
from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

EVERYDAY = "persist.forget.claimed"  # Its order is given, and nothing is done yet.
JOB = "life"


def protected(nodes: Cluster, *pair: Node) -> list[Trainer]:
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [None] * len(pair)
    together(world, "train", steps=2, snapshot=False)
    together(world, "snapshot", must=True)
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    return world


def until_life(life: str, *pair: Node) -> None:
    until(lambda: [node.job(JOB).get("life", "forgotten") for node in pair] == [life] * len(pair), 45,
          f"{life} on all nodes; they say {[node.job(JOB).get('life') for node in pair]}")  # fmt: skip


def test_a_killed_job_is_orphaned_on_all_nodes_and_stays_so_over_a_crash_of_the_daemon(nodes: Cluster) -> None:
    """P7: memory, life and how long it has been so come back."""
    pair = nodes.several(2)
    world = protected(nodes, *pair)
    until_life("running", *pair)
    world[0].kill()
    until(lambda: pair[1].job(JOB)["ranks"][0]["up"] is False, 45, "the death of rank 0")
    until_life("running", *pair)
    world[1].kill()
    until_life("orphaned", *pair)
    page = pair[0].cli("status").stdout
    assert "orphaned" in page and re.search(rf"{JOB}\s.*orphaned", pair[0].cli("ls").stdout), page
    age = pair[1].job(JOB)["life_s"]
    pair[1].crash()
    job = pair[1].job(JOB)
    assert job["life"] == "orphaned" and job["life_s"] >= age, "not counted from anew"
    until(lambda: pair[1].newest(JOB, "protected") == 2, 45, "its memory is there")
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [2, 2]
    until_life("running", *pair)


@pytest.mark.chaos
def test_a_node_that_was_away_when_its_job_was_forgotten_supersedes_nothing(nodes: Cluster) -> None:
    """It comes back with the memory and the epoch of old."""
    first, second = nodes.several(2)
    for trainer in protected(nodes, first, second):
        trainer.kill()
    until_life("orphaned", first, second)
    epoch = second.job(JOB)["epoch"]
    second.kill()  # its state directory stays
    until(lambda: not first.job(JOB)["nodes"][1]["up"], 45, "the node to be missed")
    said = first.cli("forget", JOB)
    assert said.returncode == 0 and f"no answer from {second.name}" in said.stdout, said
    assert first.job(JOB) == {}
    second.start()
    until_life("forgotten", first, second)
    world = nodes.world([second, first], JOB)
    assert together(world, "restore") == [None, None], "proven fresh: the operator had it forgotten"
    assert first.job(JOB)["epoch"] > epoch


@pytest.mark.chaos
def test_a_node_that_was_stopped_when_its_job_was_forgotten_forgets_it_too(nodes: Cluster) -> None:
    """It saw no link go and had nothing to say, so it claimed level 1 for as long as it lived."""
    first, second = nodes.several(2)
    for trainer in protected(nodes, first, second):
        trainer.kill()
    until_life("orphaned", first, second)
    second.signal_daemon(signal.SIGSTOP)
    said = [first.cli("forget", JOB) for _ in range(2)]
    second.signal_daemon(signal.SIGCONT)
    for answer in said:  # the second one knew of no node of the job any more, and named nobody
        assert answer.returncode == 0 and f"no answer from {second.name}" in answer.stdout, answer
        assert f"on {first.name}\n" in answer.stdout, "where it was forgotten"
    until_life("forgotten", first, second)
    told = json.loads(first.cli("forget", JOB, "--json").stdout)
    assert (sorted(told["nodes"]), told["silent"]) == (sorted([first.name, second.name]), []), told


def test_memory_of_a_dead_job_goes_to_the_next_one_and_comes_back_from_storage(nodes: Cluster) -> None:
    """What was released was durable: nothing is lost by it."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(storage_root=nodes.root / "storage", breakpoint_grace_s=1, memory_budget="10MiB")
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") is None
    rank.do("train", steps=2, snapshot=False)
    rank.do("snapshot", must=True)
    assert "sealed" in str(rank.do("wait", level="sealed", timeout=60))
    until(lambda: node.get("/status")["memory"]["used_bytes"] > 8 << 20, 45, "the job to have all its slots")
    rank.kill()
    until(lambda: node.newest(JOB, "durable") == 2, 45, "step 2 to be durable")
    (other,) = nodes.world([node], "other")
    assert other.do("restore") is None
    other.do("train", steps=2, snapshot=False)
    other.do("snapshot", must=True)
    assert "durable" in str(other.do("wait", level="durable", timeout=60))
    assert "orphaned and durable" in node.log.read_text() or "ranks that are gone" in node.log.read_text()
    other.kill()
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") == 2


def mortal(nodes: Cluster, count: int, failpoint: str) -> list[Node]:
    (nodes.root / "storage").mkdir()
    made = [nodes.node(start=False, storage_root=nodes.root / "storage", keep_last=5) for _ in range(count)]
    for node in made:
        node.start(wait=False, failpoint=failpoint)
    for node in made:
        node.until_up()
    return made


def durable_orphan(nodes: Cluster, *pair: Node) -> Path:
    """Two steps are on storage, and in memory; the ranks are gone. The job's place on storage."""
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [None] * len(pair)
    for _ in range(2):
        together(world, "train", steps=2, snapshot=False)
        together(world, "snapshot", must=True)
        assert all("durable" in str(answer) for answer in together(world, "wait", level="durable", timeout=60))
    for trainer in world:
        trainer.kill()
    until_life("orphaned", *pair)
    (place,) = (nodes.root / "storage").glob(f"*/{JOB}")
    assert len(list(place.glob("epoch-*/step-*"))) == 2
    return place


@pytest.mark.parametrize(
    "point", [p if p == EVERYDAY else pytest.param(p, marks=pytest.mark.chaos) for p in points.FORGETTING]
)
def test_a_daemon_that_dies_while_it_forgets_leaves_a_job_or_none(nodes: Cluster, point: str) -> None:
    """P15: a job whose grave is claimed is forgotten on all nodes, what is left of it goes, the next start is fresh; before that
    moment nothing has changed. Each start was refused, and nobody deleted the rest (kill -9 in `ckptd forget --storage`)."""
    mark = nodes.root / "met"
    pair = mortal(nodes, 2, f"{point}:kill_once={mark}")
    place = durable_orphan(nodes, *pair)
    before = pair[0].daemon_pid()
    assert pair[0].cli("forget", JOB, "--storage").returncode == 1
    assert mark.exists()
    until(lambda: pair[0].daemon_other_than(before), 45, "the daemon to be back")
    if point == "persist.forget.asked":
        assert [row["durable"] for row in json.loads(pair[0].cli("ls", "--json").stdout)["rows"]] == [True, True]
        assert together(nodes.world(pair, JOB), "restore") == [4, 4]
        return
    until_life("forgotten", *pair)
    until(lambda: not list(place.glob("epoch-*")), 45, "what is left on storage to be deleted")
    for listed in (pair[0].cli("ls", "--json"), pair[0].cli("ls", nodes.root / "storage", "--json")):
        assert json.loads(listed.stdout)["rows"] == []
    assert together(nodes.world(pair, JOB), "restore") == [None, None]


@pytest.mark.chaos
def test_a_second_order_ends_what_the_first_one_began(nodes: Cluster) -> None:
    """Right after the daemon is back, and whoever else comes to it."""
    (node,) = mortal(nodes, 1, f"persist.forget.claimed:kill_once={nodes.root / 'met'}")
    place = durable_orphan(nodes, node)
    before = node.daemon_pid()
    assert node.cli("forget", JOB, "--storage").returncode == 1
    until(lambda: node.daemon_other_than(before), 45, "the daemon to be back")
    said = node.cli("forget", JOB, "--storage")
    assert said.returncode == 0, said
    until(lambda: not list(place.glob("epoch-*")), 45, "all to be deleted")
    assert together(nodes.world([node], JOB), "restore") == [None]


@pytest.mark.chaos
def test_a_node_that_never_had_the_job_asks_those_that_have(nodes: Cluster) -> None:
    """It deleted the checkpoints of a job that trained elsewhere, and its nodes heard nothing: storage names them."""
    (nodes.root / "storage").mkdir()
    *pair, outsider = nodes.several(3, storage_root=nodes.root / "storage")
    world = protected(nodes, *pair)
    assert all("durable" in str(answer) for answer in together(world, "wait", level="durable", timeout=60))
    refused = outsider.cli("forget", JOB, "--storage")
    assert refused.returncode == 1 and "the job is not over" in refused.stderr, refused
    assert len(list((nodes.root / "storage").glob(f"*/{JOB}/epoch-*/step-*"))) == 1
    for trainer in world:
        trainer.kill()
    until_life("orphaned", *pair)
    assert outsider.cli("forget", JOB, "--storage").returncode == 0
    until_life("forgotten", *pair)
