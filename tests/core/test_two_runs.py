"""Two runs of one job's name that never heard of each other, without storage: both have the number 1 (P1)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone
from ckptd.core.protocol.machine.steward.gather import Gather
from tests.core.elect import A, B, C, Elect
from tests.core.machines import layout, member, only, sent

D = member("d")
ONE = EpochRecord(1, "one", ("a", "c"), (A, C), before=(-1, ()))
OTHER = EpochRecord(1, "other", ("d", "b"), (D, B), before=(-1, ()))
TAKEN = SnapshotId(1, 10, 3)  # by both


def held(rank: int) -> msg.HoldingFact:
    return msg.HoldingFact(TAKEN, rank, 0, layout(rank).layout_id)


def started(*, whole: bool) -> Elect:
    """On a node of each: a holds rank 0 of the one run, b rank 1 of the other; where it is ``whole``, d has the rest of that."""
    node = Elect(ONE)
    node.feed(ev.HoldingFound(1, TAKEN, 0, 0, True, layout(0), (), False))
    node.start(known=OTHER)
    for _ in range(2):  # what does not add up is asked for once more
        node.answer("c", known=ONE)
        node.answer("d", *([held(0)] if whole else ()), known=OTHER)
        node.answer("b", held(1), known=OTHER)
    return node


def test_no_snapshot_is_made_of_parts_of_two_runs() -> None:
    node = started(whole=False)
    assert only(node.done, ins.ClaimEpoch) == []
    (refused,) = sent(node.done, msg.JoinRefused, "b")
    assert refused.code == "unrecoverable"
    assert "two starts of the job have the number 1, on a, c and on d, b" in refused.reason


def test_what_is_whole_of_one_of_them_is_restored_and_the_other_one_is_named() -> None:
    node = started(whole=True)
    node.claimed()
    opened = node.opens()[-1]
    assert {(source.node, source.rank) for source in opened.sources} == {("d", 0), ("b", 1)}
    assert any("two starts of the job have the number 1" in text for text in opened.errors)


OLDER = SnapshotId(0, 3)


def both() -> Gather:
    """Two of the other run's nodes hold something, and one of this one's."""
    gather = Gather("now", ("a",), (A,), 0.0, claims=False)
    gather.records = [ONE, OTHER]
    certified = ((OLDER, 1, False), (TAKEN, 1, False))
    gather.said = {
        "a": msg.Inventory("now", ONE, (held(0), replace(held(0), snapshot=OLDER)), certified=certified),
        "d": msg.Inventory("now", OTHER, (held(0),), certified=certified),
        "b": msg.Inventory("now", OTHER, (held(1),)),
    }
    gather.bury(NO_TOMBSTONE)
    return gather


def test_the_run_of_which_more_is_held_counts() -> None:
    gather = both()
    assert gather.left_out == {1: (OTHER, ONE)}
    assert gather.newest() == gather.record_of(1) == OTHER


def test_of_the_other_one_nothing_counts_that_was_held_or_told_and_what_was_before_both_does() -> None:
    answers = both().answers
    assert [found.snapshot for found in answers["a"].holdings] == [OLDER]
    assert answers["a"].certified == ((OLDER, 1, False),)
    assert answers["d"].certified == ((OLDER, 1, False), (TAKEN, 1, False))


def test_of_two_that_were_forgotten_by_order_none_counts() -> None:
    """The order was heard of after both."""
    gather = both()
    gather.bury(Tombstone(1, 1))
    assert (gather.left_out, gather.newest(), gather.record_of(1)) == ({}, None, None)
