"""Bring one rank's slices into local memory, verified, from the best mixture of sources (P9, P10; design D11).

Own memory is handed over where it lies. What peers and storage hold is fetched into one scratch slot, packed piece after
piece; without room for all of it, in parts (direct mode). A source that turns out to be damaged or gone, or that cannot be
reached, is left out and the rest is planned again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ckptd.arena.arena import Slot
from ckptd.arena.objects import split_objects
from ckptd.arena.sums import bad_blocks, hash_shares
from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.protocol.instructions import PrepareRestore
from ckptd.core.redundancy.parity_sets import NOBODY
from ckptd.core.redundancy.protection import level, slice_classes
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.catalogue import Catalogue
from ckptd.core.state_map.columns import Ints
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.pieces import Origin, Pieces
from ckptd.core.state_map.recovery import (
    DURABLE,
    OWN,
    PARITY,
    PEER,
    Plan,
    Want,
    plan_recovery,
)
from ckptd.core.state_map.source_index import Held, SourceIndex
from ckptd.persist.reader import Checkpoint
from ckptd.protect.fetched import Away
from ckptd.recover.assembly import Assembly
from ckptd.recover.by_parity import ByParity
from ckptd.recover.handover import Blobs, Handover
from ckptd.recover.host import Host, Unrecoverable
from ckptd.recover.left_out import LeftOut
from ckptd.recover.objects import ObjectPool
from ckptd.recover.parts import SCRATCH_BYTES_MAX, SCRATCH_BYTES_MIN, aligned, parts_of, usable_bytes
from ckptd.recover.stored import Stored, stored_objects
from ckptd.recover.threads import Threads, all_ended
from ckptd.recover.wants import Wants
from ckptd.wire.seqpacket import memfd_object

OBJECTS_AT_ONCE = 16  # ranks whose objects are fetched
LAYOUTS_AT_ONCE = 16
REPLANS_MAX = 8  # sources that may fail during one restore before it is given up
MISSING_SHOWN_MAX = 8
NONE: Ints = np.empty(0, np.int64)
TOO_MANY = "too many sources failed"
FETCH_SPANS_MAX = 200_000  # byte runs in one request to a peer
PART_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # for who could not be reached, once a rank has begun to write


class Rebuild:
    def __init__(self, host: Host, do: PrepareRestore) -> None:
        assert do.snapshot is not None
        self._host, self._do, self._snapshot = host, do, do.snapshot
        self._held: list[Held] = []
        self._left_out = LeftOut()
        self._by_parity = ByParity(host, do.snapshot, (), {}, self._left_out)
        self._threads = Threads(host.executor)
        self._stored = Stored(do.durable, self._open, lambda error: host.unreadable(self._snapshot, error), host.passing)
        self._index: tuple[object, set[str], SourceIndex] | None = None  # what was left out; what is left, of these keys
        self._objects: dict[int, dict[str, bytes]] = {}
        self._pools: list[Blobs] = []
        self._catalogue: Catalogue | None = None
        self._verified: dict[int, Ints] = {}  # slot -> fragments

    # --- what the snapshot holds --------------------------------------------------------------------------------
    async def catalogue(self) -> bytes:
        """The catalogue for wire.rank.Opened. Raises Unrecoverable when some rank's layout or objects are nowhere to be had."""
        unknown = await self._learn()
        layouts = {held.rank: held.layout for held in (*self._by_parity.held(), *self._held)}
        if await self._threads.run(self._memory_is_whole, layouts):
            await self._all_objects(sorted(layouts))
            return await self._threads.run(self._from_memory, layouts)
        if unknown and not self._stored.ok:
            code = "unreachable" if self._left_out.ever_away else "damage"
            raise Unrecoverable(code, "; ".join(unknown), where=str(self._snapshot))
        # Some slices come from storage, so its manifest says what there is and what is each rank's own.
        self._catalogue = await self._stored.call(lambda checkpoint: checkpoint.catalogue())
        return await self._threads.run(self._catalogue.to_bytes)

    async def _learn(self) -> list[str]:
        """The layouts of the sources, and of whom their parity protects; why some could not be had."""
        sources, host = self._do.sources, self._host
        holders: dict[str, list[str]] = {}
        for source in sources:
            members = source.shard.parity_set.members if source.shard is not None else ()
            for name in (source.layout_id, *(member.layout_id for member in members if member.rank != NOBODY)):
                holders.setdefault(name, []).append(source.node)
        known = {name: layout for name, layout in host.layouts().items() if name in holders}
        tables = {layout.fragments.table for layout in known.values()}  # most ranks have the same
        gate, first = asyncio.Semaphore(LAYOUTS_AT_ONCE), min(self._do.ranks, default=0)
        reasons: set[str] = set()

        async def one(name: str) -> None:
            nodes = holders[name]
            for node in dict.fromkeys(nodes[first % len(nodes) :] + nodes):  # as every node wants all of them
                if node == host.node:
                    reasons.add(f"{node}: what it held is gone")
                    continue
                try:
                    async with gate:
                        known[name] = await host.layout(node, name, tables)
                    tables.add(known[name].fragments.table)
                    return
                except CkptdError as error:
                    self._left_out.ever_away |= isinstance(error, Away)
                    reasons.add(f"{error.where}: {error.what}")

        await all_ended([one(name) for name in sorted(holders.keys() - known)])
        direct = (source for source in sources if source.shard is None and source.layout_id in known)
        self._held = [Held(source.node, source.rank, source.tier, known[source.layout_id]) for source in direct]
        self._by_parity = ByParity(host, self._snapshot, sources, known, self._left_out)
        return [] if holders.keys() <= known.keys() else sorted(reasons)

    async def _all_objects(self, ranks: list[int]) -> None:
        """Several at once, and on each node in another order, as every node wants all of them."""
        gate, first = asyncio.Semaphore(OBJECTS_AT_ONCE), min(self._do.ranks, default=0)

        async def one(rank: int) -> None:
            async with gate:
                self._objects[rank] = await self._rank_objects(rank)

        await all_ended([one(rank) for rank in sorted(ranks, key=lambda rank: (rank < first, rank))])

    async def ended(self) -> None:
        """Returns when no thread of it touches memory any more."""
        await self._threads.ended()
        await self._stored.ended()

    async def close(self) -> None:
        """After they have ended. Drops the reader's lease on storage, which may hang. Raises CkptdError, OSError."""
        for blobs in self._pools:
            blobs.close()
        await self._stored.close()

    def _from_memory(self, layouts: dict[int, Layout]) -> bytes:
        names = {rank: tuple(sorted(blobs)) for rank, blobs in self._objects.items()}
        self._catalogue = Catalogue.from_layouts(layouts, names, self._do.per_rank)
        return self._catalogue.to_bytes()

    def _open(self) -> Checkpoint:
        return self._host.open_checkpoint(self._snapshot)

    def _memory_is_whole(self, layouts: dict[int, Layout]) -> bool:
        holders: dict[int, list[tuple[str, int]]] = {}
        for held in self._held:
            holders.setdefault(held.rank, []).append((held.node, held.tier))
        spared = {held.rank: 0 for held in self._by_parity.held()}
        return level(slice_classes(layouts), holders, spared) >= 0

    async def _rank_objects(self, rank: int) -> dict[str, bytes]:
        for held in sorted(self._held, key=lambda held: (held.node != self._host.node, held.node)):
            if held.rank != rank or (held.node, rank) in self._left_out.copies():
                continue
            region = await self._objects_from(held)
            if region is not None:
                return split_objects(region)
        while any(held.rank == rank for held in self._by_parity.held()):
            region = await self._by_parity.objects(rank)
            if region is not None:
                return split_objects(region)
        if self._stored.ok:
            with contextlib.suppress(CkptdError, OSError):  # it knows why
                return await self._stored.call(partial(stored_objects, rank))
        hopeful = self._stored.away or any(held.rank == rank for held in self._left(hopeful=True))
        what = f"no copy of rank {rank}'s objects is readable"
        raise Unrecoverable(
            "unreachable" if hopeful else "damage", "; ".join([what, *self._why()]), where=str(self._snapshot)
        )

    async def _objects_from(self, held: Held) -> bytes | None:
        length = held.layout.objects_capacity
        if held.node == self._host.node:
            slot = self._host.held(self._snapshot, held.rank)
            if slot is None or not await self._verify_spans(slot, [(0, length)]):
                self._lose(held.node, held.rank)
                return None
            return bytes(slot.payload[:length])
        buffer = bytearray(length)
        found = await self._host.fetch(held.node, self._snapshot, held.rank, [(0, length)], memoryview(buffer))
        if not found.ok:
            self._left_out.note(held.node, held.rank, found)
        return bytes(buffer) if found.ok else None

    # --- one rank's slices --------------------------------------------------------------------------------------
    async def assemble(self, rank: int, wants: Wants) -> Handover:
        """Raises Unrecoverable when some wanted slice is nowhere to be had, naming it."""
        asked = list(wants.tensors)
        blobs = await self._blobs(rank, wants.objects)
        try:
            return Handover(await self._gather(rank, asked), blobs, wants.first)
        except Unrecoverable as error:
            if error.code != "memory":
                raise
        return await self._in_parts(rank, asked, blobs, wants.first)

    async def _in_parts(self, rank: int, asked: list[Want], blobs: Blobs, first: int) -> Handover:
        """Direct mode. Every part is brought and verified once before the vote, so that damage is met while another source, or
        an older snapshot, can still take its place; and once more, each when its turn has come."""
        room = await self._host.scratch(rank, SCRATCH_BYTES_MAX, SCRATCH_BYTES_MIN)
        plan = await self._sound_plan(rank, asked)
        usable = usable_bytes(room.capacity, len(self._held) + len(self._by_parity.held()) + 1)
        parts = await self._threads.run(parts_of, plan, asked, first, usable)
        for part in reversed(parts[1:]):
            (await self._gather(rank, part, room)).release()

        async def gather(number: int) -> Assembly:
            failpoint("restore.part")
            return await self._gather_patiently(rank, parts[number], room)

        beginning = await self._gather(rank, parts[0], room)
        return Handover(beginning, blobs, first, groups=len(parts), gather=gather)

    async def _gather_patiently(self, rank: int, asked: list[Want], room: Slot) -> Assembly:
        """The rank has begun to write, so giving up costs its objects: who cannot be reached is waited for a while."""
        for pause_s in PART_PAUSES_S:
            try:
                return await self._gather(rank, asked, room)
            except Unrecoverable as error:
                if error.code != "unreachable":
                    raise
            await asyncio.sleep(pause_s)
            self._left_out.ask_again()
            self._stored.ask_again()
        return await self._gather(rank, asked, room)

    async def _gather(self, rank: int, asked: list[Want], room: Slot | None = None) -> Assembly:
        """All of it at once, from the best sources that are whole. ``room``: what to fetch into, else what the host lends."""
        for _ in range(REPLANS_MAX):
            plan = await self._sound_plan(rank, asked)
            assembly = await self._carry_out(rank, plan, room)
            if assembly is not None:
                return assembly
        raise self._too_many()

    async def _sound_plan(self, rank: int, asked: list[Want]) -> Plan:
        """Covers everything, and what it takes of own memory was verified."""
        for _ in range(REPLANS_MAX):
            plan = await self._plan(rank, asked)
            if plan.uncovered:
                code = "unreachable" if await self._is_hopeful(rank, asked) else "damage"
                raise Unrecoverable(code, self._name_missing(plan, asked), where=str(self._snapshot))
            if await self._verify_own(plan.pieces):
                return plan
        raise self._too_many()

    def _too_many(self) -> Unrecoverable:
        code = "unreachable" if self._left_out.ever_away or self._stored.away else "damage"
        return Unrecoverable(code, "; ".join([TOO_MANY, *self._why()]), where=str(self._snapshot))

    async def _is_hopeful(self, rank: int, asked: list[Want]) -> bool:
        """Would it do if those could be reached that could not? Another rank may be asking them again by now."""
        if self._stored.away:
            return True
        durable = await self._stored_boxes(rank, asked)
        index = await self._threads.run(SourceIndex, self._left(hopeful=True))
        assert self._catalogue is not None, "wants come after the catalogue"
        args = asked, index, self._host.node, rank, durable.get(rank), self._catalogue.per_rank, durable
        return not (await self._threads.run(plan_recovery, *args)).uncovered

    async def _plan(self, rank: int, asked: list[Want]) -> Plan:
        """Memory comes first anyway: storage, which may hang, is only asked when memory lacks something."""
        plan = await self._threads.run(self._plan_now, rank, asked, {})
        if plan.uncovered:
            durable = await self._stored_boxes(rank, asked)
            if durable:
                plan = await self._threads.run(self._plan_now, rank, asked, durable)
        return plan

    async def _stored_boxes(self, rank: int, asked: list[Want]) -> dict[int, BoxIndex]:
        """By rank: of this one, and of those whose own values are asked for."""
        assert self._catalogue is not None, "wants come after the catalogue"
        named = {want.rank for want in asked if want.rank is not None and 0 <= want.rank < self._catalogue.world}
        found = {who: await self._stored.boxes(who) for who in sorted({rank, *named})}
        return {who: boxes for who, boxes in found.items() if boxes is not None}

    def _plan_now(self, rank: int, asked: list[Want], durable: dict[int, BoxIndex]) -> Plan:
        without = self._left_out.copies(), self._left_out.parity_sets()
        assert self._catalogue is not None, "wants come after the catalogue"
        keys = {want.key for want in asked}
        keys.update(map(self._catalogue.canonical, keys))
        index = self._index
        if index is None or index[0] != without or not keys <= index[1]:  # the ranks of a node mostly want the same
            keys |= index[1] if index is not None else set()
            index = self._index = without, keys, SourceIndex(self._left(), keys)
        per_rank = self._catalogue.per_rank
        return plan_recovery(asked, index[2], self._host.node, rank, durable.get(rank), per_rank, durable)

    def _left(self, *, hopeful: bool = False) -> list[Held]:
        """Sources in memory that are not left out; ``hopeful``: nor those that could not be reached."""
        without = self._left_out.copies(hopeful=hopeful)
        left = [held for held in self._held if (held.node, held.rank) not in without]
        return [*left, *self._by_parity.held(hopeful=hopeful)]

    def _lose(self, node: str, rank: int) -> None:
        """This copy is not used again in this restore."""
        self._left_out.lost.add((node, rank))

    def _name_missing(self, plan: Plan, asked: list[Want]) -> str:
        names = {want.index: want.key for want in asked}
        missing = sorted({names[number] for number, _ in plan.uncovered})
        shown = ", ".join(missing[:MISSING_SHOWN_MAX]) + (", ..." if len(missing) > MISSING_SHOWN_MAX else "")
        return "; ".join(
            [f"slices of {len(missing)} tensors are nowhere to be had: {shown}", *plan.mismatched, *self._why()]
        )

    def _why(self) -> list[str]:
        return [*self._left_out.reasons()[:MISSING_SHOWN_MAX], *([self._stored.why] if self._stored.why else [])]

    async def _carry_out(self, rank: int, plan: Plan, room: Slot | None) -> Assembly | None:
        """None: a source failed and was crossed out; plan again."""
        assembly = Assembly()
        try:
            if not (self._add_own(assembly, plan.pieces) and await self._fetch_far(rank, assembly, plan.pieces, room)):
                assembly.release()
                return None
        except BaseException:
            assembly.release()
            raise
        return assembly

    def _add_own(self, assembly: Assembly, of: Pieces) -> bool:
        """False: what was verified of own memory is not what lies here now, or nothing does."""
        for origin, pieces in of.by_origin(OWN):
            slot = self._host.held(self._snapshot, origin.rank)
            if slot is None or slot.record is None or not np.isin(pieces.fragment, self._verified.get(slot.id, NONE)).all():
                return False
            assembly.put(OWN, pieces, slot, slot.record.layout.fragments.offset[pieces.fragment])
        return True

    async def _fetch_far(self, rank: int, assembly: Assembly, of: Pieces, room: Slot | None) -> bool:
        """Everything not on this node, into one scratch slot; sources work side by side."""
        groups = await self._threads.run(_far_groups, of)
        if not groups:
            return True
        sizes = [int(group.nbytes.sum()) for _, group in groups]
        total = sum(map(aligned, sizes))
        if room is not None and total > room.capacity:
            raise Unrecoverable("memory", f"{total} bytes do not fit into {room.capacity}")
        slot = room or await self._host.room(rank, total)
        jobs, at = [], 0
        for (origin, group), nbytes in zip(groups, sizes, strict=True):
            assembly.put(origin.source, group.brought(), slot, at + np.cumsum(group.nbytes) - group.nbytes)
            jobs.append(self._fetch_group(origin, group, slot.payload[at : at + nbytes], assembly, shared=room is None))
            at += aligned(nbytes)
        if all(await all_ended(jobs)):
            return True
        if room is None:
            await self._stored.forget()
            self._host.give_back(slot)  # the next plan finds it again
        return False

    async def _fetch_group(
        self, origin: Origin, group: Pieces, into: memoryview, assembly: Assembly, *, shared: bool
    ) -> bool:
        """shared: nothing else is going to be fetched into this memory."""
        if origin.source == DURABLE:
            came = await self._stored.read(group, into, shared=shared)
            if came is not None:
                assembly.came_from(DURABLE, OWN, came.own)
                assembly.came_from(DURABLE, PEER, came.peer)
            return came is not None
        if origin.source == PARITY:
            return await self._by_parity.fetch(origin.rank, group, into)
        layout = next(held.layout for held in self._held if (held.node, held.rank) == origin[1:])
        offsets, lengths = await self._threads.run(group.spans, layout.fragments.offset)
        at = 0
        for first in range(0, len(offsets), FETCH_SPANS_MAX):
            part = slice(first, first + FETCH_SPANS_MAX)
            spans = list(zip(offsets[part].tolist(), lengths[part].tolist(), strict=True))
            length = int(lengths[part].sum())
            found = await self._host.fetch(origin.node, self._snapshot, origin.rank, spans, into[at : at + length])
            if not found.ok:
                self._left_out.note(origin.node, origin.rank, found)
                return False
            at += length
        return True

    async def _verify_own(self, of: Pieces) -> bool:
        """Blocks of own memory are checked once per restore (P10). A copy of another tier may have taken the place of the one
        that the plan knew, which was damaged meanwhile: what that lacks would be read beyond its end."""
        for origin, pieces in of.by_origin(OWN):
            slot = self._host.held(self._snapshot, origin.rank)
            if slot is None or slot.record is None:
                self._lose(self._host.node, origin.rank)
                return False
            which = np.setdiff1d(pieces.fragment, self._verified.get(slot.id, NONE))
            fragments = slot.record.layout.fragments
            if (fragments.tier[which] < slot.record.tier).any():
                self._lose(self._host.node, origin.rank)
                return False
            spans = list(zip(fragments.offset[which].tolist(), fragments.nbytes[which].tolist(), strict=True))
            if not await self._verify_spans(slot, spans):
                return False
            self._verified[slot.id] = np.union1d(self._verified.get(slot.id, NONE), which)
        return True

    async def _verify_spans(self, slot: Slot, spans: list[tuple[int, int]]) -> bool:
        record = slot.record
        if record is None:
            return False
        args = slot.payload, record.layout, record.sums
        shares = hash_shares(spans)
        found = await all_ended([self._threads.run(bad_blocks, *args, part, record.tier) for part in shares])
        bad = sorted({block for part in found for block in part})
        if bad:
            self._lose(self._host.node, record.rank)
            self._host.damaged(
                slot, record, f"{len(bad)} blocks do not match their sums, first: block {bad[0]}"
            )
        return not bad

    # --- objects ------------------------------------------------------------------------------------------------
    async def _blobs(self, rank: int, names: Sequence[str]) -> Blobs:
        assert self._catalogue is not None, "wants come after the catalogue"
        unknown = sorted(set(names) - self._catalogue.objects.keys())
        if unknown:
            raise Unrecoverable("mismatch", f"there are no objects {unknown}", where=str(self._snapshot))
        if self._objects:
            return await self._threads.run(self._pool, rank, names, self._held_blob)
        if names:
            return await self._stored.call(lambda c: self._pool(rank, names, c.object_bytes))
        return Blobs()

    def _pool(self, rank: int, names: Sequence[str], blob: Callable[[str, int], bytes]) -> Blobs:
        assert self._catalogue is not None, "wants come after the catalogue"
        pool, blobs = ObjectPool(), Blobs()
        for name in names:
            owners = self._catalogue.objects[name]
            if f"o:{name}" in self._catalogue.per_rank:
                blobs.every[name] = {owner: pool.place(blob(name, owner)) for owner in owners}
            if rank in owners or f"o:{name}" not in self._catalogue.per_rank:
                blobs.single[name] = pool.place(blob(name, rank if rank in owners else owners[0]))
        if not pool.size:
            return Blobs()
        blobs.fd, blobs.size = memfd_object(pool.data()), pool.size
        self._pools.append(blobs)  # here, so that it is closed even when nobody waits for it any more
        return blobs

    def _held_blob(self, name: str, rank: int) -> bytes:
        return self._objects[rank][name]


def _far_groups(of: Pieces) -> list[tuple[Origin, Pieces]]:
    return [(origin, group.largest_elements_first()) for origin, group in of.by_origin(PEER, PARITY, DURABLE)]
