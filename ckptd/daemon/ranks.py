"""The local ranks of one job: their messages become events, the machine's words to them become messages."""

from __future__ import annotations

import asyncio
import os
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ckptd.arena.arena import MetaTooLarge, Slot, SlotRecord
from ckptd.arena.slot import frozen_first
from ckptd.arena.sums import digests, live_sums
from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.pacing.steptimes import Cadence
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.messages import RestoreAsk
from ckptd.core.protocol.written import checked
from ckptd.core.state_map.layout import Layout
from ckptd.daemon.local_slots import RankSlots
from ckptd.daemon.losses import UNUSED
from ckptd.daemon.meter import check_seconds
from ckptd.daemon.services import Services, log
from ckptd.identity import NODE_ID_PATTERN
from ckptd.observe.sight import Sight
from ckptd.wire import rank as wire
from ckptd.wire.rank_link import RankSession
from ckptd.wire.seqpacket import read_memfd_object
from ckptd.wire.world import WORLD_BYTES_MAX
from ckptd.wire.world_check import unpack_world

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

NODE_ID = "node_id"  # what health calls a rank that trains as one of another node
OF_A_START = "begins_anew"  # the alarm that is about one start of the job alone
CAPTURES_KEPT_MAX = 256
GRANTS_PER_RANK_MAX = 256  # remembered with the session they went to
WORLD_READ_AT_ONCE_BYTES_MAX = 64 * 1024  # a world of some hundred nodes
HEALTH_PROBLEMS_MAX = 64  # of one answer, so that it fits a frame
HEALTH_TEXT_CHARS_MAX = 400  # of one problem
STEPS_TOLD_MAX = 400  # the newest, so that they fit a frame
HEALTH_ROWS_MAX = 64  # nodes, and ranks of this one, in one answer
LAYOUTS_PER_RANK_MAX = 16  # remembered per connection; a trainer whose layout changes each step sends it each time
LAYOUTS_AT_ONCE_MAX = 4  # of a rank, that are not read yet
LAYOUT_BYTES_MAX, LAYOUTS_BYTES_MAX = 32 << 20, 64 << 20  # of one, and of those that are remembered of a rank


class Ranks:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self.progress: dict[int, int] = {}  # rank -> newest step called
        self.captured_at: dict[int, float] = {}  # step -> unix time at which a local rank handed it over
        self._newest = -1  # of progress, in this epoch
        self.cadence = Cadence()
        self.sealing: set[int] = set()  # slots whose sums are being made
        self._joining: set[RankSession] = set()  # whose world is being read

    def begin(self) -> None:
        """A new epoch: how far ranks were in the one before says nothing."""
        self.progress.clear()
        self._newest = -1
        self.cadence = Cadence()
        self._services.pacer.forget(f"{self._job.job}/")

    def on_message(self, session: RankSession, message: Any, fds: list[int]) -> None:
        """One frame of a rank. Raises ValueError for what a well-meaning client never sends; the link then closes it."""
        if isinstance(message, wire.Join):
            self._join(session, message, fds)
            return
        own = self._job.local_slots.of_session(session)
        if isinstance(message, wire.Look) or self._job.reads.knows(session):
            self._job.reads.on_message(session, message, fds)
        elif isinstance(message, wire.ListSteps):
            self._services.spawn(self._list_steps(session, message.request), f"steps {self._job.job}")
        elif isinstance(message, wire.AskHealth):
            self._tell_health(session, message.request)
        elif isinstance(message, wire.Release):
            self._job.keeping.on_ask(session, message)
        elif isinstance(message, wire.Offer):
            self._take_offer(session, dict(zip(message.segments, fds, strict=False)))
        elif isinstance(message, wire.Goodbye) or own is not None:
            self._from_seat(session, own, message, fds)

    def _from_seat(self, session: RankSession, own: RankSlots | None, message: Any, fds: list[int]) -> None:
        feed = self._job.feed
        if isinstance(message, wire.Goodbye):
            self._goodbye(session, message)
        elif own is None:
            return
        elif isinstance(message, wire.Called):
            self._called(own, message)
            feed(ev.RankProgress(own.rank, message.step, message.asks))
        elif isinstance(message, wire.SealedSlot):
            self._sealed(session, own, message, fds)
        elif isinstance(message, wire.GaveUp):
            self._lost("given up", message)
            written = checked(message.written)
            feed(ev.RankMissed(own.rank, message.grant, message.reason, None, written))
        elif isinstance(message, wire.Resize):
            self._job.local_slots.resize(own, message.state_bytes, message.frozen_bytes, message.record_bytes)
        elif isinstance(message, wire.Skipped):
            self._lost("skipped", message)
        elif isinstance(message, wire.WaitFor):
            self._services.pacer.waits()
            feed(ev.LevelAsked(message.step, message.grant))
            if message.level == "durable":
                feed(ev.FlushAsked(message.step))
        else:
            self._job.restore.on_message(session, own, message, fds)

    def _lost(self, what: str, message: wire.Skipped | wire.GaveUp) -> None:
        if message.reason not in UNUSED:
            self._services.metrics.skipped(self._job.job, message.reason)
            self._job.losses.lost(what, message.step, message.reason)

    def _called(self, own: RankSlots, message: wire.Called) -> None:
        """Raises ValueError for step times that are none."""
        if message.step > self.progress.get(own.rank, -1):
            self._services.pacer.trains()
        self.progress[own.rank] = message.step
        if message.step > self._newest:  # ranks of one node may be a step apart, and say a step again
            self._newest = message.step
            self.cadence.called(message.step, self._services.now())
            self._job.meter.stepped(message.step)
        if message.times:
            self._services.pacer.stepped(self._name(own), message.times, message.spans or ())

    def _name(self, own: RankSlots) -> str:
        """Of the rank, on this node."""
        return f"{self._job.job}/{own.rank}"

    def within_s(self) -> float:
        """How soon a copy must be made: before the next captures that the job asks for have used up the rank's own slots."""
        seconds, config = self.cadence.seconds, self._services.config
        soon = config.pacing_deadline_s if seconds is None else (config.own_slots - 1) * seconds
        return min(config.pacing_deadline_s, soon)

    def _take_offer(self, session: RankSession, fds: dict[str, int]) -> None:
        """A daemon without a keeper lost its memory; the trainer still maps it and gives it back (D1, P7)."""
        arena = self._services.arena
        offered = arena.take_offer(
            fds, job=self._job.job, uid=self._job.uid, process=session.process, refused=self._offer_refused
        )
        for slot in frozen_first(offered):
            if slot.id not in self._job.local_slots.slots and slot.id not in self._job.frozen.slots:
                self._job.adopt(slot)

    def _offer_refused(self, name: str, error: Exception) -> None:
        self._services.complaints.say(f"uid {self._job.uid}", f"segment {name} is refused: {error}")

    # --- joining and leaving ------------------------------------------------------------------------------------
    def _join(self, session: RankSession, message: wire.Join, fds: list[int]) -> None:
        """Raises ValueError for what no rank of this node says."""
        if not fds:
            raise ValueError("join without a world")
        if os.fstat(fds[0]).st_size <= WORLD_READ_AT_ONCE_BYTES_MAX:
            world = read_memfd_object(fds[0], WORLD_READ_AT_ONCE_BYTES_MAX)
            self._joined(session, message, self._read_join(message, world))
            return
        if session in self._joining:
            raise ValueError("a join beside another")
        self._joining.add(session)
        self._services.spawn(self._join_apart(session, message, os.dup(fds[0])), f"join {self._job.job}")

    async def _join_apart(self, session: RankSession, message: wire.Join, fd: int) -> None:
        """A large world is read in a thread, as the event loop is everybody's. Takes ``fd``."""
        try:
            read = partial(self._read_join, message)
            joined = await self._services.read_object(self._job.uid, fd, WORLD_BYTES_MAX, read)
            if not session.closed:
                self._joined(session, message, joined)
        except (ValueError, OSError) as error:  # it comes back, and says the same again
            session.garbage(error)
        finally:
            self._joining.discard(session)

    def _joined(self, session: RankSession, message: wire.Join, joined: ev.RankJoined) -> None:
        if (node := joined.ranks[message.rank]) != self._services.node.node:
            self._turn_away(session, message.rank, node)
            return
        self._services.health.clear(NODE_ID, job=self._job.job)
        record = self._job.record
        running = record if self._job.machine.ctx.trained_in(message.attempt) else None
        if running is not None and running.ranks != joined.ranks:
            raise ValueError("the same attempt with another world")
        old = self._job.local_slots.by_rank.get(message.rank)
        if old is not None and old.session is not None and old.session is not session:
            # It loses its rank now, before the next epoch is open and can be named.
            old.session.send(wire.Superseded(1 + (record.number if record is not None else 0)))
        if old is not None and old.process is not None and not old.process.same(session.process):
            self._left(old)  # nothing that it still says can be told from what its successor says
        sizes = message.state_bytes, message.frozen_bytes, message.record_bytes
        self._job.local_slots.attach(message.rank, session, *sizes)
        if running is None:
            self._job.restore.joining(message.rank, message.attempt)
            self._services.health.clear(OF_A_START, job=self._job.job)  # it was another one's
        self._job.feed(joined)
        if running is not None:
            session.send(wire.Ready(running.number))

    @staticmethod
    def _read_join(message: wire.Join, world: bytes) -> ev.RankJoined:
        """Raises ValueError for what no rank of this node says."""
        ranks, nodes = unpack_world(world)
        try:
            ask = None if message.ask is None else msgspec.convert(message.ask, RestoreAsk)
        except msgspec.ValidationError as error:  # which is no ValueError
            raise ValueError(f"join: {error}") from error
        if not 0 <= message.rank < len(ranks):
            raise ValueError(f"there is no rank {message.rank} in a world of {len(ranks)}")
        if not 0 <= message.grant <= wire.GRANT_MAX:
            raise ValueError(f"there is no grant {message.grant}")
        if {node.node for node in nodes} != set(ranks):
            raise ValueError("nodes and ranks of the join do not name the same daemons")
        return ev.RankJoined(message.rank, message.attempt, ranks, nodes, ask, trains=message.trains, grant=message.grant)

    def _turn_away(self, session: RankSession, rank: int, node: str) -> None:
        """The others of its job ask for ``node``, which we are not. Raises ValueError where none can have that name."""
        if not re.fullmatch(NODE_ID_PATTERN, node):
            raise ValueError("join of a rank on a node without a name")
        what = f"rank {rank} was started on node {node}, this daemon is node {self._services.node.node}: its state_dir "
        what += "was lost, or is another one"
        error = CkptdError(what, hint=f"start the trainer again, or this daemon with --node-id {node}")
        if self._services.health.event(NODE_ID, str(error), job=self._job.job):
            log.warning("job=%s %s", self._job.job, error)
        session.send(wire.Refused(error.what, hint=error.hint))

    def _goodbye(self, session: RankSession, message: wire.Goodbye) -> None:
        own = self._job.local_slots.detach(session)
        if own is None:
            return
        self._services.pacer.forget(self._name(own))
        self._left(own, True, message.finished)

    def on_close(self, session: RankSession, reason: str) -> None:
        """``dead``: the process is gone (pidfd). Anything else may come back, its memory stays as it is."""
        self._job.reads.gone(session)
        own = self._job.local_slots.detach(session)
        if own is None:
            return
        self._services.pacer.forget(self._name(own))
        if reason == "dead" or not session.alive:
            self._left(own)
        else:
            self._job.local_slots.watch(own, session.process, lambda: self._left(own))

    def _left(self, own: RankSlots, clean: bool = False, finished: bool = False) -> None:
        """Once for each process."""
        own.process = None
        self._job.feed(ev.RankLeft(own.rank, clean, finished))

    # --- snapshots ----------------------------------------------------------------------------------------------
    def _sealed(self, session: RankSession, own: RankSlots, message: wire.SealedSlot, fds: list[int]) -> None:
        """Raises ValueError for seconds that are none."""
        check_seconds(message.capture_s, message.blocked_s)
        slot = own.slots.get(message.slot)
        if slot is None or slot.id in self.sealing:
            self._job.feed(ev.RankMissed(own.rank, message.grant, "its slot is gone", message.step))
            return
        if fds and not self._take_layout(own, slot, message, fds[0]):
            return
        if message.frozen >= 0:
            try:
                self._job.frozen.hold(slot, own.rank, message.frozen)  # a wish for another one may be the next message
            except ValueError as error:
                self._missed(own, slot, message, f"seal failed: {error}")
                return
        self.captured_at[message.step] = self._services.wall()
        while len(self.captured_at) > CAPTURES_KEPT_MAX:
            del self.captured_at[next(iter(self.captured_at))]
        self.sealing.add(slot.id)
        self._services.metrics.captured(self._job.job, message.capture_s, message.blocked_s)
        name = f"seal {self._job.job} step {message.step}"
        self._services.spawn(self._seal(own, slot, message, self._job.record), name)

    def _take_layout(self, own: RankSlots, slot: Slot, message: wire.SealedSlot, fd: int) -> bool:
        """False: it is missed, as no rank has so many new layouts at once."""
        if sum(not reading.done() for reading in own.layouts.values()) >= LAYOUTS_AT_ONCE_MAX:
            self._missed(own, slot, message, "too many layouts at once")
            return False
        own.layouts[message.layout_id] = self._services.read_layout(self._job.uid, os.dup(fd), LAYOUT_BYTES_MAX)
        while len(own.layouts) > LAYOUTS_PER_RANK_MAX or _kept_bytes(own) > LAYOUTS_BYTES_MAX:
            own.layouts.pop(next(iter(own.layouts)))
        return True

    async def _seal(
        self, own: RankSlots, slot: Slot, message: wire.SealedSlot, record: EpochRecord | None
    ) -> None:
        """``record``: the epoch it was captured in."""
        started = self._services.now()
        try:
            layout = await self._layout_of(own, slot, message)
            frozen = b""
            if layout.frozen_bytes:
                frozen = await self._job.frozen.support(slot, own.rank, message.frozen, layout)
            number = record.number if record is not None else 0
            sealed = await self._services.in_work(self._make_record, slot, layout, frozen, message, number)
        except MetaTooLarge as error:
            self._job.local_slots.resize(own, own.state_bytes, record_bytes=error.needed)
            text = f"record too large: {error.needed} bytes, the slot has room for {error.capacity}; larger slots are made"
            self._missed(own, slot, message, text)
        except (CkptdError, ValueError) as error:  # the layout stays known: its rank does not send it again
            self._missed(own, slot, message, f"seal failed: {error}")
        except Exception as error:  # the machine keeps the slot until it has an answer
            self._services.went_wrong(f"seal {self._job.job} step {message.step}", error, self._job.job)
            self._missed(own, slot, message, "seal failed: internal")
        else:
            if self._job.record is not record:
                self._missed(own, slot, message, "a newer epoch opened")
                return
            self.sealing.discard(slot.id)
            seconds = self._services.now() - started
            self._services.metrics.sealed(self._job.job, seconds, layout.frozen_at)
            self._job.meter.captured(layout.frozen_at, message.capture_s, seconds)
            facts = layout, sealed.digests, message.keep, message.came_at
            self._job.feed(ev.SlotSealed(own.rank, slot.id, message.grant, message.step, *facts))

    def _missed(self, own: RankSlots, slot: Slot, message: wire.SealedSlot, reason: str) -> None:
        self.sealing.discard(slot.id)
        self._job.feed(ev.RankMissed(own.rank, message.grant, reason, message.step))

    async def _layout_of(self, own: RankSlots, slot: Slot, message: wire.SealedSlot) -> Layout:
        """Raises ValueError: this cannot be what lies in the slot."""
        decoding = own.layouts.get(message.layout_id)
        if decoding is None:
            raise ValueError("layout unknown")
        try:
            layout = await asyncio.shield(decoding)
        except ValueError as error:
            text = f"no snapshot of rank {own.rank} can be taken: {error}; a trainer whose ckptd is newer needs a daemon as new"
            self._services.health.event("layout", text, job=self._job.job)
            raise
        if layout.layout_id != message.layout_id or layout.rank != own.rank:
            raise ValueError("layout does not match its id or rank")
        if layout.is_frozen or layout.frozen_at > slot.capacity or message.objects_bytes > layout.objects_capacity:
            raise ValueError("layout larger than its slot")
        return layout

    def _make_record(
        self, slot: Slot, layout: Layout, frozen_sums: bytes, message: wire.SealedSlot, epoch: int
    ) -> SlotRecord:
        failpoint("seal.begin")
        sums = live_sums(slot.extent, layout) + frozen_sums
        failpoint("seal.summed")
        record = SlotRecord(
            job=self._job.job,
            snapshot=SnapshotId(epoch, message.step, message.grant),
            rank=layout.rank,
            tier=0,
            layout=layout,
            objects_bytes=message.objects_bytes,
            sums=sums,
            digests=digests(layout, sums, slot.extent, message.objects_bytes),
            keep=message.keep,
        )
        slot.seal(record)
        failpoint("seal.written")
        return record

    # --- words to the ranks -------------------------------------------------------------------------------------
    def give_slot(self, do: ins.GiveSlot) -> None:
        own = self._job.local_slots.by_rank.get(do.rank)
        slot = own.slots.get(do.slot) if own else None
        if own is None or slot is None or own.session is None:
            self._job.feed(ev.RankMissed(do.rank, do.grant, ev.NOT_HERE))
            return
        if not self._job.local_slots.usable(do.slot, own.session):  # it goes after this batch
            self._job.feed(ev.RankMissed(do.rank, do.grant, ev.OTHER_MAPPER))
            return
        if do.slot in self.sealing:  # of a capture given up: its sums must not see a new one's bytes
            self._job.feed(ev.RankMissed(do.rank, do.grant, ev.STILL_READ))
            return
        own.free.discard(do.slot)
        if slot.record is not None:  # sealed after the machine had given it up
            slot.free()
        slot.fill(do.grant)
        own.granted[do.grant] = own.session
        while len(own.granted) > GRANTS_PER_RANK_MAX:
            own.granted.pop(next(iter(own.granted)))
        failpoint("grant.given")
        own.session.send(wire.GrantSlot(do.slot, do.grant, do.from_step))

    def take_back(self, do: ins.TakeBack) -> None:
        """Only who was given the slot can say that it is not being filled any more. When another process sits in the
        rank now, nothing of the grant comes back: the slot is retired, its old mapper cannot reach anybody's data."""
        own = self._job.local_slots.by_rank.get(do.rank)
        if own is None or own.session is None:
            self._job.feed(ev.RankMissed(do.rank, do.grant, ev.NOT_HERE))
        elif own.granted.get(do.grant) is not own.session:
            self._job.feed(ev.RankMissed(do.rank, do.grant, "another process has the rank's place"))
        else:
            own.session.send(wire.TakeBack(do.grant, do.reason))

    def tell_written(self, do: ins.TellWritten) -> None:
        said = wire.WrittenThere(do.grant, {owner: list(keys) for owner, keys in do.written.items()})
        for own in self._job.local_slots.by_rank.values():
            if own.session is not None:
                own.session.send(said)

    def supersede(self, do: ins.Supersede) -> None:
        own = self._job.local_slots.by_rank.get(do.rank)
        if own is not None and own.session is not None:
            own.session.send(wire.Superseded(do.epoch))

    def tell_level(self, do: ins.TellLevel) -> None:
        of = do.snapshot
        note = wire.Level(of.epoch, of.step, of.grant, do.level, do.wanted, do.durable, do.void)
        for own in self._job.local_slots.by_rank.values():
            if own.session is not None:
                own.session.send(note)

    async def _list_steps(self, session: RankSession, request: int) -> None:
        rows = await self._job.durable.steps()
        session.send(wire.Steps(request, rows[:STEPS_TOLD_MAX]))

    def _tell_health(self, session: RankSession, request: int) -> None:
        sight = Sight(uid=session.uid)
        known = self._services.health.problems(sight)
        problems = [problem.text for problem in known if problem.job in ("", self._job.job)]
        ok = self._services.health.seems_ok(sight)
        facts: dict[str, Any] = dict(self._job.summary())
        for name in ("nodes", "ranks"):  # a large job's do not fit a frame
            facts[f"{name}_total"] = len(facts[name])
            facts[name] = facts[name][:HEALTH_ROWS_MAX]
        told = [text[:HEALTH_TEXT_CHARS_MAX] for text in problems[:HEALTH_PROBLEMS_MAX]]
        session.send(wire.Health(request, ok, told, facts))


def _kept_bytes(own: RankSlots) -> int:
    """Of its layouts, as they are encoded."""
    done = (reading for reading in own.layouts.values() if reading.done() and not reading.cancelled())
    return sum(len(reading.result().encoded) for reading in done if reading.exception() is None)
