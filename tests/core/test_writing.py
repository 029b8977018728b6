"""What a node writes of a snapshot when the steward orders it (P1, P4, D12)."""

from __future__ import annotations

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.writing import WRITES_KEPT_MAX
from tests.core.machines import EPOCH, Member, at, layout, only, record_of, sent


def piece(rank: int = 1, world: int = 3, runs: tuple[tuple[int, int], ...] | None = None) -> msg.WritePiece:
    return msg.WritePiece(rank, layout(rank, world).layout_id, runs, True)


@pytest.fixture
def writer() -> Member:
    node = Member(record_of("abc"), Policy(replicas=1))
    node.slots(1, 1, 2)
    node.capture(1, 7, rank=1)
    return node


def order(node: Member, attempt: str = "t1", step: int = 7, *pieces: msg.WritePiece) -> list[ins.Instruction]:
    return node.hear("a", msg.WriteOrder(EPOCH, at(step), attempt, pieces or (piece(),), ("t:x",)))


def answers(done: list[ins.Instruction]) -> list[tuple[bool, str, bytes]]:
    return [(m.ok, m.reason, m.report) for m in sent(done, msg.Wrote, "a")]


def test_an_order_is_carried_out_once_and_its_answer_repeated(writer: Member) -> None:
    assert only(order(writer), ins.WriteFiles) == [
        ins.WriteFiles(at(7), "t1", writer.record, ((1, piece()),), ("t:x",))
    ]
    assert order(writer) == []
    assert answers(writer.feed(ev.FilesWritten(at(7), "t1", True, "", b"report"))) == [(True, "", b"report")]
    assert answers(order(writer)) == [(True, "", b"report")]
    assert answers(writer.feed(ev.FilesWritten(at(7), "t1", False, "late"))) == []


def test_what_is_written_stays_until_it_is_written(writer: Member) -> None:
    """P1."""
    order(writer)
    assert only(writer.certify(1, 8, 0, releases=(at(7),)), ins.FreeSlot) == []
    assert only(writer.feed(ev.FilesWritten(at(7), "t1", True)), ins.FreeSlot) == [ins.FreeSlot(1)]


def test_what_is_not_here_is_refused(writer: Member) -> None:
    refused = [(False, "a holding that should be written is not here", b"")]
    assert answers(order(writer, "t2", 8)) == refused
    assert answers(order(writer, "t3", 7, piece(0))) == refused
    assert answers(order(writer, "t4", 7, msg.WritePiece(1, "another layout", None, True))) == refused
    for number, runs in enumerate((((0, 1),), ((-1, 0),), ((0, 0), (-1, 0)), ((0, 1 << 60),))):
        assert answers(order(writer, f"t5{number}", 7, piece(runs=runs))) == refused, "there are no such fragments"
    assert only(writer.done, ins.WriteFiles) == []
    assert only(writer.certify(1, 8, 0, releases=(at(7),)), ins.FreeSlot) == [ins.FreeSlot(1)], (
        "nothing is pinned"
    )


def test_a_cancelled_write_is_stopped_once_and_reported_as_failed(writer: Member) -> None:
    order(writer)
    cancel = msg.WriteCancel(EPOCH, at(7), "t1")
    assert only(writer.hear("a", cancel), ins.CancelWrite) == [ins.CancelWrite(at(7), "t1")]
    assert writer.hear("a", cancel) == []
    assert answers(writer.feed(ev.FilesWritten(at(7), "t1", True))) == [(False, "", b"")]
    assert writer.hear("a", cancel) == []


def test_a_cancel_that_overtook_its_order(writer: Member) -> None:
    writer.hear("a", msg.WriteCancel(EPOCH, at(7), "t1"))
    assert answers(order(writer)) == [(False, "cancelled", b"")]


def test_a_newer_epoch_cancels_what_is_being_written(writer: Member) -> None:
    order(writer)
    order(writer, "t2")
    writer.hear("a", msg.WriteCancel(EPOCH, at(7), "t2"))
    writer.feed(ev.FilesWritten(at(7), "t0", True))
    done = writer.hear("a", msg.Stale(record_of("abc", number=EPOCH + 1, nonce="then", ancestry=(at(7),))))
    assert [do.attempt for do in only(done, ins.CancelWrite)] == ["t1"]
    assert only(writer.done, ins.FreeSlot) == [], "pinned until the shell has let go"
    assert answers(writer.feed(ev.FilesWritten(at(7), "t1", True))) == [(False, "", b"")], "too late to count"


def test_cancels_of_orders_that_never_came_are_bounded(writer: Member) -> None:
    for number in range(WRITES_KEPT_MAX + 5):
        writer.hear("a", msg.WriteCancel(EPOCH, at(7), f"r{number}"))
    assert len(writer.machine.writing._writes) <= WRITES_KEPT_MAX


def test_answers_are_remembered_for_so_many_orders(writer: Member) -> None:
    order(writer, "running")
    for number in range(WRITES_KEPT_MAX + 2):
        order(writer, f"r{number}", 99)
    assert answers(order(writer, "r0", 99)), "forgotten, so answered anew"
    writes = writer.machine.writing._writes
    assert len(writes) == WRITES_KEPT_MAX + 1
    assert "running" in writes, "what is under way is not forgotten"
