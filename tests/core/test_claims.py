"""The steward-elect claims its epoch's number on storage: taken by another start, late, hanging, or nobody to ask."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.decide import CLAIM_GAP, spread
from ckptd.core.protocol.machine.steward.restore import DECISIONS_MAX, NO_NUMBER
from tests.core.elect import BEFORE, BOTH, OLD, Elect
from tests.core.machines import sent


def test_numbers_that_are_taken_again_and_again_are_given_up() -> None:
    node = Elect(durable=True).start()
    node.answer("b")
    for number in range(DECISIONS_MAX):
        assert node.refusals() == []
        node.feed(ev.DurableRead("now", True))
        node.claimed(ok=False, taken=node.claim.number)
        node.answer("b")
        assert node.claim.number == number + 1
    node.feed(ev.DurableRead("now", True))
    assert node.refusals() == [("now", "unrecoverable")]
    assert sent(node.done, msg.JoinRefused)[0].reason == NO_NUMBER


def test_an_answer_about_another_number_is_none() -> None:
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.EpochClaimed("now", 99, True))
    assert node.opens() == []


def test_the_claim_of_a_start_that_was_given_up_is_not_taken_for_the_next_ones() -> None:
    """P14, P12: both had decided for one number; storage had it for the first, and refused each commit of the second (simulator,
    seed 427503276016 of that day)."""
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE))
    node.feed(ev.EpochClaimed("another", node.claim.number, True, node.claim.number))
    assert node.opens() == []
    node.claimed()
    assert len(node.opens()) == 1


@pytest.mark.parametrize("left", [True, False])
def test_a_start_whose_ranks_went_opens_nothing_when_its_claim_hangs(left: bool) -> None:
    """P14: epoch 4 trains on, and a second start, whose ranks were dead, superseded it (a reader's history)."""
    node = Elect(BEFORE, durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE, ()))
    assert node.claim.number == OLD + 1
    if left:
        node.feed(ev.RankLeft(0, False))
    node.tick(11.0, reporting=False)
    assert node.opens() == []


def test_storage_that_cannot_be_asked_makes_a_number_that_nobody_else_takes() -> None:
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE))
    node.claimed(ok=False, reason="EIO")
    assert node.opens()[-1].record.number == OLD + 1 + spread("now", OLD + 1)
    assert spread("now", OLD + 1) >= CLAIM_GAP

    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", False, reason="EIO"))
    assert node.claim.number == OLD + 1 + spread("now", OLD + 1), "nor was it read"
