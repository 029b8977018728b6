"""A start is judged in a thread, and goes on being gathered meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.gather import FRESH_S
from tests.core.elect import BEFORE, BOTH, OLD, A, B, C, Elect
from tests.core.machines import at, only, sent

KNOWN = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
NEWER = tuple(replace(one, snapshot=at(7, OLD)) for one in BOTH)


def judging(known: EpochRecord = KNOWN) -> Elect:
    """Node c is down, and what the others hold is being judged."""
    node = Elect(known)
    node.thread.slow = True
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", *BOTH, known=known, done=True)
    assert len(node.thread.asked) == 1
    return node


def test_it_is_decided_when_it_has_been_judged() -> None:
    node = judging()
    assert only(node.done, ins.ClaimEpoch) == []
    node.tick(0.5)
    assert len(node.thread.asked) == 1, "once"
    node.computed()
    assert node.claim.ancestry == (at(5, OLD),)


def test_what_is_heard_meanwhile_counts() -> None:
    """P1: a newer snapshot."""
    node = judging()
    node.feed(ev.NodeUp("c"))
    node.answer("c", *NEWER, known=KNOWN, done=True)
    assert len(node.thread.asked) == 1, "one after the other"
    node.computed()
    assert [do.record.ancestry for do in only(node.done, ins.ClaimEpoch)] == [(at(7, OLD),)]


@pytest.mark.parametrize("by", ["its steward", "somebody else"])
def test_an_epoch_that_opens_elsewhere_meanwhile_has_the_lower_number(by: str) -> None:
    node, other = judging(BEFORE), EpochRecord(OLD + 5, "other", ("b", "b"), (B,), (), (), (-1, ()))
    node.hear("b", msg.EpochOpen("other", other, other.number, None, False) if by == "its steward" else msg.Stale(other))
    node.computed()
    assert [do.record.number for do in only(node.done, ins.ClaimEpoch)] == [OLD + 6]


def test_nothing_opens_for_ranks_that_went_meanwhile() -> None:
    node = judging()
    node.now += FRESH_S
    node.computed()
    assert only(node.done, ins.ClaimEpoch) == []
    node.report()
    node.tick(0.5)
    assert len(only(node.done, ins.ClaimEpoch)) == 1


def test_nothing_opens_for_a_start_that_another_one_took_the_place_of_meanwhile() -> None:
    node = judging()
    node.join("next")
    node.report("next")
    node.computed()
    assert only(node.done, ins.ClaimEpoch) == []
    assert [m.code for m in sent(node.done, msg.JoinRefused, "b") if m.attempt == "now"] == ["superseded"]
    node.answer("b", *BOTH, known=KNOWN, done=True, attempt="next")
    assert [do.record.nonce for do in only(node.done, ins.ClaimEpoch)] == ["next"]


def test_a_judgement_that_fails_is_a_failure_of_the_machine() -> None:
    node = judging()
    with pytest.raises(ZeroDivisionError):
        node.machine.handle(ev.Computed(node.thread.asked[0].number, None, ZeroDivisionError()), node.now)
