"""Parts of parity on a node: made when the steward asks, one at a time, held, told and never served when damaged (D8, P10)."""

from __future__ import annotations

import pytest

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.encoding import FAILURES_MAX
from ckptd.core.redundancy.parity_sets import Member as Position
from ckptd.core.redundancy.parity_sets import ParitySet, ParityShard
from tests.core.machines import EPOCH, Member, at, layout, only, record_of

PARITY_SET = ParitySet(3, 0, 1, tuple(Position(rank, 64, layout(rank, 3).layout_id) for rank in range(3)))
PART, OTHER = ParityShard(PARITY_SET, 1), ParityShard(PARITY_SET, 2)
SOURCES = (msg.Source("a", 0, 0, layout(0, 3).layout_id),)


@pytest.fixture
def node() -> Member:
    return Member(record_of("abc"), Policy(replicas=1, durable=False))


def order(
    node: Member, step: int = 7, shard: ParityShard = PART, *, data: bool = False, sources=SOURCES
) -> list[ins.Instruction]:  # type: ignore[no-untyped-def]
    return node.order(msg.ParityOrder(EPOCH, "", at(step), shard, sources, data))


def made(node: Member, slot: int = 50, step: int = 7, shard: ParityShard = PART) -> list[ins.Instruction]:
    one = layout(shard.parity_set.holding_rank, 4)
    return node.feed(ev.ParityMade(at(step), shard, slot, one, (), (layout(1, 3),)))


def failed(node: Member, step: int = 7, shard: ParityShard = PART, *, data: bool = False) -> list[ins.Instruction]:
    return node.feed(ev.ParityFailed(at(step), shard, data, "a source is gone"))


def arrived(node: Member, rank: int, slot: int = 60, step: int = 7) -> list[ins.Instruction]:
    """Brought back by parity, or by a peer."""
    return node.feed(ev.ReplicaArrived(at(step), rank, 1, slot, layout(rank, 3), ()))


def begun(done: list[ins.Instruction]) -> list[tuple[int, int, bool]]:
    return [(do.snapshot.step, do.shard.position, do.data) for do in only(done, ins.MakeParity)]


def test_a_part_is_made_once_and_told_when_it_is_held(node: Member) -> None:
    assert begun(order(node)) == [(7, 1, False)]
    assert begun(order(node)) == []
    made(node)
    (told,) = node.said(msg.Held, "a")
    assert (told.fact.shard, told.fact.rank, told.lost) == (PART, PARITY_SET.holding_rank, False)
    assert begun(order(node)) == [], "it is here"
    assert only(made(node, slot=51), ins.FreeSlot) == [ins.FreeSlot(51)], "the same once more"


def test_one_shard_of_a_parity_set_at_a_time_the_oldest_snapshot_first(node: Member) -> None:
    order(node, 8)
    assert begun(order(node, 9)) + begun(order(node, 7)) == []
    assert begun(made(node, step=8)) == [(7, 1, False)]
    assert begun(made(node, step=7, slot=51)) == [], "a peer keeps two generations; step 9 waits"


def test_the_members_own_data_does_not_wait_for_parity(node: Member) -> None:
    order(node)
    assert begun(order(node, data=True)) == [(7, 1, True)]


def test_the_next_data_of_a_rank_is_made_when_the_one_before_arrived(node: Member) -> None:
    assert begun(order(node, 7, OTHER, data=True)) == [(7, 2, True)]
    assert begun(order(node, 8, OTHER, data=True)) == []
    assert begun(arrived(node, 2)) == [(8, 2, True)]


def test_a_slot_that_arrives_is_not_what_else_is_under_way(node: Member) -> None:
    order(node, 7, OTHER)
    assert begun(arrived(node, 2)) == [], "the member's own data"
    order(node, 8, OTHER, data=True)
    assert begun(arrived(node, 0, 61, step=8)) == [], "another member's"


def test_a_node_makes_no_second_shard_of_a_parity_set(node: Member) -> None:
    """They are asked for by the parity set's number alone. Data of any member it may hold."""
    made(node, shard=OTHER)
    assert begun(order(node, shard=PART)) == []
    assert begun(order(node, shard=PART, data=True)) == [(7, 1, True)]


def test_a_shard_that_came_to_nothing_does_not_keep_its_parity_set_from_the_next(node: Member) -> None:
    order(node, 7)
    made(node, 60, shard=OTHER)
    assert only(made(node, 61), ins.FreeSlot) == [ins.FreeSlot(61)]
    assert begun(order(node, 8)) == [(8, 1, False)]


def test_while_one_waits_for_its_next_try_another_has_its_turn(node: Member) -> None:
    order(node, 7)
    order(node, 8)
    assert begun(failed(node, 7)) == [(8, 1, False)]


def test_pauses_between_tries_grow(node: Member) -> None:
    order(node)
    pauses = []
    for _ in range(5):
        assert begun(failed(node)) == []
        before = node.now
        while not begun(node.tick()):
            assert node.now < before + 10
        pauses.append(node.now - before)
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 3 * pauses[0]


def test_a_part_that_failed_is_tried_again_later_and_later_from_the_newest_sources(node: Member) -> None:
    order(node)
    assert begun(failed(node)) == []
    newer = (*SOURCES, msg.Source("c", 2, 0, layout(2, 3).layout_id))
    order(node, sources=newer)
    (again,) = only(node.tick(0.25), ins.MakeParity)
    assert again.sources == newer
    failed(node)
    assert begun(node.feed(ev.Tick())) == []
    assert begun(node.tick(0.25)) == [(7, 1, False)]
    for _ in range(8):
        failed(node)
        node.tick(1.0)
    assert begun(failed(node) + node.tick(1.0)) == [(7, 1, False)], "never later than replicate_retry_s"


def test_nothing_is_made_of_what_is_void_or_released(node: Member) -> None:
    order(node, 7)
    order(node, 8)
    node.order(msg.Void(EPOCH, 0, "copies differ", at(7)))
    assert begun(node.tick(0.25)) == [(8, 1, False)]
    assert only(made(node, step=7), ins.FreeSlot) == [ins.FreeSlot(50)], "it was under way"
    node.certify(1, 9, 0, releases=(at(8),))
    assert begun(failed(node, 8) + node.tick(2.0)) == []


def test_a_part_of_what_the_restore_left_behind_is_not_kept(node: Member) -> None:
    """It was under way when the next epoch opened on an older step, and can never be asked for again."""
    order(node, 8)
    newer = record_of("abc", number=EPOCH + 1, nonce="then", ancestry=(at(7),))
    node.hear("a", msg.Stale(newer))
    node.hear("a", msg.RestoreDone(newer.number, newer.number))
    assert only(made(node, step=8), ins.FreeSlot) == [ins.FreeSlot(50)]
    assert only(made(node, 51, step=7), ins.FreeSlot) == []


def test_a_damaged_part_is_not_served_and_its_loss_told(node: Member) -> None:
    order(node)
    made(node)
    node.machine.slots.pin("a restore", at(7))
    assert node.machine.slots.shard(at(7), PART) is not None
    assert node.machine.slots.shard(at(7), OTHER) is None
    mark = node.mark
    node.feed(ev.SlotDamaged(50, "found while reading"))
    assert node.machine.slots.shard(at(7), PART) is None
    assert [
        (do.to, do.message.lost)
        for do in only(node.done[mark:], ins.Send)
        if isinstance(do.message, msg.Held)
    ] == [("a", True)], "a part has no owner who would have to hear of it"
    assert begun(order(node)) == [(7, 1, False)], "made anew"


def test_layouts_of_a_parity_sets_members_are_told_with_their_parity(node: Member) -> None:
    """A restore needs them where no slot of that member is left."""
    made(node)
    node.hear("a", msg.LayoutRequest(EPOCH, layout(1, 3).layout_id))
    assert node.said(msg.LayoutReply, "a") == [
        msg.LayoutReply(EPOCH, {layout(1, 3).layout_id: layout(1, 3).leaf})
    ]


def test_another_epoch_forgets_what_was_ordered(node: Member) -> None:
    order(node, 8)
    order(node, 7)
    newer = record_of("abc", number=EPOCH + 1, nonce="then", ancestry=(at(9),))
    node.hear("a", msg.Stale(newer))
    assert begun(node.tick(1.0)) == []
    node.record = newer
    node.hello("s2")
    asked = node.order(msg.ParityOrder(newer.number, "", at(10, newer.number), PART, SOURCES))
    assert begun(asked) == [(10, 1, False)], "whatever was under way"


def test_an_order_of_another_session_is_not_obeyed(node: Member) -> None:
    assert begun(node.order(msg.ParityOrder(EPOCH, "", at(7), PART, SOURCES), session="s0")) == []


def test_what_fails_keeps_nothing_newer_waiting(node: Member) -> None:
    """P14: two snapshots were gone, nobody had told this node, and their parts failed by turns, for ever (simulator, seed 7000503
    of that day)."""
    order(node, 7)
    order(node, 8)
    assert begun(failed(node, 7)) == [(8, 1, False)]
    node.tick(1.0)
    order(node, 9)
    assert begun(failed(node, 8)) == [(9, 1, False)]


def test_what_failed_too_often_waits_for_the_stewards_word(node: Member) -> None:
    order(node)
    for _ in range(FAILURES_MAX):
        failed(node)
        begun_again = begun(node.tick(5.0))
    assert begun_again == []
    assert begun(order(node)) == [(7, 1, False)]
