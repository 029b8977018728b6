"""A job's life as the operator sees it, with real daemons and trainers (D19): killed, crashed daemons, forgotten, come back."""

from __future__ import annotations

import re

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "life"


def protected(nodes: Cluster, *pair: Node) -> list[Trainer]:
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [None] * len(pair)
    together(world, "train", steps=2, snapshot=False)
    together(world, "snapshot", must=True)
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    return world


def until_life(life: str, *pair: Node) -> None:
    until(lambda: [node.job(JOB).get("life", "forgotten") for node in pair] == [life] * len(pair), 30,
          f"{life} on all nodes; they say {[node.job(JOB).get('life') for node in pair]}")  # fmt: skip


def test_a_killed_job_is_orphaned_on_all_nodes_and_stays_so_over_a_crash_of_the_daemon(nodes: Cluster) -> None:
    """P7: memory, life and how long it has been so come back."""
    pair = nodes.several(2)
    world = protected(nodes, *pair)
    until_life("running", *pair)
    world[0].kill()
    until(lambda: pair[1].job(JOB)["ranks"][0]["up"] is False, 20, "the death of rank 0")
    until_life("running", *pair)
    world[1].kill()
    until_life("orphaned", *pair)
    page = pair[0].cli("status").stdout
    assert "orphaned" in page and re.search(rf"{JOB}\s.*orphaned", pair[0].cli("ls").stdout), page
    age = pair[1].job(JOB)["life_s"]
    pair[1].crash()
    job = pair[1].job(JOB)
    assert job["life"] == "orphaned" and job["life_s"] >= age, "not counted from anew"
    until(lambda: pair[1].newest(JOB, "protected") == 2, 30, "its memory is there")
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [2, 2]
    until_life("running", *pair)


def test_a_node_that_was_away_when_its_job_was_forgotten_supersedes_nothing(nodes: Cluster) -> None:
    """It comes back with the memory and the epoch of old."""
    first, second = nodes.several(2)
    for trainer in protected(nodes, first, second):
        trainer.kill()
    until_life("orphaned", first, second)
    epoch = second.job(JOB)["epoch"]
    second.kill()  # its state directory stays
    until(lambda: not first.job(JOB)["nodes"][1]["up"], 20, "the node to be missed")
    said = first.cli("forget", JOB)
    assert said.returncode == 0 and f"no answer from {second.name}" in said.stdout, said
    assert first.job(JOB) == {}
    second.start()
    until_life("forgotten", first, second)
    world = nodes.world([second, first], JOB)
    assert together(world, "restore") == [None, None], "proven fresh: the operator had it forgotten"
    assert first.job(JOB)["epoch"] > epoch


def test_memory_of_a_dead_job_goes_to_the_next_one_and_comes_back_from_storage(nodes: Cluster) -> None:
    """What was released was durable: nothing is lost by it."""
    (nodes.root / "storage").mkdir()
    node = nodes.node(storage_root=nodes.root / "storage", breakpoint_grace_s=1, memory_budget="10MiB")
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") is None
    rank.do("train", steps=2, snapshot=False)
    rank.do("snapshot", must=True)
    assert "sealed" in str(rank.do("wait", level="sealed", timeout=60))
    until(lambda: node.get("/status")["memory"]["used_bytes"] > 8 << 20, 20, "the job to have all its slots")
    rank.kill()
    until(lambda: node.newest(JOB, "durable") == 2, 30, "step 2 to be durable")
    (other,) = nodes.world([node], "other")
    assert other.do("restore") is None
    other.do("train", steps=2, snapshot=False)
    other.do("snapshot", must=True)
    assert "durable" in str(other.do("wait", level="durable", timeout=60))
    assert "orphaned and durable" in node.log.read_text() or "ranks that are gone" in node.log.read_text()
    other.kill()
    (rank,) = nodes.world([node], JOB)
    assert rank.do("restore") == 2
