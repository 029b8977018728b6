"""Reading a job without being a rank of it: ``ckptd_client.open(job)`` (design D11). Nobody who trains waits for it: what is read
stays in the memory of peers, and in own slots beyond two, while that is there. What is gone all the same is read from storage, or
not at all; what is brought was copied and verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd.arena.arena import Slot
from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol.candidates import Candidate, find_candidates
from ckptd.core.protocol.instructions import PrepareRestore
from ckptd.core.protocol.messages import HoldingFact, RestoreAsk
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.rebuild_host import RebuildHost
from ckptd.daemon.services import Services, log
from ckptd.persist.lineage import newest_record
from ckptd.persist.reader import Checkpoint
from ckptd.protect.fetched import Fetched
from ckptd.recover.handover import Handover
from ckptd.recover.host import Unrecoverable
from ckptd.recover.rebuild import LAYOUTS_AT_ONCE, Rebuild
from ckptd.recover.threads import all_ended
from ckptd.recover.wants import WANTS_BYTES_MAX, Wants
from ckptd.wire import rank as wire
from ckptd.wire.peer import HoldingsAsk, HoldingsTold
from ckptd.wire.rank_link import RankSession
from ckptd.wire.seqpacket import memfd_object
from ckptd.wire.world_check import unpack_world

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

READERS_MAX = 16  # of one job, on this node
KEPT_S = 30.0  # what is read is kept for so long after the reader's daemon has last said so
KEPT_AGAIN_S = KEPT_S / 3
KEPT_MAX = 64  # readers for whom this node keeps something
KEPT_FIRST = 2  # snapshots, the newest: what is newest on one node may not be there on another
NODES_NAMED_MAX = 16  # by a reader; they know the others
SNAPSHOTS_MAX = 8  # looked at, the newest first
LOOKS_MAX = 3  # what is found may be gone before it is read
NOBODY = "a reader"  # in place of a node: all that is read is copied, also from here
HINTS = {
    "unrecoverable": "`ckptd ls` shows what exists; ask the daemon of a node on which the job runs",
    "memory": "raise memory_budget, or read less at a time",
    "damage": "training may have let go of this step meanwhile: open the job again",
    "unreachable": "bring the missing daemons or the storage back",
    "busy": "close some",
    "forgotten": "`ckptd status` shows what became of it; open() again reads what storage has",
}


class Reads:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self._readers: dict[RankSession, _Reader] = {}
        self._kept: dict[str, asyncio.TimerHandle] = {}  # by reader, here or elsewhere

    def told(self, ask: HoldingsAsk) -> HoldingsTold:
        """What this node says to one that reads."""
        machine = self._job.machine
        certified = machine.levels.certified()
        complete = [snapshot for snapshot, level, _ in certified if level >= 0 and snapshot in machine.slots.sealed]
        self.read(ask.reader, tuple(sorted(complete)[-KEPT_FIRST:]))
        return HoldingsTold(ask.transfer, machine.slots.frozen_facts(), certified, self._job.record)

    def read(self, reader: str, snapshots: Collection[SnapshotId]) -> None:
        """These are kept for this reader, until it is said again."""
        timer = self._kept.pop(reader, None)
        if timer is not None:
            timer.cancel()
        elif not snapshots or len(self._kept) >= KEPT_MAX:
            return
        self._job.feed(ev.Reading(reader, tuple(snapshots)))
        if snapshots:
            self._kept[reader] = asyncio.get_running_loop().call_later(KEPT_S, self.read, reader, ())

    def spare(self) -> None:
        """Somebody lacks memory: readers make do with what is left."""
        for reader in list(self._kept):
            self.read(reader, ())

    def knows(self, session: RankSession) -> bool:
        return session in self._readers

    def on_message(self, session: RankSession, message: Any, fds: list[int]) -> None:
        """Raises ValueError for what no reader says."""
        if isinstance(message, wire.Goodbye):
            self.gone(session)
            return
        if not isinstance(message, wire.Look):
            self._readers[session].on_message(message, fds)
            return
        self.gone(session)
        if self._job.local_slots.of_session(session) is not None:
            raise ValueError("a rank looks at its own job")
        if len(self._readers) >= READERS_MAX:
            session.send(wire.Failed("busy", f"{READERS_MAX} readings of this job are open here already", HINTS["busy"]))
            return
        self._readers[session] = _Reader(self._services, self._job, session, message)

    def gone(self, session: RankSession) -> None:
        reader = self._readers.pop(session, None)
        if reader is not None:
            reader.end()

    def drop(self) -> None:
        """The job is over."""
        for session in list(self._readers):
            self.gone(session)
            session.send(wire.Failed("forgotten", "this daemon holds nothing of the job any more", HINTS["forgotten"]))
            session.close()
        for timer in self._kept.values():
            timer.cancel()
        self._kept.clear()


class _Host(RebuildHost):
    """Everything is copied into scratch memory, within the budget: nobody else's slots, and nothing handed over where it lies."""

    def __init__(self, services: Services, job: JobShell, record: EpochRecord) -> None:
        super().__init__(services, job, record)
        self.node = NOBODY
        self._known: dict[str, Layout] = {}

    def open_checkpoint(self, snapshot: SnapshotId) -> Checkpoint:
        """It claims nothing: the job's lineage is its ranks'. The lease protects what is read."""
        if self._services.storage is None:
            raise CkptdError("this daemon has no storage", where=str(snapshot))
        return Checkpoint.open(self._services.storage, self._job.job, snapshot, self._services.cache)

    def layouts(self) -> dict[str, Layout]:
        return super().layouts() | self._known

    async def layout(self, node: str, layout_id: str, tables: Collection[Table]) -> Layout:
        found = self.layouts().get(layout_id)
        if found is None and node != self._services.node.node:
            found = await super().layout(node, layout_id, tables)
        if found is None:
            raise CkptdError("what it held is gone", where=node)
        self._known[layout_id] = found
        return found

    async def fetch(
        self, node: str, snapshot: SnapshotId, rank: int, spans: Sequence[tuple[int, int]], into: memoryview
    ) -> Fetched:
        if node != self._services.node.node:
            return await super().fetch(node, snapshot, rank, spans, into)
        return await self._services.fetcher.here(self._job.job, snapshot, rank, tuple(spans), into, "found by a reader")

    async def room(self, rank: int, nbytes: int) -> Slot:
        return await self._make(rank, nbytes)

    async def scratch(self, rank: int, most: int, least: int) -> Slot:
        while most > least:
            with contextlib.suppress(Unrecoverable):
                return await self._make(rank, most)
            most //= 2
        return await self._make(rank, least)


def _nodes_of(look: wire.Look) -> tuple[NodeInfo, ...]:
    """Raises ValueError for what are none."""
    if len(look.nodes) > NODES_NAMED_MAX:
        raise ValueError(f"a look that names {len(look.nodes)} nodes")
    return unpack_world(msgspec.msgpack.encode({"ranks": [], "nodes": look.nodes}))[1]


class _Reader:
    """One process that reads one step, from its Look to its end."""

    def __init__(self, services: Services, job: JobShell, session: RankSession, look: wire.Look) -> None:
        self._services, self._job, self._session, self._ask = services, job, session, look
        self._host: _Host | None = None
        self._rebuild: Rebuild | None = None
        self._handover: Handover | None = None
        self._task: asyncio.Task[Any] | None = None
        self._owes = False  # an answer
        self._name, self._nodes = secrets.token_hex(8), list[str]()  # who keep something for it
        self._named = _nodes_of(look)
        self._keeping: asyncio.TimerHandle | None = None
        self._wants = -1  # memfd of those that nobody has begun to read
        self._work(self._look)

    def on_message(self, message: Any, fds: list[int]) -> None:
        """Raises ValueError for what no reader says now."""
        if getattr(message, "round", -1) != self._ask.round or self._owes:
            raise ValueError(f"{type(message).__name__} of a reader that waits for an answer")
        if isinstance(message, wire.Wants) and fds and self._rebuild is not None and self._handover is None:
            self._wants = os.dup(fds[0])
            self._work(partial(self._bring, self._rebuild, self._task))
        elif isinstance(message, wire.LoadedPart) and self._handover is not None and not self._handover.last:
            self._work(partial(self._next, self._handover))
        elif isinstance(message, wire.Loaded) and self._handover is not None:
            self._let_go()
            self._work(self._give_back)
            self._owes = False
        else:
            raise ValueError(f"{type(message).__name__} of a reader that has nothing to say so of")

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._keep(())
        self._services.spawn(self._end(), f"end of a read of {self._job.job}")

    def _work(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One that is called off before it has begun leaves nothing behind."""
        self._owes = True
        self._task = self._services.spawn(self._guarded(call), f"read {self._job.job}")

    async def _guarded(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await call()
        except Unrecoverable as error:
            self._fail(error.code, error.what)
        except (CkptdError, OSError, ValueError) as error:
            self._fail("damage", str(error) or repr(error))
        except Exception as error:  # the reader waits for an answer
            self._services.went_wrong(f"a read of {self._job.job}", error, self._job.job)
            self._fail("internal", repr(error))

    def _fail(self, code: str, reason: str) -> None:
        log.info("job=%s a reader (pid %d) is refused: %s [%s]", self._job.job, self._session.pid, reason, code)
        self._let_go()
        self._answer(wire.Failed(code, reason, HINTS.get(code, "")))

    def _answer(self, message: object, fds: Sequence[int] = ()) -> None:
        self._owes = False
        self._session.send(message, fds)

    # --- what is there ------------------------------------------------------------------------------------------
    async def _look(self) -> None:
        excluded: set[SnapshotId] = set()
        while True:
            record, found = await self._candidate(excluded)
            self._keep((found.snapshot,))
            self._host = _Host(self._services, self._job, record)
            do = PrepareRestore(record, 0, (0,), found.snapshot, found.durable, found.sources, found.per_rank)
            self._rebuild = await self._services.in_work(Rebuild, self._host, do)
            try:
                catalogue = await self._rebuild.catalogue()
                break
            except Unrecoverable:
                excluded.add(found.snapshot)
                await self._clear()
                if len(excluded) >= LOOKS_MAX:
                    raise
        fd = memfd_object(catalogue)
        at = [found.snapshot.epoch, found.snapshot.step]
        self._answer(wire.Opened(record.number, self._ask.round, at), [fd])
        os.close(fd)

    async def _candidate(self, excluded: Collection[SnapshotId]) -> tuple[EpochRecord, Candidate]:
        """Raises Unrecoverable: there is none."""
        told, silent = await self._told()
        record = await self._record(told)
        levels: dict[SnapshotId, int] = {}
        for answer in told.values():
            for snapshot, level, _ in answer.certified:  # void on one node, and not yet so on another, is void
                levels[snapshot] = min(level, levels.get(snapshot, level))
        commits = await self._job.durable.durable_now() or ()
        known = {*(snapshot for snapshot, level in levels.items() if level >= 0), *commits}
        wanted = [one for one in known if record.is_candidate(one) and self._ask.step in (None, one.step) and one not in excluded]
        reasons: list[str] = []
        # What peers have is kept for a reader; of what no peer has yet training lets go as soon as it lacks the slot.
        safe = {snapshot for snapshot, level in levels.items() if level >= 1 and self._ask.source != "durable"}
        for snapshot in sorted(wanted, key=lambda one: (one in safe, one), reverse=True)[:SNAPSHOTS_MAX]:
            found = await self._judged(record, snapshot, told, snapshot in commits)
            if isinstance(found, Candidate):
                return record, found
            reasons.append(f"{snapshot}: {found}")
        what = "the job has no step that can be read" if self._ask.step is None else f"step {self._ask.step} cannot be read"
        if silent:
            reasons.append(f"no answer from {', '.join(silent)}")
        raise Unrecoverable("unreachable" if silent else "unrecoverable", "; ".join([what, *reasons]))

    async def _told(self) -> tuple[dict[str, HoldingsTold], list[str]]:
        """By node, and who did not answer."""
        here, asked = self._services.node.node, set[str]()
        told = {here: self._job.reads.told(HoldingsAsk("", self._name))}
        known: Sequence[NodeInfo] = self._named
        while True:  # those that are known here, then those that they know of
            records = [answer.record for answer in told.values() if answer.record is not None]
            known = (*known, *(max(records, key=lambda record: record.number).nodes if records else ()))
            new = {node.node: node for node in known if node.node not in (here, *asked)}
            if not new:
                self._nodes = sorted(asked)
                return told, sorted(asked - told.keys())
            for node in new.values():
                self._services.connect(node, self._job.job)
            asked.update(new)
            told |= await self._services.holdings.ask(self._job.job, list(new), self._name)

    def _keep(self, snapshots: tuple[SnapshotId, ...]) -> None:
        """Said again and again until the end, as a daemon may begin anew."""
        if self._keeping is not None:
            self._keeping.cancel()
        self._job.reads.read(self._name, snapshots)
        self._services.holdings.tell(self._job.job, self._nodes, self._name, snapshots)
        if snapshots:
            self._keeping = asyncio.get_running_loop().call_later(KEPT_AGAIN_S, self._keep, snapshots)

    async def _record(self, told: dict[str, HoldingsTold]) -> EpochRecord:
        records = [answer.record for answer in told.values() if answer.record is not None]
        if not records and self._services.storage is not None:
            stored = await self._services.listed(newest_record, self._services.storage, self._job.job)
            records = [stored] if stored is not None else []
        if not records:
            raise Unrecoverable("unrecoverable", "nothing of this job is known to this daemon")
        return max(records, key=lambda record: record.number)

    async def _judged(
        self, record: EpochRecord, snapshot: SnapshotId, told: dict[str, HoldingsTold], durable: bool
    ) -> Candidate | str:
        facts = {node: [fact for fact in answer.holdings if fact.snapshot == snapshot] for node, answer in told.items()}
        layouts = await self._layouts(record, facts)
        ask, commits = RestoreAsk(snapshot.step, self._ask.source), [snapshot] if durable else []
        found = await self._services.in_work(partial(find_candidates, record, facts, layouts, commits, ask=ask))
        if found.best is not None:
            return found.best
        return "; ".join(passed.reason for passed in found.passed_over) or "nobody holds it"

    async def _layouts(self, record: EpochRecord, facts: dict[str, list[HoldingFact]]) -> dict[str, Layout]:
        """Of the holdings, and of what their parity protects; without those that nobody tells any more."""
        host, gate, found = _Host(self._services, self._job, record), asyncio.Semaphore(LAYOUTS_AT_ONCE), dict[str, Layout]()
        names: dict[str, str] = {}
        for node, held in facts.items():
            for fact in held:
                members = fact.shard.parity_set.members if fact.shard is not None else ()
                names |= dict.fromkeys([fact.layout_id, *(member.layout_id for member in members if member.layout_id)], node)

        async def one(name: str, node: str) -> None:
            async with gate:
                with contextlib.suppress(CkptdError):
                    found[name] = await host.layout(node, name, {layout.fragments.table for layout in found.values()})

        await all_ended([one(name, node) for name, node in sorted(names.items())])
        return found

    # --- what is wanted of it -----------------------------------------------------------------------------------
    async def _bring(self, rebuild: Rebuild, before: asyncio.Task[Any] | None) -> None:
        """``before``: lets go of what was brought last."""
        if before is not None:
            await asyncio.wait([before])
        fd, self._wants = self._wants, -1
        wants = await self._services.read_object(self._job.uid, fd, WANTS_BYTES_MAX, Wants.decode)
        self._handover = await rebuild.assemble(0, wants)
        await self._send(self._handover)

    async def _next(self, handover: Handover) -> None:
        await handover.advance()
        await self._send(handover)

    async def _send(self, handover: Handover) -> None:
        frame = await self._services.in_work(handover.frame)
        plan = memfd_object(frame.plan)
        self._answer(wire.LoadPlan(self._ask.round, frame.segment_bytes), [plan, *frame.fds])
        os.close(plan)

    def _let_go(self) -> None:
        """Of what was brought: the reader has copied it."""
        handover, self._handover = self._handover, None
        if handover is not None:
            handover.release()

    async def _give_back(self) -> None:
        if self._host is not None:
            await self._host.release()

    async def _end(self) -> None:
        """How a task ended names what it was at work on: as long as that names the task, the process's descriptor stays open."""
        await self._clear()
        self._task = None

    async def _clear(self) -> None:
        """Its memory goes to nobody else before the last thread that may write into it has ended."""
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])
        if self._wants >= 0:
            os.close(self._wants)
            self._wants = -1
        rebuild, self._rebuild = self._rebuild, None
        if rebuild is not None:
            await rebuild.ended()
        self._let_go()
        await self._give_back()
        if rebuild is not None:
            with contextlib.suppress(CkptdError, OSError):  # storage is away: its lease ends by itself
                await rebuild.close()
