"""When restore() may say that there is nothing to restore: a declared fresh start counts only if it is known to have run."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.events import DurableRead, RankLeft
from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.machine.steward.decide import decide
from ckptd.core.machine.steward.gather import Gather
from ckptd.core.messages import Inventory, RestoreAsk
from tests.core.elect import BOTH, Elect
from tests.core.machines import at

A = NodeInfo("a", "tcp://a", "a", "a", "a#1")
TRAINED = EpochRecord(1, "x", ("b",), (NodeInfo("b", "tcp://b", "b", "b", "b#1"),), before=(-1, ()))


def gathered(before: tuple[int, tuple[()]], *, done: bool) -> Gather:
    """A third start asks a, which entered epoch 2 and has not been restarted since; epoch 1's node is gone for good."""
    fresh = EpochRecord(2, "y", ("a",), (A,), before=before)
    gather = Gather("z", ("a",), (A,), 0.0)
    gather.joined, gather.asked = {0: RestoreAsk()}, {"a": A}
    gather.answers = {"a": Inventory("z", fresh, (), done=done, incarnation="a#1")}
    gather.durable = DurableRead("z", True, fresh)
    gather.records = [fresh, TRAINED]
    return gather


def test_nobody_knows_whether_the_declared_fresh_start_ran() -> None:
    refused = decide(gathered((1, ()), done=False), 2, (), {})
    assert refused.record is None
    assert refused.code == "unrecoverable"


def test_it_ran_and_took_no_snapshot() -> None:
    assert decide(gathered((1, ()), done=True), 2, (), {}).record is not None


def test_there_was_nothing_before_it_anyway() -> None:
    assert decide(gathered((-1, ()), done=False), 2, (), {}).record is not None


def test_it_ran_and_a_later_start_that_never_did_came_after_it() -> None:
    """The job was refused for a checkpoint that nobody had ever taken (simulator, seed 180 of that day)."""
    gather = gathered((1, ()), done=False)
    fresh = gather.records[0]
    later = EpochRecord(3, "w", ("a",), (A,), before=(2, ()))
    gather.records.append(later)
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#1")
    assert decide(gather, 3, (), {}).record is None, "nobody knows whether epoch 2 ran"
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#1", ran=fresh)
    assert decide(gather, 3, (), {}).record is not None
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#2", ran=fresh)
    assert decide(gather, 3, (), {}).record is None, "it may have forgotten a snapshot"


def test_a_start_that_was_claimed_and_never_opened_leaves_nothing_before_the_next() -> None:
    """It was refused at the third start, which asked about the second (simulator, seed 113 of that day)."""
    gather = gathered((-1, ()), done=False)
    gather.records = gather.records[:1]
    gather.answers["a"] = Inventory("z", None, (), incarnation="a#1")
    second = decide(gather, 2, (), {}).record
    assert second is not None and second.before == (-1, ())
    gather.answers["a"] = Inventory("z", None, (), incarnation="a#2")
    assert decide(gather, 2, (), {}).record is None, "it may have forgotten a snapshot"


def test_a_start_that_claimed_and_never_opened_hides_nothing_of_the_one_that_trained_on() -> None:
    """P1: the start after it asked only those that the claim names, and called the job fresh (simulator, seed 915715)."""
    c = NodeInfo("c", "tcp://c", "c", "c", "c#1")
    first = EpochRecord(1, "first", ("c", "c"), (c,), before=(-1, ()))
    node = Elect(durable=True).start()
    node.feed(DurableRead("now", True, first))
    node.answer("b", incarnation="b#1")
    node.answer("c", known=first, done=True, incarnation="c#1")
    claimed = node.claim
    assert (claimed.number, claimed.ancestry) == (2, ()), "the first start has not taken a snapshot yet"
    node.feed(RankLeft(0, False))  # its ranks end before the claim is done: epoch 2 never opens, epoch 1 goes on
    node.join("again")
    node.report("again")
    node.feed(DurableRead("again", True, claimed))
    node.answer("b", attempt="again", incarnation="b#1")
    node.answer("c", *(replace(one, snapshot=at(5, 1)) for one in BOTH), attempt="again", known=first, done=True)
    node.claimed()
    assert node.opens()[-1].snapshot == at(5, 1)
