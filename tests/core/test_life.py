"""A job's life (D19): who says that it is over, what goes in which order, and what a forgotten job leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import life as lives
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import JobLife, Life, Order, Tombstone, expired, orders, revives, spare
from ckptd.core.protocol.machine.lifetime import RETURN_S, told_life
from tests.core.certificates import steward
from tests.core.elect import BEFORE, BOTH, OLD, A, B, C, Elect
from tests.core.machines import EPOCH, Member, Node, Steward, at, fact, layout, only, record_of, sent

GRACE_S, LINGER_S, ORPHAN_S = 10.0, 600.0, 86_400.0
STORED, UNSTORED = Policy(durable=True), Policy(durable=False)
NOBODY_S = 3 * ORPHAN_S


def of(member: Member) -> Life:
    return member.machine.lifetime.life.state


def heard(member: Member, life: Life) -> list[ins.Instruction]:
    return member.order(msg.Ack(EPOCH, member.session, 99, life.value))


# --- the states ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("left", "life"),
    [
        (["", "died"], "running"), (["died", "clean"], "orphaned"), (["finished", "finished"], "finished"),
        (["finished", "died"], "orphaned"), (["finished", None], ""), (["", None], "running"), ([], ""),
    ],
)  # fmt: skip
def test_the_stewards_word_follows_from_what_is_known_of_each_rank(left: list[str | None], life: str) -> None:
    assert told_life(left) == life


def test_no_transition_but_those_of_the_table() -> None:
    for state in Life:
        for other in Life:
            life = JobLife(state)
            assert life.may_become(other) == ((state, other) in lives.TRANSITIONS)
            if not life.may_become(other):
                with pytest.raises(AssertionError):
                    life.become(other, 0.0)


def test_a_node_keeps_the_stewards_word_and_writes_it_down() -> None:
    member = Member(record_of("ab"), running=False)
    member.tick()
    assert of(member) is Life.RUNNING
    done = heard(member, Life.ORPHANED)
    assert of(member) is Life.ORPHANED and only(done, ins.PersistLife) == [ins.PersistLife("orphaned", 0.0)]
    assert only(heard(member, Life.ORPHANED), ins.PersistLife) == [], "once"
    assert of(member) is Life.ORPHANED and member.machine.lifetime.age(member.now + 7) == pytest.approx(7)
    heard(member, Life.RUNNING)
    assert of(member) is Life.RUNNING


def test_a_rank_that_is_here_keeps_the_job_running_whatever_the_steward_believes() -> None:
    member = Member(record_of("ab"))
    heard(member, Life.ORPHANED)
    assert of(member) is Life.RUNNING
    member.feed(ev.RankLeft(1, clean=False))
    heard(member, Life.ORPHANED)
    assert of(member) is Life.ORPHANED
    member.join(1)
    member.tick()
    assert of(member) is Life.RUNNING


def test_without_a_steward_a_job_is_orphaned_after_orphan_linger_s() -> None:
    member = Member(record_of("ab"), Policy(replicas=1, durable=False, orphan_linger_s=20.0), running=False)
    member.tick(18)
    assert of(member) is Life.RUNNING
    member.tick(4)
    assert of(member) is Life.ORPHANED
    assert member.machine.lifetime.age(member.now) > 20, "since somebody last knew of a rank"


def test_who_heard_of_the_job_or_had_a_rank_of_it_calls_it_orphaned_that_much_later() -> None:
    policy = Policy(replicas=1, durable=False, orphan_linger_s=20.0)
    told, had = Member(record_of("ab"), policy, running=False), Member(record_of("ab"), policy)
    told.tick(18)
    heard(told, Life.RUNNING)
    had.tick(30)
    had.feed(ev.RankLeft(1, clean=False))
    for member in (told, had):
        member.tick(4)
        assert of(member) is Life.RUNNING
        member.tick(18)
        assert of(member) is Life.ORPHANED


def test_the_life_survives_the_daemon() -> None:
    node = Node("b", record_of("ab"), running=False)
    node.feed(ev.Restarted(node.record, None, "finished", 123.0))
    node.tick()
    assert node.machine.lifetime.life.state is Life.FINISHED
    assert node.machine.lifetime.age(node.now) == pytest.approx(123.25)
    assert node.machine.ranks.here[1].left == "finished", "its ranks have not died since"
    node.feed(ev.Restarted(node.record, sealed=EPOCH))
    node.hear("a", msg.InventoryRequest("next", ()))
    assert node.said(msg.Inventory, "a")[-1].sealed == EPOCH, "a start without it would begin anew in silence (P1)"


def test_ranks_that_do_not_come_back_to_a_restarted_daemon_are_dead() -> None:
    """Not before they had the time to: a connection is tried again every few seconds."""
    member = Member(record_of("ab"), running=False)
    member.tick(RETURN_S - 1)
    assert not member.machine.ranks.here
    member.tick(2)
    assert member.machine.ranks.here[1].left == "died"
    assert {state.left for state in member.said(msg.RankState, "a")} == {"died"}


def test_the_steward_tells_what_it_knows_with_each_keep_alive() -> None:
    node = steward().greet()
    b = node.others["b"]
    node.feed(ev.RankLeft(0, clean=True, finished=True))
    b.tell(msg.RankState(EPOCH, 1, 9, 2, None, "finished"))
    node.tick(3)
    assert node.said(msg.Ack, "b")[-1].life == "finished"
    assert node.machine.lifetime.life.state is Life.FINISHED


# --- the order --------------------------------------------------------------------------------------------------------------
def test_memory_goes_in_the_order_of_the_design() -> None:
    assert orders(Life.RUNNING, NOBODY_S, STORED) == orders(Life.FORGOTTEN, NOBODY_S, STORED) == ()
    assert orders(Life.FINISHED, 0, STORED) == (Order.RELEASED, Order.FINISHED_DURABLE)
    assert orders(Life.FINISHED, 0, UNSTORED) == (Order.RELEASED,)
    assert orders(Life.FINISHED, LINGER_S, UNSTORED) == (Order.RELEASED, Order.FINISHED_UNSTORED)
    assert orders(Life.ORPHANED, GRACE_S - 1, STORED) == (Order.RELEASED,)
    assert orders(Life.ORPHANED, GRACE_S, STORED) == (Order.RELEASED, Order.ORPHANED_DURABLE)
    assert orders(Life.ORPHANED, ORPHAN_S - 1, UNSTORED) == (Order.RELEASED,)
    assert orders(Life.ORPHANED, ORPHAN_S, UNSTORED) == (Order.RELEASED, Order.ORPHANED_LAST)
    assert sorted(Order) == list(Order)


def test_without_pressure_only_what_nobody_misses_goes_and_late() -> None:
    assert expired(Life.FINISHED, LINGER_S - 1, STORED) == ()
    assert expired(Life.FINISHED, LINGER_S, STORED) == (Order.FINISHED_DURABLE,)
    assert expired(Life.FINISHED, LINGER_S, UNSTORED) == (Order.FINISHED_UNSTORED,)
    assert expired(Life.ORPHANED, ORPHAN_S - 1, STORED) == ()
    assert expired(Life.ORPHANED, ORPHAN_S, STORED) == (Order.ORPHANED_DURABLE,)
    assert expired(Life.ORPHANED, ORPHAN_S, UNSTORED) == ()


def test_what_each_order_spares() -> None:
    held, everything = {at(3), at(4), at(5)}, {at(3), at(4), at(5)}

    def goes(order: Order, complete: int | None, *durable: int, policy: Policy = STORED) -> set[int]:
        whole = None if complete is None else at(complete)
        found = spare(order, held, whole, [at(step) for step in durable], lambda snapshot: snapshot.step != 9, policy)
        return {snapshot.step for snapshot in found}

    assert goes(Order.RELEASED, 5, 5) == set()
    assert goes(Order.ORPHANED_DURABLE, 5, 5) == {3, 4, 5}
    assert goes(Order.ORPHANED_DURABLE, 5, 4) == {3, 4}, "the newest is not durable"
    held.add(at(4, grant=99))
    assert goes(Order.ORPHANED_DURABLE, 5, 3) == {3} and goes(Order.ORPHANED_DURABLE, 5, 4) == {3, 4}, "whichever capture"
    held.discard(at(4, grant=99))
    assert goes(Order.FINISHED_DURABLE, 5) == set() == goes(Order.FINISHED_DURABLE, 5, 9), "nor by what was left behind"
    assert goes(Order.FINISHED_UNSTORED, 5) == {s.step for s in everything}
    assert goes(Order.ORPHANED_LAST, 4) == {3, 5}
    assert goes(Order.ORPHANED_LAST, None) == set(), "which of them is whole, nobody can say"
    assert goes(Order.ORPHANED_LAST, 4, policy=Policy(orphan_drop=True)) == {3, 4, 5}


def holding(life: Life, policy: Policy = STORED) -> Member:
    """Node b holds step 5, which is certified, and its own rank is gone."""
    member = Member(record_of("ab"), policy)
    member.feed(ev.HoldingFound(7, at(5), 1, 0, True, layout(1), ()))
    member.order(msg.Certificate(EPOCH, 1, at(5), 1, 1, False))
    member.feed(ev.RankLeft(1, clean=True, finished=life is Life.FINISHED))
    heard(member, life)
    assert of(member) is life
    return member


def test_a_node_lets_go_of_what_storage_has_and_tells_the_steward() -> None:
    member = holding(Life.ORPHANED)
    asked = ev.SpareAsked(Order.ORPHANED_DURABLE, (at(5),))
    assert only(member.feed(asked), ins.FreeSlot) == [], "not within the grace time"
    member.tick(GRACE_S)
    assert only(member.feed(ev.SpareAsked(Order.ORPHANED_DURABLE, ())), ins.FreeSlot) == []
    assert only(member.feed(ev.SpareAsked(Order.ORPHANED_DURABLE, (at(5),), ())), ins.FreeSlot) == [], "others' need has an end"
    done = member.feed(asked)
    assert only(done, ins.FreeSlot) == [ins.FreeSlot(7)]
    assert [held.lost for held in sent(done, msg.Held, "a")] == [True]
    assert member.machine.admits_replica(at(5), 0) == "void", "nor is it taken in again; another node may"
    assert member.machine.admits_replica(at(6), 0) == ""


def test_what_a_restore_reads_stays() -> None:
    member = holding(Life.FINISHED)
    member.hear("c", msg.InventoryRequest("other", ()))
    assert only(member.feed(ev.SpareAsked(Order.FINISHED_DURABLE, (at(5),))), ins.FreeSlot) == []


def test_what_expires_without_pressure_is_asked_for_while_something_is_held() -> None:
    member = holding(Life.FINISHED)
    assert member.machine.lifetime.expired() == ()
    member.tick(LINGER_S)
    assert member.machine.lifetime.expired() == (Order.FINISHED_DURABLE,)
    member.feed(ev.SpareAsked(Order.FINISHED_DURABLE, (at(5),)))
    assert member.machine.lifetime.expired() == (), "storage is not asked for nothing"


def test_what_was_spared_is_taken_in_again_by_an_epoch_that_opens_on_it() -> None:
    """P2: it would lack this node's copies for as long as it counts."""
    member = holding(Life.FINISHED)
    member.feed(ev.SpareAsked(Order.FINISHED_DURABLE, (at(5),)))
    assert member.machine.admits_replica(at(5), 0) == "void"
    member.hear("a", msg.Stale(record_of("ab", number=EPOCH + 1, nonce="next", ancestry=(at(5),))))
    assert member.machine.admits_replica(at(5), 0) == ""


# --- the end ------------------------------------------------------------------------------------------------------------------
def test_a_job_of_which_nothing_is_left_here_is_forgotten() -> None:
    member = holding(Life.FINISHED)
    member.tick(LINGER_S)
    assert only(member.done, ins.Bury) == [], "it holds something"
    member.feed(ev.SpareAsked(Order.FINISHED_DURABLE, (at(5),)))
    assert only(member.tick(), ins.Bury) == [ins.Bury(Tombstone(EPOCH, sealed=EPOCH))]
    assert only(member.tick(), ins.Bury) == [], "once"
    assert only(heard(member, Life.RUNNING), ins.PersistLife) == [], "a word on its way does not write its file again"


def test_the_operators_word_forgets_all_but_a_running_job() -> None:
    member = Member(record_of("ab"))
    assert only(member.feed(ev.ForgetOrdered(EPOCH)), ins.Bury) == []
    assert member.machine.lifetime.refusal() == ("ranks of it are here", 0.0)
    member = holding(Life.ORPHANED)
    assert only(member.feed(ev.ForgetOrdered(EPOCH - 1)), ins.Bury) == [], "it has begun anew since"
    assert only(member.feed(ev.ForgetOrdered(EPOCH)), ins.Bury) == [ins.Bury(Tombstone(EPOCH, EPOCH, EPOCH))]


def test_a_node_without_ranks_refuses_for_as_long_as_a_steward_that_is_up_says_that_it_runs() -> None:
    member = Member(record_of("ab", outside="c"), name="c", running=False)
    assert member.machine.lifetime.refusal() == ("it runs, says its steward a", 0.0)
    assert only(member.feed(ev.ForgetOrdered(EPOCH)), ins.Bury) == []
    member.feed(ev.NodeDown("a"))
    assert member.machine.lifetime.refusal() == ("", 0.0)
    assert len(only(member.feed(ev.ForgetOrdered(EPOCH)), ins.Bury)) == 1


def test_who_holds_nothing_of_a_job_forgets_it_when_it_is_over_or_was_never_known() -> None:
    policy = Policy(durable=False, job_linger_s=5.0)
    member = Member(record_of("ab", outside="c"), policy, name="c", running=False)
    asked = Node("c", record_of("ab"), policy, running=False)
    asked.machine.ctx.record = None
    assert only(member.tick(10.0), ins.Bury) == [], "it runs elsewhere"
    assert only(asked.tick(4.0), ins.Bury) == []
    assert only(asked.tick(2.0), ins.Bury) == [ins.Bury(Tombstone())], "somebody had a question, and did not come again"


def test_what_storage_says_is_heard_unless_the_job_is_forgotten_by_it() -> None:
    """The steward asks once: while ranks may come back it must hear the answer. One that forgets claims no epoch there again."""
    early, late = (Steward(record_of("ab"), Policy(durable=True), running=False) for _ in range(2))
    said = ev.DurableRead("", True, record_of("ab", number=EPOCH - 1), (), forgotten=EPOCH)
    early.feed(said)
    assert early.machine.steward.table.storage_read
    late.tick(RETURN_S)
    assert late.feed(said) == [ins.Bury(Tombstone(EPOCH, EPOCH))]


def test_a_node_that_returns_forgets_what_was_forgotten_meanwhile() -> None:
    member = holding(Life.ORPHANED)
    done = member.hear("a", msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH - 1))
    assert only(done, ins.Bury) == []
    done = member.hear("a", msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH))
    assert only(done, ins.Bury) == [ins.Bury(Tombstone(EPOCH, EPOCH, EPOCH))]


def test_who_has_forgotten_the_job_is_not_talked_to_by_one_where_it_runs() -> None:
    """It was ordered to while the link was cut, and has one answer to each word about that epoch. As this was answered in turn,
    they spoke at the speed of the wire; as it was taken for one that registers, no steward was ever sure of its books (a
    reader's history)."""
    node = Steward(record_of("a", outside="d"), Policy(replicas=0, durable=False))
    answer = msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH)
    for _ in range(30):
        assert sent(node.tick(1.0), msg.OpenSession, "d"), "it may know of the job by now"
        assert [do for do in node.hear("d", answer) if isinstance(do, ins.Send) and do.to == "d"] == []
    assert node.machine.steward.sessions.settled()


def unwritten(life: str = "", **policy: object) -> Node:
    """Its disk was full: a daemon that came back with an epoch, and with memory of one that it could not write down."""
    wanted = {"durable": False, "job_linger_s": 5.0, "orphan_linger_s": 5.0, **policy}
    node = Node("b", record_of("ab"), Policy(**wanted), running=False)  # type: ignore[arg-type]
    if life:
        node.feed(ev.Restarted(node.record, life=life, life_s=LINGER_S))
    node.feed(ev.HoldingFound(7, at(9, EPOCH + 2), 1, 0, True, layout(1), ()))
    return node


def test_the_tombstone_names_what_was_sealed_in_an_epoch_that_could_not_be_written_down() -> None:
    """It named the older epoch, and the next start called it proven that nothing was lost (a reader's history, P15)."""
    node = unwritten()
    node.feed(ev.SlotsGone(1, (7,)))
    node.tick(30.0)
    assert only(node.done, ins.Bury) == [ins.Bury(Tombstone(EPOCH + 2, 0, EPOCH + 2))]


def test_an_order_to_forget_takes_nothing_of_an_epoch_after_it() -> None:
    """The job had begun anew since, in an epoch that could not be written down here: the only memory of it went with what a node
    without ranks of it had been ordered to forget (a reader's history, P1)."""
    node = unwritten(orphan_linger_s=2 * RETURN_S)
    node.tick(RETURN_S + 1.0)
    assert only(node.hear("a", msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH)), ins.Bury) == []
    assert only(node.feed(ev.ForgetOrdered(EPOCH + 1)), ins.Bury) == []
    assert only(node.feed(ev.ForgetOrdered(node.machine.lifetime.newest())), ins.Bury) == [ins.Bury(Tombstone(7, 7, 7))]


def test_what_was_sealed_names_the_newest_epoch_of_this_life_and_none_of_one_that_was_forgotten() -> None:
    """Its memory is gone since, as a slot was damaged or retired: an order for the epoch before is still not for this one."""
    node = unwritten(orphan_linger_s=2 * RETURN_S)
    node.feed(ev.SlotsGone(1, (7,)))
    node.tick(RETURN_S + 1.0)
    assert only(node.feed(ev.ForgetOrdered(EPOCH + 1)), ins.Bury) == []
    assert node.machine.lifetime.newest() == EPOCH + 2
    anew = Node("b", record_of("ab"), running=False)
    anew.machine.ctx.record = None
    anew.feed(ev.Restarted(None, tombstone=Tombstone(EPOCH, EPOCH, EPOCH)))
    assert anew.machine.lifetime.newest() == 0


@pytest.mark.parametrize("back", [True, False])
def test_a_daemon_whose_ranks_may_come_back_forgets_nothing_by_order(back: bool) -> None:
    """It was restarted, and told of an order that it had not heard before its ranks were back: they could not enter their epoch any
    more, and the other nodes of it went on without snapshots (P14; simulator, seed 7400004737)."""
    node = Node("b", record_of("ab"), Policy(durable=False), running=False)
    node.tick()
    said = node.hear("a", msg.Inventory("", None, (), buried=EPOCH, forgotten=EPOCH))
    assert only(said, ins.Bury) == [] and node.machine.lifetime.refusal()[1] > 0
    if back:
        node.feed(ev.RankJoined(1, node.record.nonce, node.record.ranks, node.record.nodes, None, running=True))
    assert len(only(node.tick(RETURN_S), ins.Bury)) == (not back)
    if back:
        node.feed(ev.RankLeft(1, clean=False))
        assert only(node.tick(), ins.Bury) == [], "they went on after that order, which is void (P1)"


def test_memory_of_an_epoch_that_could_not_be_written_down_is_not_of_the_job_that_was_over_before() -> None:
    """It was written down that the job had finished, ten minutes before: what its next start had sealed went at once (P1)."""
    node = unwritten("finished", job_linger_s=LINGER_S, orphan_linger_s=ORPHAN_S)
    assert node.machine.lifetime.life.state is Life.RUNNING
    assert only(node.feed(ev.SpareAsked(Order.FINISHED_UNSTORED, ())), ins.FreeSlot) == []


def test_no_word_about_the_past_brings_a_forgotten_job_back() -> None:
    stone = Tombstone(EPOCH, EPOCH)
    old, new = record_of("ab"), record_of("ab", number=EPOCH + 1)
    for past in (msg.Ack(EPOCH, "s", 1, "running"), msg.OpenSession(EPOCH, "s"), msg.Stale(old), msg.Inventory("", old, ()),
                 msg.EpochOpen("x", old, EPOCH, None, False), msg.Held(EPOCH, fact(5, 0))):  # fmt: skip
        assert not revives(past, stone) and revives(past, Tombstone())
    join = msg.JoinReport("x", (), (), (), None, old)
    opened = msg.EpochOpen("x", new, EPOCH + 1, None, False)
    for now in (msg.Stale(new), msg.OpenSession(EPOCH + 1, "s"), msg.InventoryRequest("x", ()), join, opened):
        assert revives(now, stone)
    node = Node("b", old, running=False)
    node.machine.ctx.record = None
    node.feed(ev.Restarted(None, tombstone=stone))
    node.hear("a", msg.Stale(old))
    node.feed(ev.HoldingFound(7, at(5), 1, 0, True, layout(1), ()))
    assert node.machine.ctx.record is None and only(node.done, ins.FreeSlot) == [ins.FreeSlot(7)]
    assert node.machine.admits_replica(at(6), 1) == "stale epoch"


def test_an_epoch_that_opens_on_a_node_without_ranks_of_it_begins_a_life() -> None:
    """What was written down of the one before had the node forget it at once (simulator, seed 261)."""
    node = Node("c", record_of("ab", outside="c"), running=False)
    node.feed(ev.Restarted(node.record, None, "orphaned", 2 * LINGER_S))
    node.hear("a", msg.Stale(record_of("ab", number=EPOCH + 1, nonce="next", outside="c")))
    assert only(node.tick(), ins.Bury) == [] and node.machine.lifetime.life.state is Life.RUNNING


def test_and_a_life_is_no_orphan_for_how_long_the_one_before_was_silent() -> None:
    node = Node("c", record_of("ab", outside="c"), Policy(orphan_linger_s=20.0), running=False)
    node.tick(30.0)
    assert node.machine.lifetime.life.state is Life.ORPHANED
    node.hear("a", msg.Stale(record_of("ab", number=EPOCH + 1, nonce="next", outside="c")))
    node.tick(15.0)
    assert node.machine.lifetime.life.state is Life.RUNNING
    node.tick(10.0)
    assert node.machine.lifetime.life.state is Life.ORPHANED


def test_no_way_back_to_an_epoch_before_the_forgotten_one() -> None:
    """P12, of a node that has forgotten by itself; that very epoch may turn out to live."""
    node = Node("b", record_of("ab"), running=False)
    node.machine.ctx.record = None
    node.feed(ev.Restarted(None, tombstone=Tombstone(EPOCH)))
    old = record_of("ab", number=EPOCH - 1)
    node.hear("a", msg.Stale(old))
    node.hear("a", msg.EpochOpen("x", old, 1, None, False))
    assert node.machine.ctx.record is None
    node.hear("a", msg.Stale(record_of("ab")))
    assert node.machine.ctx.number == EPOCH


def test_a_new_start_takes_a_number_above_what_anybody_has_forgotten() -> None:
    elect = Elect(None).start()
    elect.answer("b", buried=40)
    assert only(elect.done, ins.ClaimEpoch)[-1].record.number == 41


def test_what_was_forgotten_by_order_is_no_candidate_and_the_next_start_is_fresh() -> None:
    """Node b was away when the operator had it forgotten: what it knows and holds supersedes nothing."""
    elect = Elect(None)
    elect.feed(ev.Restarted(None, tombstone=Tombstone(OLD, OLD)))
    elect.start().answer("b", *BOTH, known=BEFORE, done=True)
    elect.claimed()
    opened = elect.opens()[-1]
    assert opened.snapshot is None and opened.record.number > OLD and opened.record.before[0] < 0
    assert {A, B} == set(opened.record.nodes)


def test_what_was_forgotten_because_it_was_gone_here_is_restored_from_elsewhere() -> None:
    elect = Elect(None)
    elect.feed(ev.Restarted(None, tombstone=Tombstone(OLD)))
    elect.start().answer("b", *BOTH, known=BEFORE, done=True)
    elect.claimed()
    assert elect.opens()[-1].snapshot == at(5, OLD)


def test_what_is_on_storage_outlives_the_order() -> None:
    elect = Elect(None, durable=True)
    elect.feed(ev.Restarted(None, tombstone=Tombstone(OLD, OLD)))
    elect.start().answer("b", known=BEFORE)
    elect.feed(ev.DurableRead("now", True, BEFORE, (at(3, OLD),)))
    elect.claimed()
    opened = elect.opens()[-1]
    assert (opened.snapshot, opened.durable) == (at(3, OLD), True)


def test_a_process_that_forgot_the_job_is_no_witness_that_an_epoch_never_ran() -> None:
    """It knows of none, and is the process that was there when the epoch opened; nor is one that lost its state directory since,
    and with it what its ranks had sealed."""
    record = replace(record_of("ab", number=OLD, nonce="before"), before=(-1, ()))
    elect = Elect(None, durable=True)
    elect.feed(ev.Restarted(None, tombstone=Tombstone(OLD)))
    elect.start().answer("b", incarnation="b#1", buried=OLD, sealed=OLD)
    elect.feed(ev.DurableRead("now", True, record, ()))
    assert elect.refusals() == [("now", "unrecoverable")], "it ran, and what it left is gone"


WITH_C = replace(BEFORE, holders=(C,))
FAR = OLD + 30_000  # of a start on c that opened while storage was away, and was forgotten by order there


def told_of(order: int, **policy: object) -> Elect:
    """Node a was restarted and knows epoch 4, its ranks are dead. Node c, a holder, tells of an order that a was not there for;
    then c is gone, and within RETURN_S the job starts again on a and b."""
    node = Elect(WITH_C, **policy)
    node.tick(1.0, reporting=False)
    node.hear("c", msg.Inventory("", None, (), buried=order, forgotten=order))
    node.tick(1.0, reporting=False)
    node.feed(ev.NodeDown("c"))
    node.start()
    return node


def test_a_start_within_the_return_time_still_hears_of_the_order() -> None:
    """P15 (a reader's history): it restored from memory what node a knew to be forgotten."""
    node = told_of(OLD)
    node.answer("b", *BOTH, known=WITH_C, done=True)
    node.tick(3.0)
    assert node.opens() == [] and node.refusals()[0] == ("now", "unreachable"), "c may know better"


def test_an_order_that_waited_takes_nothing_that_was_sealed_after_it() -> None:
    """The order named an epoch of which neither a and b nor storage knew; the start after it took the next number of theirs, and
    its memory went with the order when its ranks were gone (P1; a reader's history)."""
    node = told_of(FAR, durable=True)
    node.feed(ev.DurableRead("now", True, WITH_C, (at(5, OLD),)))
    node.answer("b", *BOTH, known=WITH_C, done=True)
    node.tick(3.0)
    node.claimed()
    record = node.opens()[-1].record
    node.vote(1, "fetched")
    node.feed(ev.RankFetched(0, record.number, True))
    node.vote(1, "loaded")
    node.feed(ev.RankLoaded(0, record.number, True))
    node.tick(1.0)
    assert node.machine.ctx.done
    node.feed(ev.HoldingFound(7, at(9, record.number), 0, 0, True, layout(0), ()))
    node.tick(60.0, reporting=False)
    node.feed(ev.RankLeft(0, False))
    node.tick(1.0, reporting=False)
    assert only(node.done, ins.Bury) == [], "step 9 was sealed after the order"
