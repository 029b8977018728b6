"""How many replicas a peer keeps of a rank, and which one it takes in all the same (D9, P8, P14)."""

from __future__ import annotations

from ckptd.core.ids import NodeInfo, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.state_map.layout_build import build_layout
from tests.core.machines import EPOCH, Member, at, layout, only, record_of

HERE = NodeInfo("b", "tcp://b", "b", "b", "b#1")


def holding(*steps: int) -> JobMachine:
    """A peer that keeps replicas of rank 0 of these steps."""
    machine = JobMachine("1/job", HERE, Policy(replicas=1, peer_sets=2))
    for slot, step in enumerate(steps):
        layout = build_layout(0, 2, [], 64)
        machine.handle(ev.ReplicaArrived(SnapshotId(1, step), 0, 1, slot, layout, ()), 0.0)
    return machine


def test_a_newer_one_waits_until_an_older_one_is_released() -> None:
    assert holding(3, 4).admits_replica(SnapshotId(1, 5), 0) == "full"
    assert holding(3, 4).admits_replica(SnapshotId(1, 5), 1) == "", "another rank has places of its own"
    assert holding(3).admits_replica(SnapshotId(1, 5), 0) == ""


def test_what_stays_for_readers_takes_nobodys_place() -> None:
    """A reader of one step kept all later ones from being protected, until he ended (a test from outside)."""
    machine = holding(3, 4)
    machine.handle(ev.Reading("reader", (SnapshotId(1, 3), SnapshotId(1, 4))), 0.0)
    assert machine.admits_replica(SnapshotId(1, 5), 0) == "full", "they are needed as before"
    for step in (3, 4):
        machine.slots.release(SnapshotId(1, step))
    assert machine.admits_replica(SnapshotId(1, 5), 0) == "" and len(list(machine.slots.holdings())) == 2


def test_an_older_one_is_taken_in_beside_newer_ones() -> None:
    """Three snapshots in a staircase of levels held each other's places for ever: the copy of the middle one had been lost, and
    the newest had taken its place (simulator, seeds 4542 and 5842)."""
    assert holding(3, 5).admits_replica(SnapshotId(1, 4), 0) == ""
    assert holding(3, 4).admits_replica(SnapshotId(1, 4), 0) == "", "the same one again, of another tier"
    assert holding(3, 4, 6).admits_replica(SnapshotId(1, 5), 0) == "full"


def test_memory_of_an_epoch_refutes_that_its_ranks_never_loaded() -> None:
    """Its ranks give it back to a daemon that was restarted, and had heard an old word of that restore meanwhile."""
    node = Member(record_of("abc"), running=False)
    node.hear("a", msg.EpochOpen("now", node.record, 1, None, durable=False))
    node.hear("a", msg.RestoreAbort(EPOCH, 1, "left", "rank 0 is gone"))
    told = []
    for slot, step in ((1, 7), (2, 8)):
        node.hear("c", msg.InventoryRequest(f"next {slot}", ()))
        told.append(node.said(msg.Inventory, "c")[-1])
        node.feed(ev.HoldingFound(slot, at(step), 1, 0, True, layout(1, 3), ()))
    assert [(one.done, one.never) for one in told] == [(False, True), (True, False)]


def test_copies_of_two_captures_of_a_step_lie_beside_each_other() -> None:
    """A step was captured anew where it had been void, and a copy of the first capture had come late: as long as it lay here no
    other one was taken in (a reader's history)."""
    node = Member(record_of("abc"))
    node.feed(ev.ReplicaArrived(at(7, grant=1), 0, 1, 77, layout(0, 3), (("o:loader", b"1"),)))
    node.feed(ev.ReplicaArrived(at(7, grant=2), 0, 1, 78, layout(0, 3), (("o:loader", b"2"),)))
    node.order(msg.Void(EPOCH, 0, "late", at(7, grant=1)))
    assert [do.slot for do in only(node.done, ins.FreeSlot)] == [77]
    assert [fact.digests for fact in node.machine.slots.facts()] == [(("o:loader", b"2"),)]
