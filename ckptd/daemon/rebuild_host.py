"""What the daemon lends to a rebuild: its slots, its peers, its storage, and room to fetch into."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

from ckptd.arena.arena import NoMemory, Slot, SlotRecord, Tenant
from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.instructions import MakeParity
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.core.storage_root import in_bucket
from ckptd.daemon.local_slots import settle
from ckptd.daemon.services import Services
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.sums import FileDamage
from ckptd.persist.verify import mark_damaged
from ckptd.protect.columns import Columns
from ckptd.protect.fetched import Fetched
from ckptd.recover.host import Unrecoverable
from ckptd.recover.passing import Passing, group_of
from ckptd.recover.stored import is_away

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

SIZING_WAIT_S = 60.0  # the rank's own slots are being allocated (first touch is slow)
SCRATCH_META_BYTES = 0  # it is never sealed


class RebuildHost:
    """``release()`` gives all room back, once all ranks have loaded or the round failed and its threads have ended."""

    def __init__(self, services: Services, job: JobShell, record: EpochRecord) -> None:
        """record: the epoch that is being opened."""
        self._services, self._job, self._record = services, job, record
        self._lent: list[Slot] = []
        self._making: set[asyncio.Task[Slot]] = set()
        self._loop = asyncio.get_running_loop()
        self.node = services.node.node
        self.executor: Executor = services.work
        self.passing: Passing | None = None

    def pass_on(self, restore: str) -> None:
        """What is read from a bucket goes on to other nodes of this restore, and comes from them. Who has a cache fills that."""
        nodes, services = group_of(self.node, self._record.ranks), self._services
        if len(nodes) < 2 or services.cache is not None or not in_bucket(services.config.storage_root or ""):
            return
        for info in self._record.nodes:
            if info.node in nodes and info.node != self.node:
                services.connect(info, self._job.job)
        self.passing = services.passings.begin(self._job.job, restore, self.node, nodes)

    def held(self, snapshot: SnapshotId, rank: int) -> Slot | None:
        return self._job.held(snapshot, rank)

    def damaged(self, slot: Slot, record: SlotRecord, reason: str) -> None:
        """Called from worker threads."""
        self._loop.call_soon_threadsafe(self._job.damaged, slot, record, reason)

    def unreadable(self, snapshot: SnapshotId, error: Exception) -> None:
        """A durable checkpoint cannot be used. What is damaged there is marked, such that lists say so; storage that is away is not
        damage."""
        if isinstance(error, FileDamage) and self._services.storage is not None:
            self._job.durable.was_damaged(snapshot, str(error))
            mark = mark_damaged, self._services.storage, step_dir(self._job.job, snapshot), str(error)
            self._services.spawn(self._services.in_work(*mark), f"mark damage of {self._job.job}")
            return
        text = f"checkpoint of step {snapshot.step}, epoch {snapshot.epoch}: {error}"
        self._services.health.event("storage" if is_away(error) else "damage", text, job=self._job.job)

    def open_checkpoint(self, snapshot: SnapshotId) -> Checkpoint:
        """An epoch that was opened while storage did not answer has left no claim there, and without one retention cannot know
        what the job goes on from. Where the claim cannot be written now, the lease protects what is read."""
        storage, job = self._services.storage, self._job.job
        if storage is None:
            raise CkptdError(
                "this daemon has no storage", where=str(snapshot), hint="set storage_root on every node"
            )
        with contextlib.suppress(CkptdError):
            claim_epoch(storage, job, self._record)
        found = Checkpoint.open(storage, job, snapshot, self._services.cache)
        stored = found.manifest.snapshot
        if found.manifest.lossy:
            text = f"checkpoint of step {snapshot.step}, epoch {snapshot.epoch} is lossy: {', '.join(found.manifest.lossy)}"
            self._services.health.event("lossy", text, job=job, serious=False)
        if snapshot.grant not in (0, stored.grant):  # 0: whoever decided could not know, and takes all of it from here
            found.close()
            raise CkptdError(f"it was captured under grant {stored.grant}, and not under {snapshot.grant}", where=str(snapshot))
        return found

    async def fetch(
        self, node: str, snapshot: SnapshotId, rank: int, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> Fetched:
        return await self._services.fetcher.fetch(self._job.job, node, snapshot, rank, tuple(spans), into)

    def layouts(self) -> dict[str, Layout]:
        return self._job.machine.slots.layouts()

    async def layout(self, node: str, layout_id: str, tables: Collection[Table]) -> Layout:
        return await self._services.map_parts.ask(self._job.job, node, layout_id, tables)

    def set_columns(self, order: MakeParity, layouts: dict[int, Layout], parts: Layout) -> Columns:
        return self._services.parity.columns(self._job.job, order, layouts, parts, protects=False)

    async def set_cards(self, order: MakeParity) -> dict[int, SlotRecord]:
        return await self._services.parity.kept_cards(self._job.job, order)

    async def room(self, rank: int, nbytes: int) -> Slot:
        """A FREE own slot of the rank when it is large enough (warm, and costs nothing), else scratch memory."""
        own = self._job.local_slots.by_rank.get(rank)
        if own is not None:
            await settle(lambda: bool(own.free) or not own.sizing, SIZING_WAIT_S)
        return await self._room_now(rank, nbytes)

    async def _room_now(self, rank: int, nbytes: int) -> Slot:
        slot = self._job.local_slots.lend(rank, nbytes)
        if slot is not None:
            self._lent.append(slot)
            return slot
        return await self._make(rank, nbytes)

    async def scratch(self, rank: int, most: int, least: int) -> Slot:
        """The same of ``most`` bytes or as many as there are, after ``room`` had none; ``least`` of them even beyond the budget.
        Raises Unrecoverable."""
        nbytes = most
        while nbytes >= least:
            with contextlib.suppress(Unrecoverable):
                return await self._room_now(rank, nbytes)
            nbytes //= 2
        return await self._make(rank, least, beyond_budget=True)

    async def _make(self, rank: int, nbytes: int, *, beyond_budget: bool = False) -> Slot:
        making = asyncio.ensure_future(self._allocate(rank, nbytes, beyond_budget))
        self._making.add(making)
        making.add_done_callback(self._made)
        return await asyncio.shield(making)  # whoever waits may be called off, the memory comes all the same

    async def _allocate(self, rank: int, nbytes: int, beyond_budget: bool) -> Slot:
        tenant = Tenant(self._job.job, self._job.uid, "scratch", rank)
        allocate = partial(self._services.arena.allocate, beyond_budget=beyond_budget)
        try:
            slot = await self._services.in_work(allocate, tenant, nbytes, SCRATCH_META_BYTES)
        except NoMemory as error:
            hint = "raise memory_budget, or restore into more nodes"
            raise Unrecoverable("memory", f"no room to fetch {nbytes} bytes: {error}", hint=hint) from error
        self._lent.append(slot)
        return slot

    def _made(self, making: asyncio.Task[Slot]) -> None:
        self._making.discard(making)
        if not making.cancelled():
            making.exception()  # looked at: whoever needed it has it, or was called off

    def give_back(self, slot: Slot) -> None:
        """Nothing writes into it any more."""
        self._lent.remove(slot)
        if slot.tenant.kind == "scratch":
            self._services.arena.retire(slot)
        else:
            self._job.local_slots.returned(slot)

    async def release(self) -> None:
        if self.passing is not None:
            await self.passing.ended()
        while self._making:
            await asyncio.wait(self._making)
        for slot in list(self._lent):
            self.give_back(slot)
