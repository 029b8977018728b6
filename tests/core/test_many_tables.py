"""An answer whose tables are too many for one message comes in several (P16): each stage of a pipeline has its own."""

from __future__ import annotations

from dataclasses import replace

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


def asked(node: Member, tables: tuple[str, ...]) -> dict[str, bytes]:
    node.hear("a", msg.InventoryRequest("next", (A,), 1, tables))
    return node.said(msg.Inventory, "a")[-1].layouts


def brought(found: dict[str, bytes]) -> list[str]:
    return [one.fragments.table.digest for one in STAGES if found[one.layout_id] == one.encoded]


@pytest.mark.parametrize("room", [0, len(STAGES[0].encoded) * 2, 1 << 19])
def test_who_names_the_tables_that_came_gets_the_others(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(slots, "LEAVES_BYTES", room)
    node, known, sizes = holder(), list[str](), list[int]()
    while len(known) < RANKS:
        found = asked(node, tuple(known))
        assert found.keys() == {one.layout_id for one in STAGES}, "a leaf of each at least"
        new = brought(found)
        assert new and not {*new} & {*known}
        known += new
        sizes.append(len(new))
    assert sizes == {0: [1] * RANKS, 1 << 19: [RANKS]}.get(room, sizes)
    assert max(sizes) * len(STAGES[0].encoded) <= max(room, len(STAGES[0].encoded))
    assert asked(node, tuple(known)) == {one.layout_id: one.leaf for one in STAGES}


def test_leaves_take_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LEAVES_BYTES", len(STAGES[0].leaf) + 2 * len(STAGES[1].encoded))
    assert brought(asked(holder(), (STAGES[0].fragments.table.digest,))) == [one.fragments.table.digest for one in STAGES[1:3]]


def tables(of: Elect, mark: int) -> list[tuple[str, ...]]:
    return [said.tables for said in sent(of.done[mark:], msg.InventoryRequest, "b")]


def test_the_others_are_asked_for_at_once_and_an_answer_counts_when_it_is_whole() -> None:
    node = Elect(ASKED).start()
    told = node.machine.steward.restoring.gathering
    first = {STAGES[0].layout_id: STAGES[0].leaf, STAGES[1].layout_id: STAGES[1].encoded}
    mark = len(node.done)
    node.answer("b", *BOTH, layouts=first)
    assert tables(node, mark) == [(STAGES[1].fragments.table.digest,)]
    assert told.gather is not None and "b" not in told.gather.answers
    assert sent(node.done[mark:], msg.InventoryRequest, "c") == []
    mark = len(node.done)
    node.answer("b", *BOTH, layouts={STAGES[1].layout_id: STAGES[1].leaf, STAGES[0].layout_id: STAGES[0].encoded})
    assert tables(node, mark) == []
    assert told.gather is not None and told.gather.layouts() == {one.layout_id: one for one in STAGES[:2]}


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
