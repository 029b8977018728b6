"""Which steps are granted, when a grant is void, and that slots are never promised twice (D9, P14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.grants import REFUSED_PAUSE_S, REPEAT_S, RETURN_S, STUCK_S
from tests.core.granting import POLICY, granted, steward
from tests.core.machines import EPOCH, Steward, at, fact, layout, only, record_of


def voids(node: Steward, to: str = "b", since: int = 0) -> list[int]:
    return [void.grant for void in node.said(msg.Void, to, since) if void.grant]


# --- granting ---------------------------------------------------------------------------------------------------------
def test_as_many_steps_are_granted_as_every_rank_has_room_for() -> None:
    node = steward().greet()
    node.slots(0, 1, 2)
    assert granted(node) == [], "nobody knows of rank 1"
    node.others["b"].state(1, 4, free=3)
    assert granted(node) == [5, 6], "beyond the foremost rank, each one step further; rank 0 has two slots"
    node.others["b"].state(1, 5, free=3)
    assert granted(node) == [5, 6]


def test_what_was_granted_is_not_granted_again_before_it_is_settled() -> None:
    node = steward().train(6, free=2)
    assert granted(node) == [7, 8]
    node.capture(7)
    assert granted(node) == [7, 8], "its slot holds step 7 now"
    node.copy(7, 0, "b")
    node.others["b"].state(1, 7, free=3)
    node.slots(0, 50)
    assert granted(node) == [7, 8, 9]


def test_the_steps_of_new_grants_lie_beyond_those_that_stand() -> None:
    node = steward().train(6, free=1)
    node.slots(0, 60)
    node.others["b"].state(1, 6, free=2)
    assert granted(node) == [7, 8]
    node.slots(0, 61)
    node.others["b"].state(1, 9, free=3)
    assert granted(node) == [7, 8, 10]


@pytest.mark.parametrize("asks", [None, 7])
def test_grants_that_the_ranks_give_back_again_and_again_do_not_run_ahead_of_them(asks: int | None) -> None:
    """P14: after three minutes at one step they were 420 steps ahead, so no snapshot came for as many (simulator, seed
    460000002731). asks: the step for which the ranks waited, and do not any more."""
    node = steward().train(7, free=2)
    node.others["b"].state(1, 7, free=2, asks=asks)
    node.feed(ev.RankProgress(0, 7, asks=asks is not None))
    for _ in range(20):
        for number, grant in list(node.machine.steward.grants.open.items()):
            node.others["b"].missed(number, 1, "late" if grant.from_step == asks else "no memory")
            node.feed(ev.RankMissed(0, number, "taken back"))
        node.tick(REPEAT_S)
    assert max(granted(node)) <= 9


def test_a_step_that_a_rank_captured_is_not_granted_again_when_others_give_it_back() -> None:
    """Its word of the capture is all that the steward knows of its step: it would take the next step, where they take this one."""
    node = steward().train(6, free=2)
    node.capture(7, 1)
    node.feed(ev.RankMissed(0, node.granted(7), "no memory"), ev.RankMissed(0, node.granted(8), "taken back"))
    node.others["b"].missed(node.granted(8), 1, "taken back")
    node.tick(REFUSED_PAUSE_S)
    assert granted(node)[2:] == [8, 9]


def test_nothing_is_granted_while_a_rank_is_gone_or_its_node_is() -> None:
    node = steward().greet()
    node.slots(0, 1, 2)
    node.others["b"].state(1, 4, left="died")
    assert granted(node) == []
    node = steward().greet()
    node.others["b"].state(1, 4)
    node.feed(ev.NodeDown("b"))
    node.slots(0, 1, 2)
    assert granted(node, "a") == []


def test_nothing_is_granted_before_the_restore_is_done() -> None:
    node = Steward(record_of(), POLICY, running=False)
    node.others["b"].tell_inventory(done=False)
    node.others["b"].state(1, 4)
    node.slots(0, 1, 2)
    node.tick(1.0)
    assert granted(node) == []


def test_grants_are_numbered_above_what_any_node_or_rank_has_seen() -> None:
    """A steward that follows another one, or its own daemon's earlier process: what was captured under a grant has its number, and
    with one name for two captures a rank waited for what had been lost (P15)."""
    node = steward()
    node.others["b"].tell_inventory()
    node.others["b"].state(1, 6, free=1, grant=40)
    node.train(6, free=1)
    assert [grant.grant for grant in node.said(msg.Grant, "b")] == [41]
    node = Steward(record_of("ab"), POLICY, running=False)
    node.join(0, grant=50)
    node.train(6, free=1)
    assert [grant.grant for grant in node.said(msg.Grant, "b")] == [51]


def test_a_grant_that_is_not_answered_is_said_again_to_who_has_not() -> None:
    node = steward().train(6, free=1)
    node.others["b"].sealed(node.granted(7), 7, 1)
    marks = node.mark
    node.tick(REPEAT_S - 0.25)
    assert granted(node, "a", marks) == []
    node.tick(0.25)
    assert (granted(node, "a", marks), granted(node, "b", marks)) == ([7], [])


def test_grants_go_in_the_session_of_their_node() -> None:
    node = steward().train(6, free=1)
    assert {grant.session for grant in node.said(msg.Grant, "b")} == {node.others["b"].session}


# --- void -------------------------------------------------------------------------------------------------------------
def test_a_grant_that_one_rank_misses_is_void_everywhere_and_those_after_it() -> None:
    """A rank that left this one out would take the next where the others take this one, one step apart for ever."""
    node = steward().train(6, free=3)
    first, second = node.granted(7), node.granted(8)
    node.others["b"].missed(second, 1, "no memory")
    assert (voids(node, "a"), voids(node, "b")) == ([second, second + 1], [second + 1])
    assert first in node.machine.steward.grants.open
    taken_back = [do.grant for do in only(node.done, ins.TakeBack)]
    assert taken_back == [second, second + 1]


def test_the_reason_of_those_after_it_says_that_it_is_another_ones() -> None:
    """P15: "snapshot 14 is void: captured at step 12 and, on rank 1, at 13", and of each one behind that."""
    node = steward().train(6, free=3)
    node.others["b"].missed(node.granted(8), 1, "no memory")
    reasons = [void.reason for void in node.said(msg.Void, "a")]
    assert reasons == ["rank 1 missed it: no memory", "granted behind one that is void: rank 1 missed it: no memory"]


def test_nothing_is_granted_while_a_void_grant_is_with_some_rank() -> None:
    node = steward().train(6, free=3)
    mark = node.mark
    node.others["b"].missed(node.granted(7), 1, "late at step 7")
    node.tick(REPEAT_S)
    assert granted(node, "b", mark) == []
    for step in (7, 8, 9):
        node.feed(ev.RankMissed(0, node.granted(step), "taken back"))
    assert granted(node, "b", mark) == [], "rank 1 still has two of them"
    for step in (8, 9):
        node.others["b"].missed(node.granted(step), 1, "taken back")
    assert granted(node, "b", mark) != []


def test_a_void_is_said_again_until_everyone_has_answered() -> None:
    node = steward().train(6, free=1)
    node.feed(ev.RankMissed(0, node.granted(7), "no memory"))
    mark = node.mark
    node.tick(REPEAT_S)
    assert (voids(node, "b", mark), voids(node, "a", mark)) == ([node.granted(7)], [])
    node.others["b"].missed(node.granted(7), 1, "void")
    mark = node.mark
    node.tick(REPEAT_S)
    assert node.granted(7) not in voids(node, "b", mark)


def test_a_void_is_said_again_a_while_after_it_was_said_last() -> None:
    node = steward().train(6, free=1)
    node.tick(REPEAT_S - 0.25)
    node.feed(ev.RankMissed(0, node.granted(7), "no memory"))
    mark = node.mark
    node.tick(REPEAT_S - 0.25)
    assert voids(node, "b", mark) == []
    node.tick(0.25)
    assert voids(node, "b", mark) == [node.granted(7)]


def test_what_was_sealed_under_a_void_grant_is_void_too() -> None:
    node = steward().train(6, free=1).capture(7, 0)
    node.others["b"].missed(node.granted(7), 1, "no memory")
    (void,) = [v for v in node.said(msg.Void, "a") if v.snapshot]
    assert (void.snapshot, void.reason) == (at(7), "rank 1 missed it: no memory")


def test_what_is_sealed_after_the_grant_was_void_is_void_too() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    node.feed(ev.RankMissed(0, grant, "no memory"))
    node.others["b"].sealed(grant, 7, 1)
    (void,) = [v for v in node.said(msg.Void, "b") if v.snapshot]
    assert (void.snapshot, void.reason) == (at(7), "rank 0 missed it: no memory")
    assert grant not in node.machine.steward.grants.open, "everyone has answered"


def test_what_all_sealed_under_a_void_grant_is_void_although_it_is_whole() -> None:
    """They had taken it before they heard that it is void: whoever trusts the void has told its rank so."""
    record = replace(record_of("abc"), ranks=("b", "c"))
    node = Steward(record, POLICY)
    node.feed(ev.NodeDown("b"))
    node.tick(POLICY.steward_timeout_s)
    node.feed(ev.NodeUp("b"))
    node.tick()
    node.train(6, free=2)
    first, second = (grant.grant for grant in node.said(msg.Grant, "b"))
    node.others["b"].missed(first, 0, "no memory")
    for name, rank in (("b", 0), ("c", 1)):
        node.others[name].sealed(second, 8, rank)
    assert {v.snapshot for v in node.said(msg.Void) if v.snapshot} == {at(8)}
    assert node.level(8) is None


def test_ranks_that_took_a_grant_at_different_steps_void_both() -> None:
    node = steward().train(6, free=1).capture(7, 0)
    node.others["b"].sealed(node.granted(7), 8, 1)
    voided = {v.snapshot: v.reason for v in node.said(msg.Void) if v.snapshot}
    assert voided == dict.fromkeys((at(7), at(8, grant=1)), "captured at step 7 and, on rank 1, at 8")


def test_ranks_that_captured_by_different_plans_void_it() -> None:
    """Each would leave out what it believes the other one has (D8)."""
    node = steward().train(6, free=1).capture(7, 0)
    assert node.said(msg.Void) == []
    node = steward("abc").train(6, free=1)
    node.others["b"].sealed(node.granted(7), 7, 1, plan="one")
    node.others["c"].sealed(node.granted(7), 7, 2, plan="another")
    assert "captured by another plan" in node.said(msg.Void, "a")[0].reason


def test_a_node_that_began_anew_voids_what_its_ranks_had_not_sealed() -> None:
    node = steward().train(6, free=2).capture(7)
    node.tick(1.0)
    node.hear("b", msg.Inventory("", node.record, ()))
    assert voids(node, "a") == [node.granted(8)]
    assert node.level(7) == 0
    assert granted(node, "a")[-1] == 8, "nothing more until it has told of its ranks"


def test_a_node_that_began_anew_answers_for_what_its_ranks_had_not_sealed() -> None:
    """Nothing else would: it knows nothing of grants of the session before."""
    node = steward().train(6, free=1)
    node.tick(1.0)
    node.hear("b", msg.Inventory("", node.record, ()))
    node.feed(ev.RankMissed(0, node.granted(7), "taken back"))
    assert node.machine.steward.grants.open == {}


def test_what_is_known_of_a_ranks_slots_ends_with_the_session_of_its_node() -> None:
    node = steward().train(6, free=0)
    node.others["b"].state(1, 6, free=2)
    node.tick(1.0)
    node.hear("b", msg.Inventory("", node.record, ()))
    node.others["b"].tell_inventory()
    node.slots(0, 1, 2)
    assert granted(node, "a") == []
    node.others["b"].state(1, 6, free=1)
    assert granted(node, "a") == [7]


def test_what_was_certified_stays_whatever_a_later_grant_of_that_step_became() -> None:
    node = steward().train(6, free=2).capture(7)
    late = node.granted(8)
    node.others["b"].sealed(late, 7, 1)
    node.feed(ev.RankMissed(0, late, "no memory"))
    assert node.level(7) == 0


def test_what_another_steward_certified_stays_although_its_grant_is_void_here() -> None:
    """P3: we were cut off, and it released an older one for it."""
    node = steward().train(6, free=1).capture(7, 0)
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    node.others["b"].tell_inventory(fact(7, 1), layouts=[layout(1)], certified=((at(7), 0, False),))
    node.others["b"].missed(node.granted(7), 1, "its session began anew")
    assert (node.level(7), [v for v in node.said(msg.Void) if v.snapshot]) == (0, [])


def test_what_was_certified_while_a_rank_was_away_stays_when_that_says_that_it_had_sealed_it() -> None:
    """Its grant was void by then, as one that hung; the rank's copy made it whole."""
    node = steward("abc").train(6, free=1).capture(7, 0, 1)
    node.hear("b", msg.LayoutReply(EPOCH, {layout(2, 3).layout_id: layout(2, 3).encoded}))
    node.copy(7, 2, to="b")
    node.others["c"].state(2, 9, free=1)
    node.feed(ev.NodeDown("c"))
    node.tick(STUCK_S + 1.0)
    assert (voids(node, "b"), node.level(7)) == ([], 0)
    node.feed(ev.NodeUp("c"))
    node.others["c"].tell_inventory()
    node.others["c"].sealed(node.granted(7), 7, 2)
    assert (node.level(7), [v for v in node.said(msg.Void) if v.snapshot]) == (0, [])


def test_a_rank_that_neither_seals_nor_gives_up_is_given_up() -> None:
    node = steward().train(6, free=1).capture(7, 0)
    node.tick(STUCK_S + 1.0)
    assert voids(node) == [], "its step has not come yet"
    node.others["b"].state(1, 9, free=1)
    node.tick(STUCK_S - 1.0)
    assert voids(node) == []
    node.tick(2.0)
    assert set(voids(node)) == {node.granted(7)}


def sealed_in_time() -> Steward:
    """By rank 1, which was beyond the step for STUCK_S less a second; rank 0 has not come to it."""
    node = steward().train(6, free=1)
    node.others["b"].state(1, 9, free=1)
    node.tick(STUCK_S - 1.0)
    node.others["b"].sealed(node.granted(7), 7, 1)
    return node


def test_a_rank_that_is_there_in_time_is_not_given_up() -> None:
    node = sealed_in_time()
    node.tick(2.0)
    assert voids(node) == []


def test_what_one_rank_took_is_not_taken_off_the_time_of_another() -> None:
    node = sealed_in_time()
    node.tick(1.0)
    node.feed(ev.RankProgress(0, 9))
    node.tick(STUCK_S - 1.0)
    assert voids(node, "a") == []
    node.tick(2.0)
    assert set(voids(node, "a")) == {node.granted(7)}


def test_a_grant_stands_until_it_is_complete_or_void() -> None:
    node = steward().train(6, free=2)
    stands = node.machine.steward.grants.stands
    first, second = node.granted(7), node.granted(8)
    node.capture(7, 1)
    assert stands(first) and stands(second) and not stands(99)
    node.capture(7, 0)
    assert not stands(first)
    node.capture(8, 1)
    node.feed(ev.RankMissed(0, second, "no memory"))
    assert not stands(second)


# --- refused ----------------------------------------------------------------------------------------------------------
def test_after_a_grant_that_a_rank_could_not_even_take_there_is_a_pause() -> None:
    """It was made again at once, without end (simulator, seed 551)."""
    node = steward().train(6, free=1)
    grant = node.granted(7)
    mark = node.mark
    node.feed(ev.RankMissed(0, grant, ev.OTHER_MAPPER))
    node.others["b"].missed(grant, 1, ev.OTHER_MAPPER)
    assert granted(node, "b", mark) == []
    node.tick(REFUSED_PAUSE_S)
    assert granted(node, "b", mark) == [7]


def test_a_rank_that_gave_it_up_by_itself_makes_no_pause() -> None:
    node = steward().train(6, free=1)
    grant = node.granted(7)
    mark = node.mark
    node.feed(ev.RankMissed(0, grant, "fence_timeout"))
    node.others["b"].missed(grant, 1, "void")
    assert granted(node, "b", mark) == [7]


# --- a step that a rank waits for -------------------------------------------------------------------------------------
def waiting(reached: int = 6) -> Steward:
    """Rank 0 waits for step 7; rank 1 is at this one."""
    node = steward().train(6, free=0)
    node.slots(0, 1)
    node.feed(ev.RankProgress(0, 7, asks=True))
    node.others["b"].state(1, reached, free=1)
    return node


def test_a_step_that_a_rank_waits_for_is_granted_exactly() -> None:
    node = waiting()
    assert granted(node)[0] == 7
    node.others["b"].state(1, 7, free=1)
    node.capture(7)
    assert node.level(7) == 0


def test_a_step_that_a_rank_waits_for_is_granted_once_and_then_waited_for() -> None:
    node = steward().train(6, free=0)
    node.slots(0, 1, 2, 3)
    node.feed(ev.RankProgress(0, 7, asks=True))
    node.others["b"].state(1, 6, free=3)
    node.tick(0.25)
    grants = node.machine.steward.grants.open
    assert [grant.from_step for grant in grants.values()] == [7, 8, 9]
    node.tick(3 * REPEAT_S)
    assert voids(node) == []
    assert [grant.from_step for grant in grants.values()] == [7, 8, 9]


def test_a_step_that_another_rank_has_passed_cannot_be_granted() -> None:
    node = waiting(8)
    assert 7 not in granted(node)


def test_what_was_granted_beyond_it_gives_its_slots_back() -> None:
    node = steward().train(6, free=1)
    node.machine.steward.grants.open[node.granted(7)].from_step = 9  # as after a larger margin
    node.feed(ev.RankProgress(0, 8, asks=True))
    assert set(voids(node)) == {node.granted(7)}
    node.feed(ev.RankMissed(0, node.granted(7), "taken back"))
    node.others["b"].missed(node.granted(7), 1, "taken back")
    assert granted(node)[-1] == 8


def test_an_exact_grant_that_somebody_could_not_take_is_repeated_with_a_pause() -> None:
    """The steward granted anew a thousand times a second."""
    node = waiting()
    grant = node.said(msg.Grant, "b")[0].grant
    node.others["b"].missed(grant, 1, "fence_timeout")
    node.feed(ev.RankMissed(0, grant, "void"))
    assert granted(node).count(7) == 1
    node.tick(REPEAT_S)
    give_back(node)
    assert granted(node).count(7) == 2


def give_back(node: Steward) -> None:
    """What was granted beyond the step that is waited for."""
    for number in list(node.machine.steward.grants.open):
        node.feed(ev.RankMissed(0, number, "taken back"))
        node.others["b"].missed(number, 1, "taken back")


def test_a_step_that_was_void_is_granted_again_although_a_part_of_it_is_held() -> None:
    """It is another snapshot."""
    node = waiting()
    grant = node.said(msg.Grant, "b")[0].grant
    node.others["b"].sealed(grant, 7, 1)
    node.feed(ev.RankMissed(0, grant, "fence_timeout"))
    node.others["b"].state(1, 7, free=1, asks=7)
    node.feed(ev.RankProgress(0, 7, asks=True))
    node.tick(REPEAT_S)
    give_back(node)
    assert granted(node).count(7) == 2


@pytest.mark.parametrize("free", [1, 2])
def test_a_new_office_begins_with_empty_books(free: int) -> None:
    """A process that was stopped for long: a successor may have granted meanwhile."""
    node = steward().train(6, free=free)
    node.now += POLICY.steward_timeout_s
    mark = node.mark
    node.tick()
    assert node.machine.steward.grants.open == {}
    node.others["b"].tell_inventory()
    node.others["b"].state(1, 20, free=free)
    assert min(granted(node, "b", mark), default=21) == 21


def test_an_office_in_a_smaller_world_that_went_back_knows_nothing_of_the_grants_before() -> None:
    """P14: none would come for a step that was captured before; and no rank may be named that is not there any more (P15)."""
    node = steward("abc").train(6, free=3).capture(7, 0, 1).capture(8, 0, 1)
    node.others["c"].missed(node.granted(9), 2, ev.NO_SLOT)
    node.record = node.machine.ctx.record = record_of("ab")  # in truth it has another number, too
    node.now += POLICY.steward_timeout_s
    mark = node.mark
    node.tick()
    node.others["b"].tell_inventory()
    node.others["b"].state(1, 6, free=1)
    assert granted(node, "b", mark) == [7]
    node.tick()
    assert node.said(msg.Ack, "b")[-1].waits == ""


def test_an_office_that_begins_while_the_restore_goes_on_lacks_no_slots_yet() -> None:
    node = steward().train(6, free=0)
    node.tick(RETURN_S + 1.0)
    assert node.machine.steward.grants.held_up()
    node.machine.ctx.done = False  # as in the next epoch
    node.now += POLICY.steward_timeout_s
    node.tick()
    assert not node.machine.steward.grants.held_up()


def test_what_is_void_stays_so_while_the_only_node_that_holds_it_tells_anew() -> None:
    """Its link came back before it heard of the void: between the two words nobody held anything, and the void was forgotten; what
    the node told made a whole snapshot of it, which it then let go of (P3)."""
    node = steward().train(6, free=2)
    other = node.others["b"]
    node.capture(7, 0)
    node.copy(7, 0, "b")
    node.copy(7, 1, "a")
    other.sealed(node.granted(8), 7, 1)  # The grants came to it in another order.
    other.missed(node.granted(7), 1, "late")
    assert [void.snapshot for void in node.said(msg.Void, "b")].count(at(7)) > 0
    mark = node.mark
    node.feed(ev.NodeDown("b"), ev.NodeUp("b"))
    other.tell_inventory(fact(7, 0, 1), fact(7, 1))
    assert [said.level for said in node.certificates("b", mark) if said.snapshot == at(7)] == []
    assert node.said(msg.Void, "b", mark)[-1].snapshot == at(7)
