"""`ckptd status` promises what a failure would cost; restore() keeps it (P2, P3, P4)."""

from __future__ import annotations

import pytest

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "meter"


def row(node: Node, failure: str) -> dict[str, object]:
    return next((dict(r) for r in node.job(JOB).get("outlook", []) if r["failure"] == failure), {})


def promised(node: Node, failure: str) -> tuple[object, ...]:
    found = row(node, failure)
    return found.get("step"), found.get("source")


def trained_on(nodes: Cluster, count: int, kind: str, **settings: object) -> tuple[list[Node], list[Trainer]]:
    """Step 2 is protected (and durable, with storage); training is at step 5."""
    made = nodes.several(count, steward_timeout_s=2, **settings)
    world = nodes.world(made, JOB, kind=kind)
    assert together(world, "restore") == [None] * count
    assert promised(made[0], "process") == (-1, ""), "nothing is held yet"
    together(world, "train", steps=2, snapshot=False)
    together(world, "snapshot", must=True)
    level = "durable" if "storage_root" in settings else "protected"
    assert all(level in str(answer) for answer in together(world, "wait", level=level, timeout=60))
    together(world, "train", steps=3, snapshot=False)
    return made, world


@pytest.mark.parametrize(
    ("redundancy", "lost"),
    [("replicas=1", 0), pytest.param("replicas=1", 2, marks=pytest.mark.chaos), pytest.param("xor(3)", 1, marks=pytest.mark.chaos)],
)
def test_a_lost_node_costs_what_was_promised(nodes: Cluster, redundancy: str, lost: int) -> None:
    made, world = trained_on(nodes, 3, "fsdp", redundancy=redundancy)
    source = "parity" if redundancy.startswith("xor") else "peer"
    for node in made:
        until(lambda node=node: promised(node, "node") == (2, source), 45, f"{node.name} to promise step 2")  # type: ignore[misc]
        assert promised(node, "process") == (2, "own") and promised(node, "all") == (-1, "")
    known = row(made[0], "node")
    assert known["exact"] and known["not_measured"] == [], known
    assert float(str(known["restore_s"])) > 0 and int(str(known["move_bytes"])) > 0
    assert row(made[0], "all")["not_measured"] == ["nothing to restore"]
    made[lost].kill()
    world[lost].kill()
    left = [node for at, node in enumerate(made) if at != lost]
    until(lambda: left[0].job(JOB)["degraded"], 45, "the loss to be known")
    assert promised(left[0], "process")[0] == 2
    for trainer in world:
        trainer.kill()
    again = nodes.world(left, JOB, kind="fsdp")
    assert together(again, "restore") == [2, 2]
    until(lambda: row(left[0], "process").get("lost_steps") == 0, 45, "nothing to be lost just after a restore")
    assert any("restore" in str(text) for text in row(left[0], "process")["basis"])  # type: ignore[attr-defined]


@pytest.mark.chaos
def test_what_storage_has_and_memory_no_more(nodes: Cluster) -> None:
    """All nodes at once: storage's step, from the beginning on; the seconds are not known before something was read there."""
    storage = nodes.root / "storage"
    storage.mkdir()
    made, world = trained_on(nodes, 2, "plain", storage_root=storage)
    together(world, "snapshot", must=True)
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    for node in made:
        until(lambda node=node: promised(node, "node") == (5, "peer"), 45, "step 5 to be protected")  # type: ignore[misc]
        until(lambda node=node: promised(node, "all") == (2, "durable"), 45, "step 2 to be durable")  # type: ignore[misc]
    found = row(made[0], "all")
    assert found["lost_steps"] == 3 and "restore_s" not in found
    assert found["not_measured"] == ["transfer from durable"]
    assert made[0].metric('ckptd_outlook_lost_steps{failure="all"') == 3
    assert made[0].metric("ckptd_time_to_protection_seconds_count") >= 1
    assert "not measured yet: transfer from durable" in made[0].cli("status").stdout
    for trainer in world:
        trainer.kill()
    for node in made:
        node.kill()
        node.start()
    again = nodes.world(made, JOB)
    assert together(again, "restore") == [2, 2]
    until(lambda: "restore_s" in row(made[0], "all"), 45, "reading storage to have been measured")
    assert "durable: 1 restore" in row(made[0], "all")["basis"]  # type: ignore[operator]
    assert made[0].metric('ckptd_outlook_restore_seconds{failure="all"') > 0


@pytest.mark.chaos
def test_a_repair_is_timed(nodes: Cluster) -> None:
    made, world = trained_on(nodes, 3, "fsdp")
    world[2].kill()
    made[2].kill()
    until(lambda: made[0].job(JOB)["unprotected_s"] > 0, 45, "the loss to be known")
    assert made[0].metric("ckptd_unprotected_seconds") > 0
    made[2].start()
    until(lambda: made[0].metric('ckptd_time_to_protection_seconds_count{cause="repair"') == 1, 45, "copies to be made anew")
    assert made[0].job(JOB)["unprotected_s"] == 0
    assert promised(made[0], "node") == (2, "peer")
