"""Both ends of a session: facts in order and once, repeated until heard, and whose orders count (D9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.sessions import BUFFERED_MAX, KEEPALIVE_S
from ckptd.core.protocol.machine.uplink import OUTBOX_MAX, REGISTER_S, SESSIONS_LEFT_MAX, SILENT_LEAST_S
from tests.core.machines import EPOCH, Member, Node, Steward, at, fact, layout, only, record_of

POLICY = Policy(replicas=1, durable=False, steward_timeout_s=4.0)


def steward() -> Steward:
    return Steward(record_of(), POLICY)


def acknowledged(node: Steward, since: int = 0) -> list[msg.Ack]:
    return [replace(heard, waits="") for heard in node.said(msg.Ack, "b", since)]


def steps_heard(node: Steward) -> int:
    state = node.machine.steward.grants.ranks.get(1)
    return state.step if state is not None else -1


# --- the steward's end ------------------------------------------------------------------------------------------------
def test_facts_are_taken_in_their_order_and_once() -> None:
    node = steward().greet()
    b = node.others["b"]
    b.serial += 1
    b.state(1, 8)
    assert steps_heard(node) == -1, "the message before it is still on its way"
    b.tell(msg.RankState(EPOCH, 1, 5, 2), serial=1)
    assert steps_heard(node) == 8
    b.tell(msg.RankState(EPOCH, 1, 3, 2), serial=1)
    assert steps_heard(node) == 8, "an old one again"


def test_facts_of_another_session_are_no_facts() -> None:
    node = steward().greet()
    node.others["b"].tell(msg.RankState(EPOCH, 1, 5, 2), session="an earlier one")
    node.hear("c", msg.RankState(EPOCH, 1, 5, 2, session=node.others["b"].session, serial=1))
    assert steps_heard(node) == -1


def test_only_so_many_are_kept_that_came_too_early() -> None:
    node = steward().greet()
    b = node.others["b"]
    b.tell(msg.RankState(EPOCH, 1, 9, 2), serial=1 + BUFFERED_MAX + 1)
    b.tell(msg.RankState(EPOCH, 1, 9, 2), serial=1 + BUFFERED_MAX)
    assert sorted(node.machine.steward.sessions.by_node["b"].early) == [1 + BUFFERED_MAX]


def test_what_was_taken_is_acknowledged_and_the_session_kept_alive() -> None:
    node = steward().greet()
    b = node.others["b"]
    node.tick()
    assert acknowledged(node) == [msg.Ack(EPOCH, b.session, 0, "running")]
    b.state(1, 5)
    b.tell(msg.RankState(EPOCH, 1, 9, 2), serial=7)
    node.tick()
    assert acknowledged(node)[1:] == [msg.Ack(EPOCH, b.session, 1, "running")]
    mark = node.mark
    node.tick(KEEPALIVE_S - 0.25)
    assert acknowledged(node, mark) == []
    node.tick(0.5)
    assert acknowledged(node, mark) == [msg.Ack(EPOCH, b.session, 1, "running")]
    node.feed(ev.NodeDown("b"))
    mark = node.mark
    node.tick(3 * KEEPALIVE_S)
    assert acknowledged(node, mark) == [], "nobody is there"


def test_another_process_that_takes_up_a_session_begins_a_new_one() -> None:
    """It counts from zero: what it says would be taken for old, acknowledged, and lost."""
    node = steward().greet()
    b = node.others["b"]
    b.tell_inventory(incarnation="1")
    b.state(1, 5)
    b.tell(msg.Leaving(EPOCH, True))
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    node.tick(REGISTER_S)
    before = b.session
    b.tell(msg.Inventory("", node.record, (), incarnation="2"), serial=0)
    b.tell_inventory(incarnation="2")
    assert b.session != before
    b.state(1, 9)
    assert steps_heard(node) == 9
    assert node.machine.steward.sessions.stays("b"), "it says so again, or it stays"


@pytest.mark.parametrize("noticed", [True, False])
def test_what_a_process_said_whose_inventory_never_came_is_not_taken_for_the_next_ones_word(noticed: bool) -> None:
    """The next one's own words of the same numbers, a sealed slot among them, would be old ones again."""
    node = steward()
    b = node.others["b"]
    b.tell(msg.RankState(EPOCH, 1, 8, 2), session=node.said(msg.OpenSession, "b")[-1].nonce, serial=1)
    if noticed:
        node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    else:
        node.tick(REGISTER_S)  # the next one hears of the session when it is greeted again
    b.tell_inventory(incarnation="b#2")
    b.state(1, 3)
    assert steps_heard(node) == 3


def test_a_repeated_fact_is_acknowledged_again() -> None:
    """The acknowledgement was lost."""
    node = steward().greet()
    node.tick()
    mark = node.mark
    node.others["b"].tell(msg.Inventory("", node.record, (), done=True), serial=0)
    node.tick()
    assert acknowledged(node, mark) == [msg.Ack(EPOCH, node.others["b"].session, 0, "running")]


def test_a_node_that_does_not_answer_is_greeted_again() -> None:
    node = steward()
    assert len(node.said(msg.OpenSession, "b")) == 1
    node.tick(REGISTER_S - 0.25)
    assert len(node.said(msg.OpenSession, "b")) == 1
    node.tick(0.25)
    hellos = node.said(msg.OpenSession, "b")
    assert len(hellos) == 2 and hellos[0] == hellos[1], "the same session: the answer may be on its way"
    node.tick(REGISTER_S - 0.25)
    assert len(node.said(msg.OpenSession, "b")) == 2, "after a pause each time"
    node.tick(0.25)
    assert len(node.said(msg.OpenSession, "b")) == 3
    node.others["b"].tell_inventory()
    node.tick(2 * REGISTER_S)
    assert len(node.said(msg.OpenSession, "b")) == 3
    node.feed(ev.NodeDown("b"))
    node.tick(2 * REGISTER_S)
    assert len(node.said(msg.OpenSession, "b")) == 3
    node.feed(ev.NodeUp("b"))
    assert len(node.said(msg.OpenSession, "b")) == 4, "at once: it counts when it has answered"
    node.tick(REGISTER_S - 0.25)
    assert len(node.said(msg.OpenSession, "b")) == 4
    node.tick(0.25)
    assert len(node.said(msg.OpenSession, "b")) == 5


def test_a_node_whose_link_came_back_is_greeted_at_once_and_waited_for() -> None:
    node = steward().greet()
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    node.tick()
    assert len(node.said(msg.OpenSession, "b")) == 2, "however short ago the last hello was"
    node.others["b"].tell_inventory()
    node.tick(3 * POLICY.steward_timeout_s)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    sessions = node.machine.steward.sessions
    assert not sessions.settled(), "however old its session is"
    node.tick(POLICY.steward_timeout_s)
    assert not sessions.settled(), "what it holds is not in the books"
    node.tick()
    assert sessions.settled(), "it has been silent for long"


def test_who_says_that_the_restore_is_done_is_not_told_so_again() -> None:
    node = Steward(record_of("abc"), POLICY)
    node.others["b"].tell_inventory()
    node.others["c"].tell_inventory(done=False)
    mark = node.mark
    node.tick(2 * REGISTER_S)
    assert (node.said(msg.RestoreDone, "b", mark), len(node.said(msg.RestoreDone, "c", mark))) == ([], 2)


def test_in_a_new_epoch_nobody_who_is_not_of_it_has_a_session() -> None:
    """Nor is anybody told that it is about to go."""
    node = Steward(record_of("abc"), POLICY).greet()
    node.others["c"].tell(msg.Leaving(EPOCH, True))
    node.tick()
    assert node.said(msg.Departures, "b")
    newer = record_of("ab", number=EPOCH + 1, nonce="newer")
    node.hear("b", msg.Inventory("", newer, ()))
    assert node.machine.steward.sessions.by_node == {}
    mark = node.mark
    node.tick()
    assert set(node.machine.steward.sessions.by_node) == {"a", "b"}
    node.others["b"].tell_inventory(known=newer)
    node.tick(2 * KEEPALIVE_S)
    assert node.said(msg.OpenSession, "b", mark) and node.said(msg.Ack, "b", mark)
    assert node.said(msg.OpenSession, "c", mark) == node.said(msg.Ack, "c", mark) == []
    assert node.said(msg.Departures, "b", mark) == []


def test_sessions_that_are_opened_within_one_instant_have_different_names() -> None:
    """What was said in the first one would be taken for the second one's."""
    node = steward()
    office, names = node.machine.steward, {node.machine.steward.sessions.session("b")}
    for _ in range(2):
        office.stop()
        office.start()
        names.add(office.sessions.session("b"))
    assert len(names) == 3


def test_who_registers_opens_another_session_but_not_over_and_over() -> None:
    node = steward().greet()
    first = node.others["b"].session
    node.hear("b", msg.Inventory("", node.record, ()))
    assert {h.nonce for h in node.said(msg.OpenSession, "b")} == {first}, "its hello has just been sent"
    node.tick(REGISTER_S)
    node.hear("b", msg.Inventory("", node.record, ()))
    assert len({h.nonce for h in node.said(msg.OpenSession, "b")}) == 2
    node.others["b"].state(1, 5)
    assert steps_heard(node) == -1, "what was said in the session before"


def test_a_higher_start_of_the_same_node_says_that_the_steward_is_old() -> None:
    node = steward().greet()
    node.hear("b", msg.Inventory("", record_of(number=EPOCH + 1, nonce="newer"), ()))
    assert node.machine.ctx.number == EPOCH + 1
    assert not node.machine.steward.active


# --- the node's end ---------------------------------------------------------------------------------------------------
@pytest.fixture
def node() -> Member:
    return Member(record_of("abc"), POLICY)


def test_a_session_begins_with_an_inventory_and_the_ranks(node: Member) -> None:
    told = [m for m in node.said(object, "a") if isinstance(m, msg.Inventory | msg.RankState) and m.session]
    assert [(type(m), m.serial, m.session) for m in told] == [
        (msg.Inventory, 0, "s1"),
        (msg.RankState, 1, "s1"),
    ]
    assert isinstance(told[0], msg.Inventory) and told[0].done and told[0].incarnation == "b#1"


def test_a_word_of_somebody_else_acknowledges_nothing(node: Member) -> None:
    node.hear("a", msg.Ack(EPOCH, "s0", 1))
    node.hear("c", msg.Ack(EPOCH, "s1", 1))
    mark = node.mark
    node.tick(0.5)
    assert len(node.said(msg.RankState, "a", mark)) == 1


def test_a_rank_is_told_of_when_something_about_it_changed(node: Member) -> None:
    mark = node.mark
    node.feed(ev.RankProgress(1, 4))
    node.feed(ev.RankProgress(1, 4))
    node.slots(1, 1)
    node.feed(ev.RankProgress(1, 5, asks=True))
    node.feed(ev.RankLeft(1, clean=True))
    told = [(m.step, m.free_slots, m.asks, m.left) for m in node.said(msg.RankState, "a", mark)]
    assert told == [(4, 0, None, ""), (4, 1, None, ""), (5, 1, 5, ""), (5, 1, None, "clean")]


def test_a_layout_goes_along_once_per_session(node: Member) -> None:
    node.slots(1, 1, 2, 3)
    for slot, step in ((1, 7), (2, 8)):
        node.capture(slot, step, rank=1)
    node.hello("s2")
    node.capture(3, 9, rank=1)
    one = layout(1, 3)
    assert [m.layouts for m in node.said(msg.Sealed, "a")] == [
        {one.layout_id: one.leaf},
        {},
        {one.layout_id: one.leaf},
    ]


def test_a_layout_that_is_asked_for_is_sent(node: Member) -> None:
    node.slots(1, 1)
    node.capture(1, 7, rank=1)
    node.hear("a", msg.LayoutRequest(EPOCH, layout(1, 3).layout_id))
    node.hear("a", msg.LayoutRequest(EPOCH, layout(1, 3).layout_id, whole=True))
    assert node.said(msg.LayoutReply, "a") == [
        msg.LayoutReply(EPOCH, {layout(1, 3).layout_id: data}) for data in (layout(1, 3).leaf, layout(1, 3).encoded)
    ]
    node.hear("a", msg.LayoutRequest(EPOCH, layout(2, 3).layout_id))
    assert len(node.said(msg.LayoutReply, "a")) == 2


def test_the_same_hello_again_is_answered_again(node: Member) -> None:
    mark = node.mark
    node.hello("s1")
    (again,) = node.said(msg.Inventory, "a", mark)
    assert (again.session, again.serial) == ("s1", 2), "the next one of the session"


def test_a_late_hello_of_a_session_that_was_left_asks_for_a_new_one(node: Member) -> None:
    node.hello("s2")
    mark = node.mark
    node.hello("s1")
    assert node.said(msg.Inventory, "a", mark) == [msg.Inventory("", node.record, ())], "it registers"
    assert node.machine.uplink.session == "s2"


def test_in_a_newer_epoch_nobody_is_obeyed_before_it_says_hello(node: Member) -> None:
    node.slots(1, 1)
    newer = record_of("abc", number=EPOCH + 1, nonce="then", ancestry=(at(9),))
    node.hear("a", msg.Stale(newer))
    assert node.machine.view()["steward"] == ""
    node.hear("a", msg.RestoreDone(EPOCH + 1, EPOCH + 1))
    node.hear("a", msg.Grant(EPOCH + 1, 1, 7))
    assert node.machine.slots.filling() == []


def test_sessions_that_were_left_are_remembered_and_bounded(node: Member) -> None:
    for number in range(SESSIONS_LEFT_MAX + 3):
        node.hello(f"t{number}")
    left = node.machine.uplink._left
    assert len(left) == SESSIONS_LEFT_MAX
    assert "t1" not in left and f"t{SESSIONS_LEFT_MAX}" in left


def test_a_later_one_in_the_succession_is_obeyed_only_when_the_earlier_one_is_gone(node: Member) -> None:
    other = Member(record_of("abc"), POLICY, name="b")
    other.hear("c", msg.OpenSession(EPOCH, "c1"))
    assert other.machine.uplink.steward == "a"
    other.feed(ev.NodeDown("a"))
    other.hear("c", msg.OpenSession(EPOCH, "c1"))
    assert (other.machine.uplink.steward, other.machine.uplink.session) == ("c", "c1")
    other.feed(ev.NodeUp("a"))
    other.hear("a", msg.OpenSession(EPOCH, "s3"))
    assert other.machine.uplink.steward == "a", "the first one takes its office back"


def test_an_order_of_a_steward_that_was_left_is_not_obeyed_but_answered(node: Member) -> None:
    node.hello("s2")
    node.tick(1.0)
    node.order(msg.Ack(EPOCH, "s2", 99))
    node.slots(1, 1)
    mark = node.mark
    node.order(msg.Grant(EPOCH, 1, 7), session="s1")
    assert node.said(msg.Inventory, "a", mark) == [msg.Inventory("", node.record, ())]
    assert not any(slot.state == "filling" for slot in node.machine.slots.by_id.values())
    mark = node.mark
    node.order(msg.Grant(EPOCH, 1, 7), session="s1")
    assert node.said(msg.Inventory, "a", mark) == [], "not more than once per REGISTER_S"
    mark = node.mark
    node.tick(1.0)
    node.hear("c", msg.Grant(EPOCH, 1, 7, "c1"))
    assert node.said(msg.Inventory, "c", mark) == [], "a later one is not asked for a session"


def test_a_steward_that_hears_nothing_is_looked_for(node: Member) -> None:
    """After half of steward_timeout_s, at all that may be it, up to this node."""
    patience = POLICY.steward_timeout_s / 2
    mark = node.mark
    node.tick(patience)
    assert not [m for m in node.said(msg.Inventory, since=mark) if not m.session]
    node.tick(0.25)
    registers = msg.Inventory("", node.record, ())
    assert [registers in node.said(msg.Inventory, to, mark) for to in "abc"] == [True, True, False]
    mark = node.mark
    node.tick(REGISTER_S - 0.25)
    assert registers not in node.said(msg.Inventory, "a", mark)
    node.tick(0.25)
    assert registers in node.said(msg.Inventory, "a", mark)


def keeps_alive(node: Member, seconds: float) -> None:
    """Its steward has heard everything, and says so as often as it does."""
    for _ in range(round(seconds / KEEPALIVE_S)):
        node.tick(KEEPALIVE_S)
        node.order(msg.Ack(EPOCH, node.session, 1))


def test_a_steward_that_has_heard_everything_is_not_looked_for(node: Member) -> None:
    node.order(msg.Ack(EPOCH, "s1", 1))
    mark = node.mark
    keeps_alive(node, 3 * POLICY.steward_timeout_s)
    assert node.said(msg.Inventory, since=mark) == []
    node.feed(ev.RankProgress(1, 4))
    node.tick(POLICY.steward_timeout_s / 2)
    assert not [m for m in node.said(msg.Inventory, since=mark) if not m.session], (
        "the wait began with that word"
    )


def test_each_word_that_is_heard_begins_the_wait_anew(node: Member) -> None:
    node.tick(1.5)
    node.order(msg.Ack(EPOCH, "s1", 0))
    mark = node.mark
    node.tick(1.5)
    assert not [m for m in node.said(msg.Inventory, since=mark) if not m.session]


@pytest.mark.parametrize(("timeout_s", "silent_s"), [(10.0, 10.0), (2.0, SILENT_LEAST_S)])
def test_a_steward_that_keeps_nothing_alive_is_registered_with_anew(timeout_s: float, silent_s: float) -> None:
    """It lost its state directory, or was told to forget the job while this node was stopped: no link ever went (P14, P15)."""
    node = Member(record_of("abc"), Policy(replicas=1, durable=False, steward_timeout_s=timeout_s))
    node.order(msg.Ack(EPOCH, "s1", 1))
    mark = node.mark
    node.tick(silent_s)
    assert node.said(msg.Inventory, since=mark) == []
    node.tick(0.25)
    assert msg.Inventory("", node.record, ()) in node.said(msg.Inventory, "a", mark)
    assert node.machine.uplink.waits() == "no steward: a does not answer"
    node.hello("s2")
    node.order(msg.Ack(EPOCH, "s2", 1))
    mark = node.mark
    node.tick(silent_s)
    assert node.said(msg.Inventory, since=mark) == [], "the wait begins anew"


def test_a_node_that_was_stopped_while_its_job_was_forgotten_asks_and_forgets(node: Member) -> None:
    """It claimed level 1 for hours (the operator; SIGSTOP for 14 s): all that it had to say was heard, and no link went."""
    node.feed(ev.RankLeft(1, clean=True, finished=True))
    node.order(msg.Ack(EPOCH, "s1", 9))
    node.now += 14.0
    mark = node.mark
    node.tick(2 * SILENT_LEAST_S)
    assert msg.Inventory("", node.record, ()) in node.said(msg.Inventory, "a", mark)
    done = node.hear("a", msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH))
    assert [bury.tombstone.ordered for bury in only(done, ins.Bury)] == [EPOCH]


def test_a_new_steward_is_told_where_the_ranks_are_although_they_stand_still(node: Member) -> None:
    """One that waits for its grant makes no step, and says nothing."""
    node.feed(ev.RankProgress(1, 7, asks=True))
    node.hello("s2")
    told = [m for m in node.said(msg.RankState, "a") if m.session == "s2"]
    assert [(m.rank, m.step, m.asks) for m in told] == [(1, 7, 7)]


def test_a_node_without_a_session_looks_for_one_when_it_has_something_to_say() -> None:
    node = Node("b", record_of("abc"), POLICY, running=False)
    node.tick(5.0)
    assert node.said(msg.Inventory) == []
    node.feed(ev.HoldingFound(1, at(7), 1, 0, True, layout(1, 3), ()))
    node.tick(0.25)
    assert node.said(msg.Inventory, "a") == [msg.Inventory("", node.record, ())]
    other = Node("b", record_of("abc"), POLICY)
    other.tick(0.25)
    assert len(other.said(msg.Inventory, "a")) == 1, "a rank is here"


def test_what_is_found_after_the_inventory_was_told_is_told_too() -> None:
    """A trainer brings its memory to a daemon that lost its own: the steward had it made anew from parity for ever."""
    node = Node("b", record_of("abc"), POLICY, running=False)
    node.hear("a", msg.OpenSession(EPOCH, "s1"))
    mark = node.mark
    node.feed(ev.HoldingFound(1, at(7), 1, 0, True, layout(1, 3), ()))
    (held,) = node.said(msg.Held, "a", mark)
    assert (held.fact.snapshot, held.fact.rank, held.lost) == (at(7), 1, False)


def test_a_daemon_outside_the_epoch_registers_with_every_member() -> None:
    node = Node("x", record_of("abc", outside="x"), POLICY, running=False)
    node.feed(ev.HoldingFound(1, at(7), 1, 0, False, layout(1, 3), ()))
    node.tick(0.25)
    assert [len(node.said(msg.Inventory, to)) for to in "abc"] == [1, 1, 1]


def test_a_session_with_too_much_to_say_is_begun_anew(node: Member) -> None:
    for step in range(OUTBOX_MAX):
        node.machine.uplink.tell_held(fact(step, 1, world=3))
    node.machine.ctx.out.clear()
    node.tick(0.25)
    assert node.machine.uplink.session == ""
    assert node.said(msg.Inventory, "a")[-1] == msg.Inventory("", node.record, ())


def test_levels_and_grants_that_were_seen_are_told_in_a_new_session(node: Member) -> None:
    """A steward that follows numbers its grants above them, and does not report as new what was certified."""
    node.certify(1, 7, 1, durable=True)
    node.order(msg.Grant(EPOCH, 9, 8))
    node.order(msg.Grant(EPOCH, 8, 8))
    node.hello("s2")
    assert node.said(msg.Inventory, "a")[-1].certified == ((at(7), 1, True),)
    assert node.said(msg.RankState, "a")[-1].grant == 9


def test_nothing_is_said_of_ranks_before_the_restore_is_done() -> None:
    node = Member(record_of("abc"), POLICY, running=False)
    assert node.said(msg.RankState, "a") == []


def test_whoever_registers_for_ever_and_never_answers_holds_up_nobody() -> None:
    """It hears nothing of what the steward says: each of its words began the patience with it anew."""
    node = Steward(record_of("ab", outside="c"), Policy(replicas=1, durable=False, steward_timeout_s=3.0)).train()
    for _ in range(8):
        node.hear("c", msg.Inventory("", node.record, ()))
        node.tick(1.0)
    node.capture(7).protect(7)
    for _ in range(3):
        node.hear("c", msg.Inventory("", node.record, ()))
        node.tick(1.0)
    assert node.level(7) == 1
