"""What is computed of the map of the state, without a message: by the steward of a snapshot, by one node of a restore (P16)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from bench.scale.state import State
from ckptd.core.redundancy.protection import slice_classes
from ckptd.core.state_map.agreement import agree
from ckptd.core.state_map.catalogue import Catalogue
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.recovery import Plan, Want, plan_recovery
from ckptd.core.state_map.source_index import Held, SourceIndex
from ckptd.core.state_map.writes import assign_writes

T = TypeVar("T")
LOST = 1  # which node is gone at a flush, and at the restore


class Clock:
    """``took``: seconds of processor time, by what was done."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}

    def of(self, what: str, call: Callable[[], T]) -> T:
        began = time.thread_time()
        found = call()
        self.took[what] = self.took.get(what, 0.0) + time.thread_time() - began
        return found


def planned(
    clock: Clock, held: Sequence[Held], wants: Mapping[int, Sequence[Want]], node: str, per_rank: Collection[str] = ()
) -> dict[int, Plan]:
    """What a node does of a restore for its ranks, once it has all layouts (recover/rebuild.py)."""
    clock.of("catalogue", lambda: Catalogue.from_layouts({one.rank: one.layout for one in held}, {}, per_rank).to_bytes())
    keys = {want.key for asked in wants.values() for want in asked}
    index = clock.of("index", lambda: SourceIndex(held, keys))
    return {
        rank: clock.of("plan", partial(plan_recovery, asked, index, node, rank, per_rank=per_rank)) for rank, asked in wants.items()
    }


class Maps:
    """``nbytes``: of the whole map; ``read``: what reading it took; ``pieces``: of the last restore."""

    def __init__(self, state: State) -> None:
        self.state, self.pieces = state, 0
        clock = Clock()
        made = {rank: state.layout(rank) for rank in range(state.world)}
        tables = {layout.fragments.table.digest: layout.fragments.table for layout in made.values()}
        leaves = [layout.leaf for layout in made.values()]
        self.nbytes = sum(map(len, leaves)) + sum(len(table.encoded) for table in tables.values())
        layouts = clock.of("read", lambda: [Layout.decode(leaf, tables.get) for leaf in leaves])
        self._by_rank = {layout.rank: layout for layout in layouts}
        clock.of("names", lambda: [layout.layout_id for layout in layouts])
        self.read = clock.took

    def _nodes(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Who holds its slot, and of which tier."""
        at = rank // self.state.each
        return (f"n{at}", 0), (f"n{(at + 1) % self.state.nodes}", 1)

    def snapshot(self) -> dict[str, float]:
        """The first one and a steady one are agreed upon and weighed; one is written, with all nodes and after a loss."""
        clock = Clock()
        for step in (1, 2):
            digests = {rank: self.state.digests(layout, step) for rank, layout in self._by_rank.items()}
            agreed = clock.of(f"agree {step}", partial(agree, self._by_rank, digests))
            clock.of(f"classes {step}", partial(slice_classes, self._by_rank))
        holdings: dict[str, list[tuple[int, int]]] = {}
        for rank in self._by_rank:
            for node, tier in self._nodes(rank):
                holdings.setdefault(node, []).append((rank, tier))
        clock.of("writes", lambda: assign_writes(self._by_rank, holdings, agreed.per_rank))
        del holdings[f"n{LOST}"]
        clock.of("writes after a loss", lambda: assign_writes(self._by_rank, holdings, agreed.per_rank))
        return clock.took

    def restore(self, nodes: int) -> dict[str, float]:
        """Into a world of so many nodes: what its first one does for its ranks."""
        clock, state = Clock(), self.state.into(nodes)
        held = [
            Held(node, rank, tier, layout)
            for rank, layout in self._by_rank.items()
            for node, tier in self._nodes(rank)
            if node != f"n{LOST}"
        ]
        plans = planned(clock, held, {rank: state.wants(rank) for rank in range(state.each)}, "n0")
        assert not any(plan.uncovered for plan in plans.values()), "every want has a source"
        self.pieces = sum(len(plan.pieces) for plan in plans.values())
        return clock.took
