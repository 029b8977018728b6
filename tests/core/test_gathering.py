"""Before an epoch opens: who is asked, who is waited for, and who is not the job (P3, D10, D11)."""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.ids import EpochRecord
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import Tombstone
from ckptd.core.protocol.machine.steward.gather import FRESH_S, NEWCOMER_S, Gather
from ckptd.core.protocol.machine.steward.restore import (
    REFUSALS_KEPT_MAX,
)
from ckptd.core.protocol.machine.uplink import REGISTER_S
from tests.core.elect import BEFORE, BOTH, LAYOUTS, OLD, A, B, C, Elect
from tests.core.machines import Member, at, layout, member, only, record_of, sent


def test_inventories_are_asked_for_when_the_last_rank_stands_there() -> None:
    node = Elect()
    node.join()
    assert sent(node.done, msg.InventoryRequest) == []
    node.report()
    assert sent(node.done, msg.InventoryRequest, "b") == [msg.InventoryRequest("now", (A, B), 1)]


def test_members_of_every_epoch_that_somebody_knows_are_asked_too() -> None:
    """Daemons that no new rank names still hold memory (P3)."""
    known = replace(BEFORE, nodes=(A, C), holders=(member("d"),), ranks=("a", "c"))
    node = Elect().start(known=known)
    assert all(sent(node.done, msg.InventoryRequest, to) for to in "bcd")
    node = Elect(known).start()
    assert all(sent(node.done, msg.InventoryRequest, to) for to in "bcd")
    node = Elect().start()
    node.answer("b", known=known)
    node.tick(0.5)
    assert all(sent(node.done, msg.InventoryRequest, to) for to in "cd"), "heard of in an answer"


def test_there_are_links_to_all_who_are_asked_or_answered() -> None:
    node = Elect()
    node.report()
    assert connected(node) >= {"b"}, "also when no rank has come here yet"
    node.report(known=replace(BEFORE, nodes=(A, C), holders=(member("d"),), ranks=("a", "c")))
    assert connected(node) >= {"b", "c", "d"}


def connected(node: Elect) -> set[str]:
    return {info.node for do in only(node.done, ins.Connect) for info in do.nodes}


def test_who_has_not_answered_is_asked_again() -> None:
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))).start()
    node.answer("b")
    mark = len(node.done)
    node.tick(0.25)
    assert sent(node.done[mark:], msg.InventoryRequest) == []
    node.tick(0.5)
    asked = [do.to for do in only(node.done[mark:], ins.Send) if isinstance(do.message, msg.InventoryRequest)]
    assert asked == ["c"]


def test_a_rank_counts_where_the_world_says_that_it_lives() -> None:
    node = Elect()
    node.join()
    node.report(sender="c")
    node.report(here=(0, 5, -1))
    assert sent(node.done, msg.InventoryRequest) == []


def test_reports_of_a_start_whose_rank_0_lives_elsewhere_are_not_ours() -> None:
    node = Elect()
    node.report(ranks=("b", "a"), here=(0,))
    node.report(ranks=(), here=())
    assert node.machine.steward.restoring.gathering.gather is None


def test_ranks_that_name_different_worlds_or_wishes_are_refused() -> None:
    node = Elect()
    node.join()
    node.report(nodes=(A, B, C))
    assert node.refusals() == [("now", "mismatch")]
    node = Elect()
    node.join()
    node.report(ask=msg.RestoreAsk(step=3))
    assert node.refusals() == [("now", "mismatch")]
    assert node.report() and node.refusals() == [("now", "mismatch")] * 2, "repeated to who did not hear it"
    assert sent(node.done, msg.InventoryRequest) == []


def test_a_newer_start_supersedes_and_the_older_one_does_not_come_back() -> None:
    node = Elect()
    node.join("one")
    node.join("two")
    assert ("one", "superseded") in node.refusals()
    node.report("one")
    node.report("two")
    assert [m.attempt for m in sent(node.done, msg.InventoryRequest, "b")] == ["two"]
    assert node.refusals().count(("one", "superseded")) >= 2


def test_a_start_that_was_seen_before_cannot_supersede() -> None:
    node = Elect()
    node.report("one")
    node.report("two")
    for number in range(REFUSALS_KEPT_MAX):
        node.report(f"t{number}")
    assert len(node.machine.steward.restoring._refused) <= REFUSALS_KEPT_MAX
    assert len(node.machine.steward.restoring._seen) <= REFUSALS_KEPT_MAX + 1


def test_a_late_report_of_a_start_that_had_its_epoch_changes_nothing() -> None:
    """That start is over; what it says must not call off the one that is gathering."""
    node = Elect()
    for attempt in ("one", "two"):
        node.join(attempt)
        node.report(attempt)
        node.answer("b", *BOTH, attempt=attempt, known=BEFORE, done=True)
        node.claimed()
        for phase in ("fetched", "loaded"):
            for rank in (0, 1):
                node.vote(rank, phase)
    node.join("three")
    node.report("one")
    assert node.refusals() == [("one", "superseded")]
    node.report("three")
    assert [m.attempt for m in sent(node.done, msg.InventoryRequest, "b")] == ["one", "two", "three"]


def test_a_late_report_of_a_start_that_is_over_begins_nothing() -> None:
    """Its epoch was done and another one superseded it, before its last report came to its own steward: that gathered again,
    for ranks that were gone (simulator, seed 4313)."""
    node = Elect(ask=None).start()
    node.answer("b")
    node.claimed()
    for rank in (0, 1):
        node.vote(rank, "loaded")
    other = EpochRecord(node.claim.number + 1, "other", ("b", "b"), (B, C))
    node.hear("b", msg.EpochOpen("other", other, other.number, None, False))
    mark = len(node.done)
    node.report(sender="a", here=(0,), opened=True)
    node.report(opened=True)
    assert sent(node.done[mark:], msg.InventoryRequest) == []
    assert ("now", "superseded") in node.refusals()


def test_the_end_of_an_earlier_restore_calls_off_nothing() -> None:
    """A daemon that came back heard of it while a newer start gathered, which began anew without who had answered: an older step
    was restored (P3; simulator, seed 2671572796 of that day)."""
    node = Elect(BEFORE)
    node.tick(REGISTER_S, reporting=False)
    session = sent(node.done, msg.OpenSession, "b")[-1].nonce
    node.start(known=BEFORE)
    node.hear("b", msg.Inventory("", BEFORE, BOTH, LAYOUTS, session=session, done=True, incarnation="b#1"))
    assert only(node.done, ins.FinishRestore), "it heard that the epoch before runs"
    node.answer("b", *BOTH, known=BEFORE, done=True)
    assert [do.attempt for do in only(node.done, ins.ClaimEpoch)] == ["now"]


def test_a_late_report_of_a_rank_that_has_gone_calls_off_nothing() -> None:
    node = Elect()
    node.machine.handle(ev.RankJoined(0, "gone", ("a", "b"), node.nodes, node.ask), node.now)  # its report is on its way
    node.feed(ev.RankLeft(0, False))
    node.join("new")
    node.report("gone", sender="a", here=(0,))
    assert node.refusals() == []
    node.report("new")
    assert [m.attempt for m in sent(node.done, msg.InventoryRequest, "b")] == ["new"]


# --- when to decide ---------------------------------------------------------------------------------------------------
def test_it_is_decided_when_everybody_has_answered() -> None:
    node = Elect().start()
    assert only(node.done, ins.ClaimEpoch) == []
    node.answer("b", *BOTH, known=BEFORE, done=True)
    assert node.claim.ancestry == (at(5, OLD),)


def test_whoever_is_silent_is_waited_for_and_named() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known).start()
    node.answer("b", *BOTH, known=known, done=True)
    node.tick(1.5)
    assert only(node.done, ins.ClaimEpoch) == [], "node c may hold something newer (P3)"
    node.tick(0.75)
    node.claimed()
    assert node.opens()[-1].errors[0] == "no answer from c"


def test_whoever_is_heard_of_late_is_asked_at_once_and_waited_for() -> None:
    """The last answer in time named a member of a newer epoch, and it was decided without having asked it (P3; simulator,
    seed 4540)."""
    node = Elect().start()
    node.tick(1.75)
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    mark = len(node.done)
    node.answer("b", *BOTH, known=known, done=True)
    (asked,) = sent(node.done[mark:], msg.InventoryRequest, "c")
    assert (asked.attempt, asked.nodes, asked.turn) == ("now", (A, B, C), 1)
    node.tick(0.75)
    assert only(node.done, ins.ClaimEpoch) == []
    newer = tuple(replace(one, snapshot=at(6, OLD)) for one in BOTH)
    node.answer("c", *newer, known=known, done=True)
    assert node.claim.ancestry == (at(6, OLD),)


def test_whoever_is_heard_of_late_is_not_waited_for_any_longer_than_that() -> None:
    node = Elect().start()
    node.tick(1.75)
    node.answer("b", *BOTH, known=replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c")), done=True)
    node.tick(NEWCOMER_S)
    assert len(only(node.done, ins.ClaimEpoch)) == 1


def test_a_node_that_is_down_is_not_waited_for_when_nothing_newer_can_be_there() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known)
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", *BOTH, known=known, done=True)
    assert len(only(node.done, ins.ClaimEpoch)) == 1


def test_a_node_that_was_down_before_it_was_heard_of_is_asked_first() -> None:
    """A node was cut off while the job was started elsewhere; storage tells it of that start, when its links are about to be whole
    again: the members know whether that start ever ran (P3)."""
    node = Elect(BEFORE, durable=True, inventory_timeout_s=10.0)
    node.feed(ev.NodeDown("c"))
    node.now += 5.0
    node.start().answer("b", *BOTH, known=BEFORE, done=True)
    newest = EpochRecord(OLD + 1, "there", ("c",), (C,), (at(5, OLD),), (), (OLD, ()))
    node.feed(ev.DurableRead("now", True, newest, (at(5, OLD),)))
    assert only(node.done, ins.ClaimEpoch) == []
    node.tick(NEWCOMER_S)
    assert len(only(node.done, ins.ClaimEpoch)) == 1, "its link is still down"


def test_a_node_that_is_down_is_waited_for_when_something_newer_was_certified() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known)
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", *BOTH, known=known, done=True, certified=((at(6, OLD), 1, False),))
    assert only(node.done, ins.ClaimEpoch) == [], "it may be back with step 6"
    node = Elect(known)
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", known=known, done=True)
    assert only(node.done, ins.ClaimEpoch) == [], "there is nothing without it"


def test_a_node_that_is_down_is_waited_for_when_it_may_have_what_was_asked_for() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known, ask=msg.RestoreAsk(step=3))
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", *BOTH, known=known, done=True)
    assert node.refusals() == []
    node.feed(ev.NodeUp("c"))
    older = tuple(replace(one, snapshot=at(3, OLD)) for one in BOTH)
    node.answer("c", *older, known=known, done=True)
    assert node.claim.ancestry == (at(3, OLD),)


def test_ranks_that_ask_for_no_restore_do_not_wait_for_a_node_that_is_down() -> None:
    known = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))
    node = Elect(known, ask=None)
    node.feed(ev.NodeDown("c"))
    node.start().answer("b", *BOTH, known=known, done=True)
    assert node.claim.ancestry == ()


def test_a_member_of_the_new_start_is_waited_for_even_when_it_is_down() -> None:
    node = Elect()
    node.start()
    node.feed(ev.NodeDown("b"))
    node.tick(1.0, reporting=False)
    assert only(node.done, ins.ClaimEpoch) == []


def test_it_is_not_decided_for_ranks_that_are_not_heard_of_any_more() -> None:
    """A dead attempt must not supersede a living one."""
    node = Elect(inventory_timeout_s=10.0).start()
    node.tick(FRESH_S, reporting=False)
    node.answer("b", *BOTH, known=BEFORE)
    assert only(node.done, ins.ClaimEpoch) == []
    node.report()
    node.tick(0.25, reporting=False)
    assert len(only(node.done, ins.ClaimEpoch)) == 1


def test_it_is_not_decided_for_our_own_ranks_when_they_have_gone() -> None:
    """Another start had superseded it, and the next thing heard of that made it open one more epoch: both were over then
    (simulator, seeds 180 and 298 of that day)."""
    node = Elect()
    node.open()
    node.hear("b", msg.Stale(EpochRecord(9, "other", ("b", "b"), (B, C))))
    node.feed(ev.RankLeft(0, False))
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.answer("c")
    node.report()
    node.tick(2.5)
    assert len(only(node.done, ins.ClaimEpoch)) == 1, "the one before that"


def test_after_this_process_stood_still_the_ranks_must_be_heard_anew() -> None:
    node = Elect().start()
    node.now += Policy().steward_timeout_s
    node.answer("b", *BOTH, known=BEFORE)
    assert only(node.done, ins.ClaimEpoch) == []


def test_storage_is_read_and_read_again_while_it_does_not_answer() -> None:
    node = Elect(durable=True).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    reads = [do for do in only(node.done, ins.ReadDurable) if do.attempt == "now"]
    assert (len(reads), only(node.done, ins.ClaimEpoch)) == (1, [])
    node.tick(0.75)
    assert len([do for do in only(node.done, ins.ReadDurable) if do.attempt == "now"]) == 2
    node.feed(ev.DurableRead("another", True))
    assert only(node.done, ins.ClaimEpoch) == []
    node.feed(ev.DurableRead("now", True, replace(BEFORE, number=9, nonce="newest")))
    assert node.claim.number == 10
    assert [do for do in only(Elect().start().done, ins.ReadDurable) if do.attempt] == [], (
        "there is no storage"
    )


def test_what_storage_answers_to_an_earlier_question_does_not_count() -> None:
    """A read that was begun before another start took the number: that start was never asked, and superseded without a word of
    what it held (a reader's history)."""
    node = Elect(BEFORE, durable=True).start(known=BEFORE)
    node.answer("b", *BOTH, known=BEFORE, done=True)
    first = only(node.done, ins.ReadDurable)[-1].turn
    node.feed(ev.DurableRead("now", True, BEFORE, ()))
    other = EpochRecord(OLD + 1, "other", ("c",), (C,), (at(5, OLD),))
    node.claimed(False, other.number)
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.feed(ev.DurableRead("now", True, BEFORE, (), turn=first))
    assert len(only(node.done, ins.ClaimEpoch)) == 1
    node.feed(ev.DurableRead("now", True, other, ()))
    assert sent(node.done, msg.InventoryRequest, "c")


def test_a_read_that_fails_after_another_has_answered_changes_nothing() -> None:
    node = Elect(durable=True).start()
    node.tick(1.0)
    assert len(only(node.done, ins.ReadDurable)) >= 2, "it was slow"
    node.feed(ev.DurableRead("now", True, None, ()), ev.DurableRead("now", False, reason="EIO"))
    node.answer("b", incarnation="b#1")
    assert node.refusals() == []


def test_answers_to_another_start_do_not_count() -> None:
    node = Elect().start()
    node.answer("b", *BOTH, attempt="another", known=BEFORE)
    assert only(node.done, ins.ClaimEpoch) == []


# --- what it adds up to -----------------------------------------------------------------------------------------------
def gathered(*records: EpochRecord, newest: EpochRecord | None = None, **said: msg.Inventory) -> Gather:
    """A start of rank 0, on node a, that knows these records; storage names the newest it has."""
    gather = Gather("now", ("a",), (A,), 0.0)
    gather.records, gather.durable = list(records), ev.DurableRead("now", True, newest)
    gather.said, gather.answers = dict(said), dict(said)
    return gather


def test_an_epoch_that_trained_beside_one_that_never_ran_counts_with_its_own_past() -> None:
    """It was declared fresh: what was left behind then is not restored for what is lost since (P1)."""
    trained = EpochRecord(OLD + 1, "trained", ("b",), (B,), before=(OLD, ()))
    never = EpochRecord(OLD + 2, "never", ("c",), (C,), before=(OLD, ()))
    b = msg.Inventory("now", trained, (msg.HoldingFact(at(2, OLD + 1), 0, 0, "x"),))
    c = msg.Inventory("now", never, (), never=True)
    held = msg.Inventory("now", BEFORE, BOTH)
    assert gathered(BEFORE, trained, never, a=held, b=b, c=c).lineage() == trained


def test_of_the_records_up_to_an_order_to_forget_only_the_one_that_storage_names_is_left() -> None:
    """Epoch 5 had begun anew, and is forgotten; what storage has is of epoch 4, and would be taken for left behind."""
    anew = EpochRecord(OLD + 1, "anew", ("a", "b"), (A, B), before=(OLD, ()))
    gather = gathered(BEFORE, anew, newest=BEFORE)
    gather.bury(Tombstone(OLD + 1, OLD + 1))
    assert (gather.records, gather.lineage()) == ([BEFORE], BEFORE)


def test_of_what_a_node_was_told_only_what_was_not_forgotten_counts() -> None:
    """Nor does what a later start went on from."""
    since = EpochRecord(OLD + 1, "since", ("a", "b"), (A, B), (at(5, OLD),), before=(OLD, ()))
    told = (at(5, OLD), 1, False), (at(6, OLD), 1, False), (at(7, OLD + 1), 1, False)
    gather = gathered(since, b=msg.Inventory("now", since, BOTH, certified=told))
    gather.bury(Tombstone(OLD, OLD))
    assert gather.answers["b"].certified == (told[0], told[2])
    assert (gather.answers["b"].holdings, gather.buried) == (BOTH, {})


def test_what_was_forgotten_is_said_only_of_who_still_holds_it() -> None:
    gather = gathered(b=msg.Inventory("now", BEFORE, BOTH))
    gather.bury(Tombstone(OLD, OLD))
    assert gather.buried == {"b": at(5, OLD)}
    gather.said["b"] = msg.Inventory("now", BEFORE, ())  # it was asked once more
    gather.bury(Tombstone(OLD, OLD))
    assert gather.buried == {}


def test_tables_that_the_asker_has_need_not_be_brought() -> None:
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c")))
    one, other = (layout(rank) for rank in (0, 1))
    node.feed(ev.HoldingFound(50, at(5, OLD), 0, 0, True, one, ()))
    node.start()
    assert {asked.tables for asked in sent(node.done, msg.InventoryRequest)} == {(one.fragments.table.digest,)}
    node.answer("b", *BOTH, layouts={other.layout_id: other.leaf})
    gather = node.machine.steward.restoring.gathering.gather
    assert gather is not None and gather.layouts()[other.layout_id] == other


def test_an_answer_that_leans_on_a_table_that_is_not_here_is_none_and_the_node_is_asked_again() -> None:
    """It may be late, and have been for another question of that number."""
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))).start()
    node.answer("b", *BOTH, layouts={layout(0).layout_id: layout(0).leaf})
    gather = node.machine.steward.restoring.gathering.gather
    assert gather is not None and "b" not in gather.answers
    mark = len(node.done)
    node.tick(0.75)
    assert sent(node.done[mark:], msg.InventoryRequest, "b")


def test_an_answer_whose_layout_is_none_is_an_answer() -> None:
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))).start()
    one = layout(0)
    node.answer("b", *BOTH, layouts={one.layout_id: b"nothing", layout(1).layout_id: layout(1).encoded})
    gather = node.machine.steward.restoring.gathering.gather
    assert gather is not None and "b" in gather.answers and gather.layouts().keys() == {layout(1).layout_id}


def test_an_inventory_brings_the_tables_that_the_asker_lacks_once() -> None:
    node = Member(record_of("abc"))
    node.slots(1, 1)
    node.capture(1, 7, rank=1)
    one, peers = layout(1, 3), layout(2, 3)
    node.feed(ev.ReplicaArrived(at(7), 2, 1, 60, peers, (), False))
    table = one.fragments.table
    assert peers.fragments.table is table
    for tables, brought in (((), [one.encoded, peers.leaf]), ((table.digest,), [one.leaf, peers.leaf])):
        node.hear("a", msg.InventoryRequest("next", (A,), 1, tables))
        assert list(node.said(msg.Inventory, "a")[-1].layouts.values()) == brought


def moved(known: EpochRecord, newer: EpochRecord) -> Elect:
    """Epoch 3 ran here and on c; c came back at another address, in another domain, for epoch 4, when this node was away."""
    node = Elect(known)
    node.start(known=newer)
    return node


def test_a_holder_that_moved_is_asked_where_the_newest_record_says_it_is() -> None:
    """Where it had been for an older epoch nobody answered: a snapshot was not found although its holder was there."""
    then = replace(C, control="tcp://old", bulk="old", domain="r3")
    now = replace(C, control="tcp://new", bulk="new", domain="a", incarnation="c#2")
    third = EpochRecord(3, "third", ("a", "c"), (A, then), (), (), (-1, ()))
    fourth = EpochRecord(4, "fourth", ("b", "c"), (B, now), (at(5, 3),), (A,), (3, ()))
    node = moved(third, fourth)
    dialed = [info.control for do in only(node.done, ins.Connect) for info in do.nodes if info.node == "c"]
    assert dialed[-1] == "tcp://new" and node.machine.ctx.domain("c") == "a"
    node.answer("b", *(msg.HoldingFact(at(5, 3), rank, 0, layout(rank).layout_id) for rank in (0, 1)), known=fourth, done=True)
    node.answer("a", known=third)
    node.feed(ev.NodeDown("c"))
    node.tick(6.0)
    node.claimed()
    assert [info.control for info in node.opens()[-1].record.holders if info.node == "c"] == ["tcp://new"]


def test_and_not_where_an_older_record_that_is_heard_of_later_says() -> None:
    then, now = replace(C, control="tcp://old"), replace(C, control="tcp://new")
    third = EpochRecord(3, "third", ("b", "c"), (B, then), (), (), (-1, ()))
    fourth = EpochRecord(4, "fourth", ("a", "c"), (A, now), (at(5, 3),), (B,), (3, ()))
    node = moved(fourth, third)
    assert [info.control for do in only(node.done, ins.Connect) for info in do.nodes if info.node == "c"] == ["tcp://new"]
    later = EpochRecord(5, "fifth", ("b",), (B,), (at(6, 3),), (then,), (3, ()))  # decided by those who knew the third only
    node.hear("b", msg.JoinReport("new", (), (), (), None, later))
    assert node.machine.ctx.nodes["c"].control == "tcp://new"
