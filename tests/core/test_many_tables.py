"""An answer whose tables are too many for one message comes in several (P16): each stage of a pipeline has its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine import slots
from ckptd.core.protocol.machine.steward import gather
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import build_layout
from tests.core.elect import BEFORE, BOTH, A, B, C, Elect
from tests.core.machines import Member, at, record_of, sent

RANKS = 5
ASKED = replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))


def stage(rank: int) -> Layout:
    """Of a pipeline's stage: nobody else has its table."""
    return build_layout(rank, RANKS, [(f"layer{rank}", "U8", (64,), Box((0,), (64,)), "param", "unique", 0)])


STAGES = [stage(rank) for rank in range(RANKS)]


def holder() -> Member:
    """Of a replica of each stage."""
    node = Member(record_of("abc"))
    for rank, held in enumerate(STAGES):
        node.feed(ev.ReplicaArrived(at(7), rank, 1, 60 + rank, held, (), False))
    return node


def asked(node: Member, tables: tuple[str, ...]) -> list[msg.Inventory]:
    """All parts of the answer."""
    mark = len(node.done)
    node.hear("a", msg.InventoryRequest("next", (A,), 1, tables))
    return sent(node.done[mark:], msg.Inventory, "a")


def brought(found: dict[str, bytes]) -> list[str]:
    return [one.fragments.table.digest for one in STAGES if found.get(one.layout_id) == one.encoded]


LEAVES = {one.layout_id: one.leaf for one in STAGES}
SIZE = len(STAGES[0].encoded)


@pytest.mark.parametrize(("room", "sizes"), [(0, [1] * 5 + [0]), (2 * SIZE, [2, 2, 1, 0]), (1 << 19, [5])])
def test_each_table_comes_once_in_as_few_messages_as_there_is_room_in(
    monkeypatch: pytest.MonkeyPatch, room: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(slots, "LEAVES_BYTES", room)
    node = holder()
    said = asked(node, ())
    new = [brought(one.layouts) for one in said]
    assert sorted(map(len, new)) == sorted(sizes)
    assert sorted(chain(*new)) == sorted(one.fragments.table.digest for one in STAGES)
    assert [(one.part, one.parts) for one in said] == [(number, len(said)) for number in range(1, len(said) + 1)]
    *before, last = said
    assert all(not one.holdings and one.known is None and one.turn == 1 for one in before), "layouts alone"
    assert last.layouts.keys() == LEAVES.keys() and len(last.holdings) == RANKS, "a leaf of each at least"
    assert all(len(brought(one.layouts)) == len(one.layouts) for one in before)
    for some in (new[0], [*chain(*new)]):
        left = {one.fragments.table.digest for one in STAGES} - {*some}
        again = asked(node, tuple(some))
        assert {digest for one in again for digest in brought(one.layouts)} == left, "who names tables gets the others"
    assert again[-1].layouts == LEAVES and len(again) == 1


def test_leaves_take_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = sum(map(len, LEAVES.values()))
    for room, count in ((leaves + 2 * SIZE, 2), (leaves + 2 * SIZE - 1, 1)):
        monkeypatch.setattr(slots, "LEAVES_BYTES", room)
        assert len(brought(asked(holder(), ())[-1].layouts)) == count


def tables(of: Elect, mark: int) -> list[tuple[str, ...]]:
    return [said.tables for said in sent(of.done[mark:], msg.InventoryRequest, "b")]


def test_what_was_lost_of_an_answer_is_asked_for_at_once_and_it_counts_when_it_is_whole() -> None:
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    mark = len(node.done)
    node.answer("b", layouts={STAGES[2].layout_id: STAGES[2].encoded}, part=2, parts=3)
    assert tables(node, mark) == [] and told.gather is not None and not told.gather.said.keys() & {"b"}, "more is to come"
    leaves = {one.layout_id: one.leaf for one in STAGES[:3]}
    node.answer("b", *BOTH, layouts={**leaves, STAGES[1].layout_id: STAGES[1].encoded}, part=3, parts=3)
    assert [{*said} for said in tables(node, mark)] == [{one.fragments.table.digest for one in STAGES[1:3]}]
    assert "b" not in told.gather.answers
    assert sent(node.done[mark:], msg.InventoryRequest, "c") == []
    mark = len(node.done)
    node.answer("b", *BOTH, layouts={**leaves, STAGES[0].layout_id: STAGES[0].encoded})
    assert tables(node, mark) == []
    assert told.gather.layouts() == {one.layout_id: one for one in STAGES[:3]}


def test_an_answer_of_which_a_part_was_lost_is_none_though_its_tables_are_known() -> None:
    """They came from somebody else. Whoever judges from outside which answers came could not tell."""
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    node.answer("c", layouts={STAGES[0].layout_id: STAGES[0].encoded})
    leaf = {STAGES[0].layout_id: STAGES[0].leaf}
    node.answer("b", *BOTH, layouts=leaf, part=2, parts=2)
    assert told.gather is not None and told.gather.said.keys() >= {"c"} and "b" not in told.gather.said
    mark = len(node.done)
    node.tick(0.75)
    assert tables(node, mark) == [(STAGES[0].fragments.table.digest,)]
    node.answer("b", *BOTH, layouts=leaf)
    assert node.machine.steward.restoring.gathering.gather is None, "it has decided"


def test_the_last_part_may_come_first() -> None:
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    node.answer("b", *BOTH, layouts={one.layout_id: one.leaf for one in STAGES[:2]}, part=2, parts=2)
    assert told.gather is not None and "b" not in told.gather.said
    node.answer("b", layouts={one.layout_id: one.encoded for one in STAGES[:2]}, part=1, parts=2)
    assert told.gather.said["b"].holdings == BOTH


def test_a_part_of_an_earlier_answer_is_none_of_the_next() -> None:
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    node.answer("b", layouts={STAGES[0].layout_id: STAGES[0].encoded}, part=1, parts=2)
    told.ask()
    assert told.gather is not None and told.gather.turn == 2
    node.hear("b", msg.Inventory("now", None, BOTH, {STAGES[0].layout_id: STAGES[0].leaf}, turn=2, part=2, parts=2))
    assert "b" not in told.gather.said


def test_an_answer_that_brought_nothing_new_is_asked_for_again_later() -> None:
    """Two that answer each other at once would never rest."""
    node = Elect(ASKED).start()
    partial = {STAGES[0].layout_id: STAGES[0].leaf, STAGES[1].layout_id: STAGES[1].encoded}
    node.answer("b", *BOTH, layouts=partial)
    mark = len(node.done)
    node.answer("b", *BOTH, layouts=partial)
    assert tables(node, mark) == []
    node.tick(0.75)
    assert tables(node, mark) == [(STAGES[1].fragments.table.digest,)]


def test_of_too_many_tables_the_newest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the node brought itself are among them, or its next answer would bring the same."""
    monkeypatch.setattr(gather, "TABLES_SAID_MAX", 2)
    node = Elect(ASKED).start()
    node.answer("c", *BOTH, layouts={one.layout_id: one.encoded for one in STAGES[:3]})
    mark = len(node.done)
    node.answer("b", *BOTH, layouts={STAGES[3].layout_id: STAGES[3].encoded, STAGES[4].layout_id: STAGES[4].leaf})
    assert tables(node, mark) == [tuple(one.fragments.table.digest for one in STAGES[2:4])]


def test_a_last_part_that_came_first_counts_once_all_of_it_can_be_read() -> None:
    """It names a table that no part has brought: who asked knew it, and has lost it since."""
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    node.answer("b", *BOTH, layouts={one.layout_id: one.leaf for one in STAGES[:2]}, part=2, parts=2)
    mark = len(node.done)
    node.answer("b", layouts={STAGES[0].layout_id: STAGES[0].encoded}, part=1, parts=2)
    assert told.gather is not None and "b" not in told.gather.said
    assert tables(node, mark) == [(STAGES[0].fragments.table.digest,)]
