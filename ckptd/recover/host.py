"""What the daemon lends to a rebuild, and how a rebuild says that it cannot be done."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import Protocol

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.instructions import MakeParity
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.persist.reader import Checkpoint
from ckptd.protect.columns import Columns
from ckptd.protect.fetched import Fetched
from ckptd.recover.passing import Passing


class Unrecoverable(CkptdError):
    """``code``: "damage" (another snapshot may serve), "unreachable" (this one may, later) or "memory" (no room to fetch into)."""

    def __init__(self, code: str, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.code = code


class Host(Protocol):
    """What the daemon lends to a rebuild."""

    node: str
    executor: Executor
    passing: Passing | None  # what is read from storage, from and to other nodes

    def held(self, snapshot: SnapshotId, rank: int) -> Slot | None: ...
    def damaged(self, slot: Slot, record: SlotRecord, reason: str) -> None: ...
    def unreadable(self, snapshot: SnapshotId, error: Exception) -> None: ...
    def open_checkpoint(self, snapshot: SnapshotId) -> Checkpoint: ...
    def layouts(self) -> Mapping[str, Layout]: ...
    async def layout(self, node: str, layout_id: str, tables: Collection[Table]) -> Layout: ...
    def set_columns(self, order: MakeParity, layouts: dict[int, Layout], parts: Layout) -> Columns: ...
    async def set_cards(self, order: MakeParity) -> dict[int, SlotRecord]: ...
    async def room(self, rank: int, nbytes: int) -> Slot: ...
    async def scratch(self, rank: int, most: int, least: int) -> Slot: ...
    def give_back(self, slot: Slot) -> None: ...
    async def fetch(
        self, node: str, snapshot: SnapshotId, rank: int, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> Fetched: ...
