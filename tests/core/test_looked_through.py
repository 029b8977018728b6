"""What a steward that has just begun has not looked at yet: nobody acts on books that are known in part (P3, P14, P16)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.context import MEMBER_AWAY_S
from ckptd.core.protocol.machine.leaving import KNOWN_S
from ckptd.core.protocol.machine.steward.draining import FOLLOWS_S
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable
from tests.core.certificates import BOTH, OLD, released_since, steward
from tests.core.machines import EPOCH, TICK_S, Member, Steward, at, fact, layout, record_of

THREE = [layout(rank, 3) for rank in range(3)]
OLDER_LEANS = [fact(8, rank, rank != 2, world=3) for rank in range(3)]  # what node c has of step 8: rank 2's own slot, copies


def test_a_handler_compares_the_sums_of_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: of 4,096 ranks it takes 0.05 s, and a steward that had just begun compared those of five in one tick. Nothing is flushed
    and nothing goes before all are known."""
    node, compared = steward(durable=True, flush_every_steps=1), []
    whole = SnapshotTable.weigh

    def counted(table: SnapshotTable, state: SnapshotState) -> bool:
        compared.append(whole(table, state))
        return compared[-1]

    monkeypatch.setattr(SnapshotTable, "weigh", counted)
    held = [fact(step, rank, rank ^ 1, keep=True) for step in (9, 8, 7) for rank in (0, 1)]
    node.others["b"].tell_inventory(*held, layouts=BOTH)
    for looks in range(1, 4):
        mark = node.mark
        del compared[:]
        node.tick()
        assert sum(compared) <= 1
        known = [step for step in (9, 8, 7) if node.machine.steward.table.states[at(step)].agreement is not None]
        if known != [9, 8, 7]:
            assert looks < 3 and (node.machine.steward.flushing.flush, released_since(node, mark)) == (None, set())
    assert [node.level(step) for step in (9, 8, 7)] == [0, 0, 0]


def remainders(node: Steward, ticks: int) -> list[int]:
    """So many slots node c, which leaves, is told that the others lack."""
    mark = node.mark
    for _ in range(ticks):
        node.tick()
    return [said.slots for said in node.said(msg.Remainder, "c", mark)]


@pytest.mark.parametrize("answers", [True, False])
def test_a_node_that_leaves_is_not_told_that_nothing_is_left_before_all_was_looked_at(answers: bool) -> None:
    """P3: it would go, and take what an older snapshot needs. After a look that ended at the newer one (a reader's history),
    or before any, where a node that is up says nothing and is waited for no longer."""
    node = steward(record_of("abc"))
    held = [fact(9, 2, world=3)] * answers + OLDER_LEANS
    node.others["c"].tell_inventory(*held, layouts=THREE)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    if answers:
        both = [fact(step, rank, rank != 1, world=3) for step in (9, 8) for rank in range(3)]
        node.others["b"].tell_inventory(*both, layouts=THREE)
    said = remainders(node, 8 if answers else 60)
    assert said and said[0] > 0, said


def test_nor_before_all_can_be_read() -> None:
    """P3: a node is told what is left of a snapshot whose layouts are still on their way (simulator, seed 700407)."""
    node = steward(record_of("abc"))
    node.others["c"].tell_inventory(*OLDER_LEANS)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.others["b"].tell_inventory(*(fact(8, rank, rank != 1, world=3) for rank in range(3)))
    assert remainders(node, 20) == []
    node.hear("b", msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in THREE}))
    said = remainders(node, 8)
    assert said and said[0] > 0, said


def test_nor_before_what_can_be_read_is_weighed() -> None:
    """P3: its layouts had been looked at together since the last look at the books (simulator, seed 800106)."""
    node = steward(record_of("abc"))
    node.thread.slow = True
    node.others["c"].tell_inventory(*OLDER_LEANS, layouts=THREE)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.others["b"].tell_inventory(*(fact(8, rank, rank != 1, world=3) for rank in range(3)))
    assert remainders(node, 8) == []
    mark = node.mark
    node.computed()
    node.tick()
    said = [one.slots for one in node.said(msg.Remainder, "c", mark)]
    assert all(said), said
    assert min(remainders(node, 8)) > 0


def test_what_cannot_be_read_yet_hides_nothing_that_is_needed() -> None:
    """P3: node c had been told that nothing is left; that stood while nobody could read another snapshot (a reader's history)."""
    node = steward(record_of("abcd"))
    four = [layout(rank, 4) for rank in range(4)]
    for name, tier in (("b", 0), ("c", 1), ("d", 1)):
        node.others[name].tell_inventory(*(fact(7, rank, tier, world=4) for rank in range(4)), layouts=four)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    assert remainders(node, 4)[-1] == 0
    node.others["b"].held(replace(fact(8, 1, world=4), layout_id=layout(1, 4, plan="other").layout_id))
    node.feed(ev.NodeDown("d"))
    assert min(remainders(node, 20)) > 0


@pytest.mark.parametrize("before_s", [0.0, 100.0])
@pytest.mark.parametrize("outside", ["", "d"])
def test_nor_while_somebody_is_away_for_a_moment(outside: str, before_s: float) -> None:
    """P3: it may bring the rest of what node c holds a part of (a reader's history; simulator, seed 2901251). before_s: so long
    all were live."""
    node = steward(record_of("abc", outside=outside, ancestry=(at(5, OLD),)), replicas=0)
    for name, other in node.others.items():
        other.tell_inventory(*([fact(5, 1, epoch=OLD)] if name == "c" else []), layouts=BOTH)
    node.tick(before_s)
    node.feed(ev.NodeDown(outside or "b"))
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    patience = node.machine.ctx.policy.steward_timeout_s + MEMBER_AWAY_S
    assert remainders(node, int(patience / TICK_S) - 1) == []
    assert remainders(node, 8)[-1] == 0, "it is gone"


def test_nor_while_a_member_is_silent() -> None:
    """P3: the books of who has just begun were settled without it (simulator, seed 64320208834)."""
    node = steward(record_of("abc"), replicas=0)
    node.others["c"].tell_inventory(fact(7, 2, world=3), layouts=THREE)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    patience = node.machine.ctx.policy.steward_timeout_s + MEMBER_AWAY_S
    assert remainders(node, int(patience / TICK_S) - 2) == []
    assert remainders(node, 12)[-1] == 0, "it is waited for no longer"


def test_who_comes_and_goes_without_an_answer_is_waited_for_no_longer() -> None:
    """P14: each time its link came back the time in which it may speak began anew (a reader's history)."""
    node = steward(record_of("abc", outside="d")).greet()
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    for _ in range(10):
        node.feed(ev.NodeDown("d"))
        node.tick(10.0)
        node.feed(ev.NodeUp("d"))
        node.tick()
    node.feed(ev.NodeDown("d"))
    assert remainders(node, 4)[-1] == 0


def test_what_is_no_layout_is_said_to_be_left_on_who_holds_it_and_keeps_nobody_else() -> None:
    """P14: it was waited for for ever, and no node was told anything (a reader's history: a daemon of a newer release)."""
    node = steward(record_of("abcd"))
    for name, held in (("b", ()), ("c", [fact(8, 2, world=4)]), ("d", [fact(8, 3, world=4)])):
        node.others[name].tell_inventory(*held)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    assert remainders(node, 8) == [], "it may be on its way"
    for rank, name in ((2, "c"), (3, "d")):
        node.hear(name, msg.LayoutReply(EPOCH, {layout(rank, 4).layout_id: b"of another release"}))
    assert remainders(node, 8)[-1] == 1
    left = node.said(msg.Remainder, "c")[-1]
    assert (left.stuck, "cannot be read" in left.reasons[0]) == (1, True)
    node.others["c"].held(fact(8, 2, world=4), lost=True)
    assert remainders(node, 8)[-1] == 0


def test_what_is_no_layout_keeps_all_that_hold_something_of_its_snapshot() -> None:
    """P3: what the others hold of it may be all there is (a reader's history)."""
    node = steward(record_of("abcd", ancestry=(at(5, OLD),)))
    for name, ranks in (("b", (0, 1)), ("c", (2,)), ("d", (3,))):
        held = [fact(5, rank, epoch=OLD, world=4) for rank in ranks]
        node.others[name].tell_inventory(*held, layouts=[layout(rank, 4) for rank in range(3)], certified=((at(5, OLD), 0, False),))
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    assert remainders(node, 8) == []
    node.hear("d", msg.LayoutReply(EPOCH, {layout(3, 4).layout_id: b"of another release"}))
    assert remainders(node, 8)[-1] == 1


def test_who_went_when_nothing_was_left_of_it_holds_up_nobody() -> None:
    """The next that leaves was told nothing for steward_timeout_s and 20 s (a reader's history)."""
    node = steward(record_of("abcd")).greet()
    for name in "bc":
        node.others[name].tell(msg.Leaving(EPOCH, True))
    assert remainders(node, 4)[-1] == 0
    node.feed(ev.NodeDown("b"))
    assert remainders(node, 4)[-1] == 0
    node.feed(ev.NodeDown("d"))
    assert remainders(node, 4) == [], "it has not said that it leaves"


def test_that_nothing_is_left_is_known_while_it_is_said() -> None:
    """P3: the steward is silent where it does not know, and what it had said before stood (a reader's history)."""
    node = Member(record_of("abc"))
    node.feed(ev.DrainAsked(True))
    known = lambda: node.machine.view()["drain"]["known"]  # noqa: E731
    node.order(msg.Remainder(EPOCH, "", 0, 0, 0, (), ()))
    assert known()
    node.tick(KNOWN_S)
    assert known()
    node.tick()
    assert not known()
    node.order(msg.Remainder(EPOCH, "", 0, 0, 0, (), ()))
    assert known()


def test_what_a_fresh_start_has_left_behind_is_left_until_it_has_something_of_its_own() -> None:
    """P3: nothing is given up for that start before (guards.py), and it may never get so far (simulator, seed 800443)."""
    node = steward(replace(record_of("abc"), ancestry=(), before=(OLD, ())), replicas=0)
    left = [fact(5, rank, epoch=OLD) for rank in (0, 1)]
    node.others["b"].tell_inventory()
    node.others["c"].tell_inventory(*left, layouts=BOTH)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    assert min(remainders(node, 8)) > 0
    left = node.said(msg.Remainder, "c")[-1]
    assert left.stuck == left.slots and "left it behind" in left.reasons[0], "who holds a copy refuses to make another"
    node.train().capture(7)
    node.tick(FOLLOWS_S + 1.0)
    assert {fall[0].step for fall in node.said(msg.Remainder, "c")[-1].falls} == {7}


@pytest.mark.parametrize("step", [5, 6])
def test_nor_what_a_start_goes_on_from_or_leaves_behind_until_all_have_restored(step: int) -> None:
    """P3: it goes on from step 5, and 6 was whole; the next start may take that if this one ends (simulator, seeds 71000780,
    71001862). Neither of them stands in for the other."""
    node = steward(replace(record_of("abc"), ancestry=(at(5, OLD),), before=(OLD, ())), replicas=0, running=False)
    for name, held in (("b", 11 - step), ("c", step)):
        held_all = [fact(held, rank, epoch=OLD) for rank in (0, 1)]
        node.others[name].tell_inventory(*held_all, layouts=BOTH, done=False)
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    assert min(remainders(node, 8)) > 0
    node.hear("a", msg.RestoreDone(EPOCH, 1))
    assert (remainders(node, 8)[-1] > 0) == (step == 5)


def test_who_does_not_answer_again_holds_up_no_grant() -> None:
    """P14: a look had ended at the newest of five snapshots, and then a holder's link broke and came back: no grant came until
    it had been silent for steward_timeout_s (a reader's history)."""
    node = steward(record_of("ab", outside="c"))
    node.others["c"].tell_inventory()
    held = [fact(step, rank, rank ^ 1) for step in (9, 8, 7, 6, 5) for rank in (0, 1)]
    node.others["b"].tell_inventory(*held, layouts=BOTH)
    node.feed(ev.NodeDown("c"), ev.NodeUp("c"))
    node.slots(0, 1, 2, 3)
    node.feed(ev.RankProgress(0, 10))
    node.others["b"].state(1, 10, 4)
    node.tick(1.0)
    assert node.said(msg.Grant) != []


def test_what_names_another_rank_later_is_asked_for_as_well() -> None:
    """All layouts of the world were there already; what is not known of one more keeps the snapshot from being looked at again."""
    node = steward(record_of("ab"), durable=True, flush_every_steps=1)
    node.others["b"].tell_inventory(fact(7, 0, 1), fact(7, 1, 0), layouts=BOTH)
    node.tick()
    node.others["b"].held(fact(7, 2, 0, world=3))
    mark = node.mark
    node.tick(3.0)
    assert node.said(msg.LayoutRequest, since=mark) != []
