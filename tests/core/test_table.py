"""The steward's books: what is written on every word of a node, and what is struck out again (design D9)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptd.core.policy import Policy
from ckptd.core.protocol.events import Computed
from ckptd.core.protocol.instructions import Compute, Send
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.protocol.machine.steward.table import (
    FALLEN_KEPT_MAX,
    RELEASED_KEPT_MAX,
    STUDIED_MAX,
    SnapshotTable,
)
from ckptd.core.protocol.messages import Certificate, HoldingFact, LayoutRequest
from ckptd.core.redundancy import protection
from ckptd.core.redundancy.parity_sets import Member, ParitySet, ParityShard, joined_digests, shard_layout
from ckptd.core.state_map import agreement
from tests.core.machines import EPOCH, at, fact, layout, member

WORLD = 3
LAYOUTS = {one.layout_id: one.encoded for one in (layout(rank, WORLD) for rank in range(WORLD))}
PARITY_SET = ParitySet(WORLD, 0, 1, tuple(Member(rank, 64, layout(rank, WORLD).layout_id) for rank in range(WORLD)))
SHORT, LONG = (("o:x", b"1" * 16),), (("o:x", b"1" * 16), ("t:w|0", b"2" * 16))


@dataclass
class Books:
    """Of a steward that is in session with everybody."""

    ctx: Context = field(default_factory=lambda: Context("1/job", member("a"), Policy()))

    def __post_init__(self) -> None:
        self.table = SnapshotTable(self.ctx, lambda node: True)

    def of(self, step: int = 7) -> SnapshotState:
        return self.table.states[at(step)]

    def slot(self, node: str, rank: int, step: int = 7, **more: Any) -> HoldingFact:
        told = fact(step, rank, world=WORLD, **more)
        self.table.add(node, told)
        return told

    def shard(self, node: str, position: int, **more: Any) -> HoldingFact:
        layout_id = shard_layout(PARITY_SET, 64).layout_id
        told = HoldingFact(at(7), PARITY_SET.holding_rank, 0, layout_id, shard=ParityShard(PARITY_SET, position), **more)
        self.table.add(node, told)
        return told

    def parity_set(self) -> Books:
        """Nodes a, b and c have a rank and a part each."""
        self.table.learn_layouts(LAYOUTS)
        for position, node in enumerate("abc"):
            self.slot(node, position)
            self.shard(node, position)
        return self

    def level(self) -> int:
        for _ in range(1 + self.computed()):
            self.table.weigh(self.of())
        return self.of().level

    def computed(self) -> int:
        """How many sets of layouts were to be looked at together."""
        self.table.weigh(self.of())
        asked, self.ctx.out = [do for do in self.ctx.out if isinstance(do, Compute)], []
        for do in asked:
            self.ctx.on_computed(Computed(do.number, do.call()))
        return len(asked)

    def release(self, *steps: int) -> None:
        for step in steps:
            self.table.release(at(step))

    def asked(self) -> set[tuple[str, str]]:
        """(whom, for which layout)"""
        self.table.ask_layouts(EPOCH)
        sends = [do for do in self.ctx.out if isinstance(do, Send)]
        return {(do.to, do.message.layout_id) for do in sends if isinstance(do.message, LayoutRequest)}


# --- a new term -----------------------------------------------------------------------------------------------------
def test_a_new_term_knows_only_what_it_is_told_itself() -> None:
    """Layouts are named by their content, and what is durable stays so."""
    books = Books().parity_set()
    books.slot("a", 0, 5)
    books.table.mark_durable([at(5)])
    books.table.heard[at(7)] = 1
    books.release(3, 4)
    books.table.weigh_anew(at(4))
    books.table.keep_fallen(at(2))
    books.table.clear()
    assert (books.table.states, books.table.heard, books.table.dirty) == ({}, {}, set())
    assert books.table.fallen == {}, "another steward may have certified it since"
    for step in (3, 4, 5):
        books.slot("b", 1, step)
        assert books.of(step).nodes() == {"b"}
    assert [(books.of(step).again, books.of(step).durable) for step in (4, 5)] == [
        (False, False),
        (False, True),
    ]
    assert books.table.knows_layouts(books.of(5))


# --- layouts that are looked at together ----------------------------------------------------------------------------------
def test_of_layouts_that_are_not_looked_at_yet_nothing_can_be_said() -> None:
    books = Books().parity_set()
    assert not books.table.unread(books.of())
    books.table.weigh(books.of())
    assert (books.of().level, books.table.unread(books.of())) == (-1, True)
    books.table.dirty.clear()
    assert (books.level(), books.table.unread(books.of())) == (1, False)
    assert books.table.dirty == {at(7)}, "to be weighed anew"


def test_layouts_are_looked_at_elsewhere_and_not_once_more_where_everybody_waits() -> None:
    """P16: of thousands of ranks that takes seconds. The event loop finds what is remembered by then."""
    books = Books().parity_set()
    for remembered in (agreement._claims, protection._classes):
        remembered.cache_clear()
    assert books.computed() == 1
    looked_at = [remembered.cache_info().misses for remembered in (agreement._claims, protection._classes)]
    books.table.weigh(books.of())
    assert books.of().level == 1 and looked_at == [1, 1]
    assert [remembered.cache_info().misses for remembered in (agreement._claims, protection._classes)] == looked_at


def test_the_same_layouts_are_looked_at_once() -> None:
    books = Books().parity_set()
    assert [books.computed(), books.computed()] == [1, 0]
    books.table.release(at(7))
    books.table.weigh_anew(at(7))
    books.parity_set()
    assert (books.computed(), books.level()) == (0, 1)


def test_layouts_that_many_others_came_after_are_looked_at_again() -> None:
    books = Books().parity_set()
    assert books.level() == 1
    for number in range(STUDIED_MAX):
        books.table._now_studied(frozenset([str(number)]), None)
    books.of().classes = None
    assert (books.computed(), books.level()) == (1, 1)


def test_layouts_of_a_part_of_the_ranks_are_not_looked_at() -> None:
    """There would be one such set for each rank that seals."""
    books = Books()
    books.table.learn_layouts(LAYOUTS)
    for rank in range(WORLD - 1):
        books.slot("a", rank)
        assert (books.computed(), books.level()) == (0, -1)
    books.slot("a", WORLD - 1)
    assert (books.computed(), books.level()) == (1, 0)


# --- slots and parts ------------------------------------------------------------------------------------------------
def test_a_whole_slots_digests_count_and_not_a_prefixs() -> None:
    books = Books()
    books.slot("b", 0, tier=1, digests=SHORT)
    assert books.of().digests == {0: SHORT}, "better than none"
    books.slot("a", 0, digests=LONG)
    books.slot("c", 0, tier=1, digests=SHORT)
    assert books.of().digests == {0: LONG}


def test_a_part_vouches_for_the_slots_of_its_parity_set() -> None:
    """Their own holders may be gone, and with them whoever said these things first."""
    books = Books()
    books.shard("d", 1, digests=joined_digests({0: SHORT, 2: LONG}), keep=True)
    books.shard("e", 2)
    facts = books.of()
    assert facts.layout_ids == {rank: layout(rank, WORLD).layout_id for rank in range(WORLD)}
    assert facts.digests == {0: SHORT, 2: LONG}
    assert facts.keep
    assert books.asked() == {("d", name) for name in LAYOUTS}


def test_only_parts_of_a_ranks_own_parity_set_vouch_for_it() -> None:
    books = Books()
    books.shard("d", 1)
    assert books.of().vouching([1, WORLD + 1]) == {1: ["d"], WORLD + 1: []}


def test_a_slot_that_arrives_raises_what_its_parity_set_survives() -> None:
    books = Books().parity_set()
    books.table.remove("c", fact(7, 2, world=WORLD))
    assert books.level() == 0
    books.slot("d", 2, tier=2)
    assert books.level() == 0, "parity is of more than a replica of that tier has"
    books.slot("d", 2)
    assert books.level() == 1


def test_a_parity_set_of_which_nobody_holds_a_part_any_more_is_none_of_the_snapshots() -> None:
    """Else a flush, which has parity sets made whole at once, would have its parity made anew on a level of copies."""
    books = Books()
    books.slot("a", 0)
    told = [books.shard(node, position) for position, node in enumerate("bc")]
    books.table.remove("b", told[0])
    assert books.of().shards == {PARITY_SET: {1: {"c"}}}
    books.table.forget_node("c")
    assert (books.of().shards, books.of().nodes()) == ({}, {"a"})


# --- nodes that are gone --------------------------------------------------------------------------------------------
def test_a_forgotten_nodes_slots_and_parts_do_not_count() -> None:
    books = Books().parity_set()
    assert books.level() == 1
    books.table.dirty.clear()
    books.table.forget_node("c")
    assert books.of().nodes() == {"a", "b"}
    assert books.table.dirty == {at(7)}
    assert books.level() == 0, "by the parity of the others"
    books.table.forget_node("b")
    assert books.level() == -1


def test_what_nobody_holds_any_more_is_struck_out() -> None:
    books = Books()
    books.slot("b", 0)
    books.shard("b", 0)
    books.table.forget_node("b")
    assert books.table.states == {}
    told = books.slot("b", 0)
    books.table.remove("b", told)
    assert books.table.states == {}
    told = books.slot("b", 0)
    books.of().certify(Certificate(EPOCH, 1, at(7), 0, 1, False))
    books.of().become_void("nowhere", "why")
    books.table.remove("b", told)
    assert books.table.states == {}, "what is void is reported as fallen by nobody"


def test_the_last_void_ones_of_which_something_had_been_said_are_remembered() -> None:
    books = Books()
    for step in range(FALLEN_KEPT_MAX + 3):
        told = books.slot("b", 0, step)
        if step != 5:
            books.of(step).certify(Certificate(EPOCH, step, at(step), 0, 1, False))
        books.of(step).become_void("nowhere", "why")
        books.table.remove("b", told)
    assert list(books.table.fallen) == [at(step) for step in range(2, FALLEN_KEPT_MAX + 3) if step != 5]


# --- released -------------------------------------------------------------------------------------------------------
def test_who_still_tells_of_a_released_one_hears_of_its_release_among_the_last() -> None:
    books = Books()
    books.release(*range(1, RELEASED_KEPT_MAX + 1))
    books.slot("b", 0, 1)
    assert books.table.states == {}
    books.release(100)
    assert list(books.table.released)[-2:] == [at(1), at(100)]
    assert at(2) not in books.table.released, "the oldest word went"


def test_a_released_one_that_is_weighed_anew_counts_until_its_copies_are_gone() -> None:
    """Whoever missed its release may hold copies that nobody told of: these hear of it again."""
    books = Books()
    books.release(7)
    books.table.weigh_anew(at(7))
    told = books.slot("b", 0)
    assert books.of().nodes() == {"b"}
    books.table.remove("b", told)
    assert books.table.states == {}
    assert at(7) in books.table.released


def test_that_it_was_weighed_anew_is_forgotten_with_its_release() -> None:
    books = Books()
    books.release(7)
    books.table.weigh_anew(at(7))
    books.release(7, *range(100, 100 + RELEASED_KEPT_MAX))
    books.slot("b", 0)
    assert not books.of().again


def test_a_table_that_leaves_need_is_asked_for_once_and_all_are_read_then() -> None:
    books = Books()
    ones = [layout(rank, WORLD) for rank in range(WORLD)]
    for rank, node in enumerate("abc"):
        books.slot(node, rank)
    assert books.asked() == {(node, ones[rank].layout_id) for rank, node in enumerate("abc")}, "of each its leaf"
    books.table.learn_layouts({one.layout_id: one.leaf for one in ones})
    assert not books.table.knows_layouts(books.of())
    books.ctx.now += RESEND_S
    books.ctx.out.clear()
    books.table.ask_layouts(EPOCH)
    assert [(do.to, do.message) for do in books.ctx.out if isinstance(do, Send)] == [
        ("a", LayoutRequest(EPOCH, ones[0].layout_id, whole=True))
    ], "they have one table"
    books.table.learn_layouts({ones[0].layout_id: ones[0].encoded})
    assert books.table.layouts_of(books.of()) == dict(enumerate(ones))


def test_what_is_neither_a_layout_nor_a_leaf_is_left_out() -> None:
    books = Books()
    books.slot("a", 0)
    books.table.learn_layouts({layout(0, WORLD).layout_id: b"nothing"})
    assert not books.table.knows_layouts(books.of())
