"""Who writes what of a snapshot is computed in a thread, and the job goes on meanwhile."""

from __future__ import annotations

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from tests.core.flushes import ask, orders, step_of, steward
from tests.core.machines import EPOCH, Steward, at, fact


def planning() -> Steward:
    """Step 7 is to be written, and nobody knows yet by whom."""
    node = steward().train().capture(7).protect(7)
    node.thread.slow = True
    ask(node, 7)
    assert (len(node.thread.asked), step_of(node)) == (1, None)
    return node


def test_it_is_ordered_when_that_is_known() -> None:
    node = planning()
    node.tick(0.5)
    assert len(node.thread.asked) == 1, "once"
    done = node.computed()
    assert step_of(node) == 7
    assert orders(done, "a")
    assert orders(done, "b")


def test_its_memory_is_kept_meanwhile() -> None:
    """P4: a newer one would take its place."""
    node = planning()
    node.capture(8).protect(8)
    assert at(7) in node.machine.steward.table.states
    node.computed()
    assert step_of(node) == 7


def test_who_goes_meanwhile_writes_nothing() -> None:
    node = planning()
    node.feed(ev.NodeDown("b"))
    assert orders(node.computed()) == []
    assert set(orders_to(node)) == {"a"}, "who is left has all of it"


def test_who_loses_its_part_meanwhile_writes_nothing() -> None:
    node = planning()
    for rank, tier in ((0, 1), (1, 0)):
        node.others["b"].held(fact(7, rank, tier), lost=True)
    assert orders(node.computed()) == []
    assert set(orders_to(node)) == {"a"}


def orders_to(node: Steward) -> list[str]:
    done = node.tick()
    return [who for who in ("a", "b") if orders(done, who)]


def test_nothing_is_ordered_of_what_is_durable_meanwhile() -> None:
    node = planning()
    node.feed(ev.DurableRead("", True, node.record, (at(7),)))
    assert orders(node.computed()) == []
    assert orders_to(node) == []


def test_a_new_office_plans_anew() -> None:
    node = planning()
    (first,) = node.thread.asked
    node.now += 10.0  # its process stood still
    node.tick()
    node.others["b"].tell_inventory(fact(7, 1), fact(7, 0, 1))
    node.others["b"].state(1, 7)
    node.hear("b", msg.FlushAsk(EPOCH, 7))
    node.tick(0.5)
    assert len(node.thread.asked) == 2
    assert orders(node.feed(ev.Computed(first.number, first.call()))) == []
    node.thread.asked.remove(first)
    node.tick(0.5)
    assert len(node.thread.asked) == 1, "the second one is under way"
    node.computed()
    assert step_of(node) == 7
