"""Two runs of one job's name that never heard of each other, without storage: both have the number 1 (P1)."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
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
