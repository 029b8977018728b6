"""One job on this node: feeds what happens to the job's machine and carries out what it decides (design D5).

Everything here runs on the daemon's event loop; bytes move in threads (restore.py, durable.py, protect/).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from ckptd.arena.arena import Slot, SlotRecord
from ckptd.arena.frozen import leans
from ckptd.arena.header import FILLING
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone
from ckptd.core.protocol.machine.levels import forget_oldest
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.protocol.machine.view import own_values, progress, waits
from ckptd.daemon.durable import Durable
from ckptd.daemon.frozen import Frozen
from ckptd.daemon.inbound_queue import InboundQueue
from ckptd.daemon.keeping import Keeping
from ckptd.daemon.local_slots import LocalSlots
from ckptd.daemon.losses import Losses
from ckptd.daemon.meter import Meter
from ckptd.daemon.own_values import tell_own_values
from ckptd.daemon.parity_shards import ParityShards
from ckptd.daemon.ranks import Ranks
from ckptd.daemon.reads import Reads
from ckptd.daemon.restore import Restore
from ckptd.daemon.services import Services, log
from ckptd.daemon.state import Kept
from ckptd.daemon.stragglers import Stragglers
from ckptd.daemon.summary import summary
from ckptd.daemon.supervisor import Supervisor
from ckptd.observe.report import JobReport
from ckptd.protect.peer_slot import DAMAGE

TRACE_CHARS_MAX = 300  # of one event or instruction in the debug log
GROW_RETRY_S = 5.0  # ranks that are short of memory ask for it again
WRITE_RETRY_S = 5.0  # an epoch that could not be written down
ALARM_LEVELS = {"nothing_sealed": logging.ERROR}  # in the log; all others are warnings
LEVELS_KEPT_MAX = 256  # snapshots whose level is remembered for status


class JobShell:
    """``job`` is "uid/name". ``kept``: what this daemon had persisted before it restarted, or forgot the job: ``tombstone``."""

    def __init__(
        self, services: Services, job: str, kept: Kept | None = None, tombstone: Tombstone = NO_TOMBSTONE
    ) -> None:
        self.services, self.job = services, job
        self.uid = int(job.split("/", 1)[0])
        self.machine = JobMachine(job, services.node, services.policy)
        self.record: EpochRecord | None = kept.record if kept is not None else None
        self.ran: EpochRecord | None = kept.ran if kept is not None else None
        self.life, self._life_since = (kept.life, kept.since) if kept is not None else ("", 0.0)
        self._tombstone, self._sealed = tombstone, kept.sealed if kept is not None else 0
        self.slots: dict[int, Slot] = {}  # replicas held for others
        self._unwritten_at: float | None = None  # the newest epoch could not be written down, tried last then
        self._damaged: set[int] = set()  # slots that are kept only until their last reader has ended
        self.levels: dict[SnapshotId, ins.TellLevel] = {}
        self.safe_point = SnapshotId(0, -1)
        self.frozen = Frozen(services, job)
        self.local_slots = LocalSlots(services, job, self.uid, self.frozen, self.feed)
        self.ranks = Ranks(services, self)
        self.restore, self.reads = Restore(services, self), Reads(services, self)
        self.durable, self.keeping = Durable(services, self), Keeping(services, self)
        self.parity = ParityShards(services, self)
        self.inbound = InboundQueue(services, job, self.feed)
        self.meter = Meter(services, self)
        self._stragglers = Stragglers(services, job)
        self.losses = Losses(services, job, self.local_slots)
        self._supervisor = Supervisor(services, self)
        self._queue: deque[ev.Event] = deque()
        self._grown_at = services.now()
        self._running = self.dropped = False
        self._actions: dict[type, Callable[[Any], None]] = {
            ins.Send: self._send,
            ins.Connect: self._connect,
            ins.Compute: self._compute,
            ins.PersistEpoch: self._persist_epoch,
            ins.PersistSealed: self._persist_sealed,
            ins.PersistLife: self._persist_life,
            ins.Bury: lambda do: services.forget_job(job, do.tombstone),
            ins.ReadDurable: self.durable.read,
            ins.ClaimEpoch: self.durable.claim,
            ins.PrepareRestore: self.restore.prepare,
            ins.LoadNow: self.restore.load_now,
            ins.FailJoin: self.restore.fail_join,
            ins.FailRestore: self.restore.fail,
            ins.FinishRestore: self.restore.finish,
            ins.GiveSlot: self.ranks.give_slot,
            ins.TakeBack: self.ranks.take_back,
            ins.TellWritten: self.ranks.tell_written,
            ins.Supersede: self.ranks.supersede,
            ins.TellLevel: self._tell_level,
            ins.FreeSlot: self._free_slot,
            ins.Replicate: self._replicate,
            ins.MakeParity: self.parity.make,
            ins.WriteFiles: self.durable.write,
            ins.CancelWrite: self.durable.cancel,
            ins.Commit: self.durable.commit,
            ins.Alarm: self._alarm,
        }
        self.begin()

    def begin(self) -> None:
        """What a new machine hears first: what is known of the job, and who was gone before. What the one before it had been told
        of levels nobody goes on with."""
        self.levels.clear()
        since = max(0.0, self.services.wall() - self._life_since) if self.life else 0.0
        self.feed(ev.Restarted(self.record, self.ran, self.life, since, self._tombstone, self._sealed))
        for node in self.services.down():
            self.feed(ev.NodeDown(node))

    def feed(self, event: ev.Event) -> None:
        """Hand an event to the machine and do what it says. Events that arise meanwhile wait their turn."""
        self._queue.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                event = self._queue.popleft()
                instructions = self._supervisor.handle(event)
                if log.isEnabledFor(logging.DEBUG):
                    self._trace(event, instructions)
                for instruction in instructions:
                    self._carry_out(instruction)
        finally:
            self._running = False

    def tick(self) -> None:
        self.feed(ev.Tick())
        self._stragglers.look(progress(self.machine))
        self.losses.look(waits(self.machine))
        if self.services.now() - self._grown_at >= GROW_RETRY_S:  # memory may have come free elsewhere
            self._grown_at = self.services.now()
            self.frozen.tidy()
            self.local_slots.grow()
        if self._unwritten_at is not None and self.services.now() - self._unwritten_at >= WRITE_RETRY_S:
            self._write_epoch()

    def let_go(self) -> None:
        """The machine is gone: whoever waits for its word comes back by himself."""
        self._queue.clear()
        self.restore.abandon()
        self.durable.cancel_all()
        for own in self.local_slots.by_rank.values():
            if own.session is not None:
                own.session.close()

    def freed_for_revival(self) -> list[Slot]:
        """What memory holds, for a new machine: nothing half-written, damaged or lent to a restore."""
        kept = [slot for slot in self.all_slots() if slot.id not in self.local_slots.lent]
        for slot in kept:
            if slot.state == FILLING or slot.id in self._damaged:
                slot.free()
        self._damaged.clear()
        return kept

    def _carry_out(self, instruction: ins.Instruction) -> None:
        """One that fails does not take the rest of its batch along."""
        try:
            self._actions[type(instruction)](instruction)
        except Exception as error:
            self.services.went_wrong(f"{type(instruction).__name__} of {self.job}", error, self.job)

    def _trace(self, event: ev.Event, instructions: list[ins.Instruction]) -> None:
        """One line per event, for --log-level debug: what happened and what was decided."""
        if instructions or not isinstance(event, ev.Tick):
            said = "; ".join(repr(instruction)[:TRACE_CHARS_MAX] for instruction in instructions)
            log.debug("job=%s %s -> %s", self.job, repr(event)[:TRACE_CHARS_MAX], said or "nothing")

    def slot(self, slot_id: int) -> Slot | None:
        return self.slots.get(slot_id) or self.local_slots.slots.get(slot_id)

    def all_slots(self) -> list[Slot]:
        return [*self.local_slots.slots.values(), *self.slots.values()]

    def memory_bytes(self) -> int:
        """What its slots here take."""
        return sum(slot.size for slot in (*self.all_slots(), *self.frozen.slots.values()))

    def fitting(self, most_bytes: int) -> tuple[SnapshotId, ...]:
        """Snapshots held here, oldest first, that take no more than this together."""
        sizes: dict[SnapshotId, int] = {}
        for slot in self.all_slots():
            if slot.record is not None:
                sizes[slot.record.snapshot] = slot.size + sizes.get(slot.record.snapshot, 0)
        totals = zip(sorted(sizes), accumulate(sizes[snapshot] for snapshot in sorted(sizes)), strict=True)
        return tuple(snapshot for snapshot, total in totals if total <= most_bytes)

    def held(self, snapshot: SnapshotId, rank: int) -> Slot | None:
        """The sealed slot, own or replica, that holds most of this rank's snapshot here."""
        held = [
            slot
            for slot in self.all_slots()
            if slot.id not in self._damaged and slot.record is not None
            and slot.record.snapshot == snapshot and slot.record.rank == rank
        ]  # fmt: skip
        return min(held, key=lambda slot: (slot.record.tier if slot.record else 0, slot.id), default=None)

    def adopt(self, slot: Slot) -> None:
        """A slot of re-adopted memory (P7): nothing is copied, the machine only hears that it is there."""
        if slot.record is not None and slot.record.layout.is_frozen:
            self.frozen.add(slot)
            return
        if slot.record is not None and leans(slot.record) and slot.frozen is None:
            frozen = self.frozen.part_of(slot.record)
            if frozen is None:
                slot.unread = "the slot of its frozen parameters is gone"
                slot.free()
            else:
                slot.lean(frozen)
        if slot.unread:
            text = f"memory of an earlier life of the daemon held a snapshot that cannot be used, and is free now: {slot.unread}"
            self.services.health.event("memory", text, job=self.job)
            log.warning("job=%s slot %d: %s", self.job, slot.id, text)
        own = slot.tenant.kind == "own"
        if own:
            self.local_slots.adopt(slot, free=slot.record is None)
        elif slot.record is not None:
            self.slots[slot.id] = slot
        if slot.record is None:
            if not own:
                self.slots.pop(slot.id, None)
                self.services.arena.release(slot)
            return
        r = slot.record
        if r.shard is not None:
            self.parity.adopt(slot, r)
            return
        self.feed(ev.HoldingFound(slot.id, r.snapshot, r.rank, r.tier, own, r.layout, r.digests, r.keep))

    def arrived(self, slot: Slot) -> None:
        """A replica was received, verified and sealed here."""
        self.slots[slot.id] = slot
        r = slot.record
        assert r is not None, "a replica arrives sealed"
        self.feed(ev.ReplicaArrived(r.snapshot, r.rank, r.tier, slot.id, r.layout, r.digests, r.keep))

    def damaged(self, slot: Slot, record: SlotRecord | None, reason: str) -> None:
        """P10: this copy is not used again. ``record``: what was looked at; the slot may hold something else by now."""
        if record is None or slot.record is not record or slot.id in self._damaged:
            return
        self._damaged.add(slot.id)
        if slot.frozen is not None:
            self._doubt(slot.frozen)
        self.services.metrics.quarantined(self.job, "memory")
        self.services.health.event("damage", f"slot {slot.id}: {reason}", job=self.job)
        self.feed(ev.SlotDamaged(slot.id, reason))

    def _doubt(self, frozen: Slot) -> None:
        """The damage may lie in what others lean on: they are looked at, and the next snapshot gets a new copy."""
        self.frozen.distrust(frozen)
        self.local_slots.forget_frozen(frozen)
        for slot in self.all_slots():
            if slot.frozen is frozen and slot.id not in self._damaged:
                self.services.fetcher.look(self.job, slot)

    def busy(self) -> bool:
        """Somebody sits here, or stands at restore()."""
        all_slots = self.local_slots.by_rank.values()
        return any(own.session is not None for own in all_slots) or self.machine.joining.join is not None

    def drop(self) -> None:
        """The job is over: all its memory goes."""
        self.dropped = True
        self.losses.close()
        self.reads.drop()
        self._queue.clear()
        self.durable.cancel_all()
        self.local_slots.drop_all()
        for slot in self.slots.values():
            self.services.arena.retire(slot)
        self.slots.clear()
        self.frozen.drop_all()

    def _send(self, do: ins.Send) -> None:
        if do.to == self.services.node.node:
            asyncio.get_running_loop().call_soon(self.feed, ev.Received(do.to, do.message))
        else:
            self.services.send(do.to, self.job, do.message)

    def _compute(self, do: ins.Compute) -> None:
        self.services.spawn(self._computed(do, self.machine), f"compute for {self.job}")

    async def _computed(self, do: ins.Compute, machine: JobMachine) -> None:
        try:
            done = ev.Computed(do.number, await self.services.in_work(do.call))
        except Exception as error:
            done = ev.Computed(do.number, None, error)
        if self.machine is machine:
            self.feed(done)

    def _connect(self, do: ins.Connect) -> None:
        for node in do.nodes:
            if node.node != self.services.node.node:
                self.services.connect(node, self.job)

    def _persist_epoch(self, do: ins.PersistEpoch) -> None:
        self.record, self.ran = do.record, do.ran
        failpoint("epoch.entered")
        self._write_epoch()
        failpoint("epoch.persisted")
        self.ranks.begin()
        self.meter.begin()
        parent = do.record.parent
        log.info(
            "job=%s epoch=%d opened: %d ranks on %s, %s", self.job, do.record.number, do.record.world,
            " ".join(node.node for node in do.record.nodes),
            f"from {parent}" if parent is not None else "from the beginning",
        )  # fmt: skip
        here = frozenset(rank for rank, node in enumerate(do.record.ranks) if node == self.services.node.node)
        asyncio.get_running_loop().call_soon(self.local_slots.release_unused, here)

    def _persist_sealed(self, do: ins.PersistSealed) -> None:
        self._sealed = do.epoch
        if self.record is not None:
            self._write_epoch()

    def _persist_life(self, do: ins.PersistLife) -> None:
        self.life, self._life_since = do.state, self.services.wall() - do.age_s
        log.info("job=%s is %s", self.job, do.state)
        self._write_epoch()

    def _write_epoch(self) -> None:
        """A state directory that cannot be written does not stop training: a restart of this daemon might then take an older
        epoch for the newest, so health says it until a later try succeeds."""
        assert self.record is not None, "there is one to write down"
        try:
            self.services.state.persist_job(self.job, Kept(self.record, self.ran, self.life, self._life_since, self._sealed))
            self._unwritten_at = None
            self.services.health.clear("state", job=self.job)
        except OSError as error:
            self._unwritten_at = self.services.now()
            text = f"epoch {self.record.number} is not written down: {error} [{self.services.state.path}]"
            self.services.health.report("state", text, job=self.job)

    def _tell_level(self, do: ins.TellLevel) -> None:
        before = self.levels.get(do.snapshot)
        self.levels[do.snapshot] = do
        held = self.machine.slots.sealed
        forget_oldest(self.levels, LEVELS_KEPT_MAX, lambda it: self.record is not None and self.record.is_candidate(it), held)
        self._count_level(before, do)
        if do.durable:
            self.durable.read_back.committed(do.snapshot)
        failpoint("level.certified")
        if do.level >= 0 and not do.void:
            self.services.health.clear("nothing_sealed", job=self.job)  # it was about a start before this one
        if not do.void and do.level >= do.wanted and do.snapshot == max(self.levels):
            for kind in ("degraded", "breakpoint"):
                self.services.health.clear(kind, job=self.job)
            if self.services.health.has("degradation", job=self.job) and not self.machine.view()["degradation"]:
                self.services.health.clear("degradation", job=self.job)
        self.ranks.tell_level(do)
        tell_own_values(self.local_slots, own_values(self.machine, do.snapshot))
        self.meter.told(do)

    def _count_level(self, before: ins.TellLevel | None, now: ins.TellLevel) -> None:
        metrics = self.services.metrics
        if now.void:
            if before is None or not before.void:
                metrics.voided(self.job, now.void)
                self.losses.lost("void", now.snapshot.step, now.void)
            return
        old_level = before.level if before else -1
        if old_level < 0 <= now.level:
            metrics.reached(self.job, "sealed")
        if old_level < max(now.wanted, 1) <= now.level:
            metrics.reached(self.job, "protected")
        if now.durable and not (before and before.durable):
            metrics.reached(self.job, "durable")
        safe = now.durable or now.level >= max(now.wanted, 0)
        if safe and now.snapshot > self.safe_point:
            self.safe_point = now.snapshot
            metrics.recovery_point(
                self.job, self.ranks.captured_at.get(now.snapshot.step, self.services.wall())
            )

    def _free_slot(self, do: ins.FreeSlot) -> None:
        failpoint("slot.release")
        self._damaged.discard(do.slot)
        if do.slot in self.local_slots.slots:
            self.local_slots.freed(do.slot)
            return
        slot = self.slots.pop(do.slot, None)
        if slot is not None:
            self.services.arena.release(slot)
            asyncio.get_running_loop().call_soon(self.frozen.tidy)
            asyncio.get_running_loop().call_soon(self.local_slots.grow)

    def _replicate(self, do: ins.Replicate) -> None:
        self.services.spawn(self._replicate_task(do), f"replicate {self.job} {do.snapshot} to {do.to}")

    async def _replicate_task(self, do: ins.Replicate) -> None:
        slot = self.slot(do.slot)
        record = slot.record if slot is not None else None
        ok, reason = False, "slot is gone"
        if slot is not None and record is not None and record.snapshot == do.snapshot:
            started, count = self.services.now(), record.layout.live_bytes(do.tier)
            try:
                within_s = self.ranks.within_s()
                ok, reason = await self.services.replicator.replicate(
                    self.job, slot, do.tier, do.to, within_s
                )
            except Exception as error:  # the machine waits for an answer before it sends it again
                reason = f"internal: {error!r}"
                self.services.went_wrong(f"replicate {self.job} {do.snapshot}", error, self.job)
            if ok:
                seconds = self.services.now() - started
                self.services.metrics.replicated(self.job, seconds, count)
                self.meter.replicated(count, seconds)
            elif reason == DAMAGE:
                self.damaged(slot, record, "found while sending it to a peer")
        self.feed(ev.ReplicaSent(do.snapshot, do.rank, do.tier, do.to, ok, reason))

    def _alarm(self, do: ins.Alarm) -> None:
        if do.kind == "degradation" and self.machine.lifetime.life.over:
            self.services.health.clear("degradation", job=self.job)
            return  # it tries a higher level once a minute, and nothing is captured that could want it; status has the level
        if do.kind == "flush":  # said of each try, with the step before it and the try's own place behind it
            self.losses.failed("alarm=flush", do.text.partition(": ")[2].partition(" [")[0], do.text)
        else:
            log.log(ALARM_LEVELS.get(do.kind, logging.WARNING), "job=%s alarm=%s %s", self.job, do.kind, do.text)
        self.services.metrics.alarm(self.job, do.kind)
        self.services.health.event(do.kind, do.text, job=self.job, serious=do.kind != "breakpoint")

    def summary(self) -> JobReport:
        return summary(self)
