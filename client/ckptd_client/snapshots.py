"""snapshot(): take the grant, copy what cannot wait, leave the rest to the engine (design D6, D9). Never raises (P5)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import msgpack
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.protocol.events import NO_MEMORY
from ckptd.core.protocol.machine.waiting import FOR_A_PEER, FOR_A_RANK, FOR_STORAGE, NO_STEWARD, shown
from ckptd.core.protocol.written import bounded
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import memfd_object
from ckptd_client import complete, fence, gradients, libc, modules, resolve, tree
from ckptd_client.again import Captured, Look, hashes, look_at
from ckptd_client.attributes import Attributes
from ckptd_client.capture import INTERRUPTED, Engine
from ckptd_client.entries import State
from ckptd_client.frozen import FrozenCapture, FrozenSlot
from ckptd_client.garbage import searched_later
from ckptd_client.gather import gather
from ckptd_client.gradients import Accumulation
from ckptd_client.grants import Grant
from ckptd_client.handles import Handle, Outgrown, Skip, Thawed
from ckptd_client.interrupts import by_a_signal
from ckptd_client.job import NAMED_MAX, Job
from ckptd_client.joining import Joiner
from ckptd_client.plan import Plan, make_plan
from ckptd_client.progress import Progress
from ckptd_client.races import Races
from ckptd_client.recall import Recall
from ckptd_client.registry import Registry
from ckptd_client.segments import SlotView
from ckptd_client.session import IDLE, READY, SILENT, SUPERSEDED, TAKEN_BACK, Session
from ckptd_client.tree import ForeignType
from ckptd_client.troubles import Troubles, brief
from ckptd_client.versions import Seen, Versions
from ckptd_client.world import World

log = logging.getLogger("ckptd")
AUDIT_TIMEOUT_S = 30.0
KEPT_MAX = 256  # of these steps, the newest are remembered
LARGER_EVERY_S = 0.1  # a slot that is too small may be granted a few times until it is gone
LASTING_S = 5.0  # what keeps snapshots from being granted for less is no trouble
OBSTACLES = (NO_STEWARD, FOR_A_PEER, FOR_A_RANK, FOR_STORAGE, SILENT)
RECOVERED = ("fence", "type", "memory", "waiting", "fresh", "capture", "order", "start")  # a good snapshot ends these
AGAIN = "captured before"  # the kind of trouble
REFUSED = "restore() has failed: call it again, on all ranks; with allow_fresh=True where the job is to begin anew"


class Found(NamedTuple):
    """``tensors``: of the plan's entries. ``packed``: the objects, ``objects`` their hashes."""

    tensors: Sequence[Tensor]
    packed: bytes
    plan: Plan
    hanging: int  # so many entries lie in no user object
    objects: dict[str, int]

    def look(self) -> Look:
        plan, hanging = self.plan, self.hanging
        sharded, placed = ([at for at in which if at < hanging] for which in (plan.sharded, plan.of_models))
        return Look(Seen(plan.keys[:hanging], self.tensors[:hanging], sharded, placed), self.objects)


class Snapshots:
    def __init__(
        self, session: Session, engine: Engine, registry: Registry, joiner: Joiner, troubles: Troubles,
        must_timeout_s: float,
    ) -> None:  # fmt: skip
        self._session, self._engine, self._registry = session, engine, registry
        self._joiner, self._troubles, self._must_timeout_s = joiner, troubles, must_timeout_s
        self._frozen = FrozenCapture(session, engine, troubles)
        self._plan: Plan | None = None
        self._recall: Recall | None = None
        self._accumulation = Accumulation(session.job)
        self._attributes = Attributes(session.job)
        self._races = Races()
        self._captured: Captured | None = None  # the newest one
        self.kept: dict[int, int] = {}  # steps captured with keep=True, and not released since -> their epoch
        self._taken = 0  # snapshots captured so far
        self._restored = -1  # the step that training went on from
        self.restore_failed = False  # and what the job has must not be left behind for that
        self._doubt = False  # the newest void was for writes past the fence: there may be others
        self.progress = Progress(registry, troubles)

    def begin_anew(self, state: State, step: int | None) -> None:
        """After a restore of ``state`` as of ``step``: whatever step comes first may be captured."""
        self._restored, self.restore_failed = -1 if step is None else step, False
        self.kept.clear()
        self._registry.began = True
        self.progress.begin_anew()
        self._accumulation.sample(state)
        self._accumulation.used()
        self._recall = None
        self._engine.statics.doubt()

    @property
    def is_open(self) -> bool:
        """Is the state still that of the step called last?"""
        return self._session.step_is_open and (self._registry.bare or not self.progress.left)

    # --- the call -----------------------------------------------------------------------------------------------
    def take(
        self, handle: Handle, meta: dict[str, Any], *, keep: bool, must: bool, wait_s: float | None = None
    ) -> None:
        """Fills in the handle. Whatever goes wrong ends as its status. ``wait_s``: for must, less than the client's own
        bound."""
        patience_s = min(self._must_timeout_s, self._must_timeout_s if wait_s is None else wait_s)
        deadline = time.monotonic() + (patience_s if must else 0.0)
        before = self._session.grants.taken
        try:
            self._take(handle, meta, keep, must, deadline)
        except BaseException:  # Ctrl-C, or what a signal handler raises
            number, step = self._session.grants.taken
            if (number, step) != before and step == handle.step:
                self._interrupted(handle, number)
            raise

    def _interrupted(self, handle: Handle, grant: int) -> None:
        """Nobody gets the handle. The grant is answered, so that its slot is free again: by the end of the capture, where that has
        begun."""
        if self._engine.newest == grant:
            self._engine.stop(grant, INTERRUPTED)
        else:
            self._lost(handle, f"failed: {INTERRUPTED}")
            self._session.give_up(grant, handle.step, INTERRUPTED)

    def _take(self, handle: Handle, meta: dict[str, Any], keep: bool, must: bool, deadline: float) -> None:
        grant: Grant | None = None
        try:
            with self._failing(handle):
                while True:
                    grant = None
                    grant, slot = self._grant(handle.step, must or keep, must, deadline)
                    try:
                        failpoint("capture.granted")
                        try:
                            self._capture(handle, grant, slot, meta, keep, deadline)
                        except Thawed:  # the state is still that of this call
                            self._capture(handle, grant, slot, meta, keep, deadline)
                        return
                    except Outgrown as reason:
                        if not must or time.monotonic() >= deadline:
                            raise
                        self._session.give_up(grant.number, handle.step, str(reason))
                        self._session.wait(lambda: not self._session.outgrown, min(deadline, time.monotonic() + LARGER_EVERY_S))
                    finally:
                        slot.segment.unpin()
        except Skip as reason:
            self._lost(handle, f"skipped: {reason}")
            if isinstance(reason, Outgrown):
                self._troubles.report("memory", f"snapshot {handle.step} is skipped: {reason}")
            if grant is None:
                self._session.link.send_or_drop(wire.Skipped(handle.step, str(reason)))
        if grant is not None:
            self._session.link.send(wire.GaveUp(grant.number, handle.step, brief(handle.status)))

    @contextmanager
    def _failing(self, handle: Handle) -> Iterator[None]:
        """Whatever goes wrong within ends as the handle's status."""
        try:
            yield
        except Skip:
            raise
        except ForeignType as error:
            self._lost(handle, f"failed: type: {error}")
            self._troubles.report("type", f"snapshot {handle.step} failed: {error}")
        except CkptdError as error:
            self._lost(handle, f"failed: {error.what}" + (f" [{error.where}]" if error.where else ""))
            self._troubles.report("capture", f"snapshot {handle.step} failed: {error}")
        except Exception as error:
            if by_a_signal(error):
                raise
            self._lost(handle, f"failed: {type(error).__name__}: {error}")
            self._troubles.report("capture", f"snapshot {handle.step} failed: {error}")
            log.exception("ckptd client: snapshot %d", handle.step)

    def changed(self, handle: Handle) -> bool:
        """Its step was captured before: is what is registered another by now, as far as steps, counters and saved values tell? Then
        the handle says so."""
        with self._failing(handle):
            what = self._since()
            if what:
                remedy = f"give what is there now a later step: snapshot({handle.step + 1}, must=True)"
                self._refuse(handle, f"and the state has changed since: {what}; {remedy}")
        return not handle.taken

    def since(self, handle: Handle) -> str:
        """What has changed since that capture, the newest one, as ``changed`` sees it; "": nothing."""
        probe = Handle(handle.step, "capturing", handle._wait)
        what = "an optimizer has stepped"
        with self._failing(probe):
            what = self._since() if self.is_open else what
        return what if probe.taken else probe.status

    def _since(self) -> str:
        if self._registry.bare:  # it is of what it was given
            return ""
        if self.progress.stepped_since:
            return "an optimizer has stepped, or a graph may have"
        return "" if self._captured is None else shown(self._captured.look.other_in(look_at(self._registry)))

    def lacks(self, handle: Handle, meta: dict[str, Any], keep: bool) -> bool:
        """The same state; does this call ask for what that snapshot has not? Then the handle says so."""
        with self._failing(handle):
            packed = tree.encode(meta, "meta") if meta else None
            lacking = ["keep="] * (keep and handle.step not in self.kept)
            lacking += self._captured.lacks(packed) if self._captured is not None else []
            if lacking:
                remedy = f"say it in the first call, or with a later step: snapshot({handle.step + 1}, ..., must=True)"
                mark = ", or put an empty file keep beside its manifest.json on storage" if "keep=" in lacking else ""
                self._refuse(handle, f"without this: {' and '.join(lacking)}; {remedy}{mark}")
        return not handle.taken

    def _refuse(self, handle: Handle, why: str) -> None:
        self._lost(handle, f"failed: captured before under this step, {why}")
        self._troubles.report(AGAIN, f"snapshot {handle.step} is {handle.status}")

    def _lost(self, handle: Handle, status: str) -> None:
        handle.became(status)
        self._troubles.lost(handle.step, status)

    def _grant(self, step: int, forced: bool, asks: bool, deadline: float) -> tuple[Grant, SlotView]:
        """The slot comes pinned. Raises Skip."""
        session = self._session
        if step < session.called:
            self._troubles.report(
                "order", f"snapshot({step}) after snapshot({session.called}): steps must grow"
            )
            raise CkptdError(f"step went backwards from {session.called}")
        if step < self._restored:
            text = f"snapshot({step}) after restore() of step {self._restored}: the job goes on from step {step} now, and its next"
            self._troubles.pass_on(f"{text} restore() brings that; count on from what restore() returned", "")
        self._check_progress(step, forced)
        if asks:
            session.wait_back(deadline)
        session.call(step, fence.steps(), asks=asks)  # also without a daemon: wait() answers for no older step then
        self._check_ready(step, deadline if asks else None)
        grant = session.take(step, max(0.0, deadline - time.monotonic()))
        if grant is None:
            if asks:  # Until it hears otherwise the steward grants this very step, and nothing beyond it.
                session.link.send_or_drop(wire.Called(step))
            reason, seconds = session.not_granted(step)
            self._report_waiting(step, reason, seconds)
            raise Skip(reason)
        with session.changed:
            slot = session.segments.slots.get(grant.slot)
            if slot is not None:
                slot.segment.pin()
        if slot is None:
            session.link.send(wire.GaveUp(grant.number, step, NO_MEMORY))
            raise Skip("no memory")
        return grant, slot

    def _report_waiting(self, step: int, reason: str, seconds: float) -> None:
        cause = reason.partition(":")[0]
        if cause == NO_MEMORY or (cause in OBSTACLES and seconds >= LASTING_S):
            self._troubles.report("memory" if cause == NO_MEMORY else "waiting", f"snapshot {step} is skipped: {reason}")

    def _check_ready(self, step: int, deadline: float | None) -> None:
        """``deadline``: until then it is waited for, where this rank joins. Raises Skip."""
        session = self._session
        if session.phase == READY and session.link.up:
            return
        if session.phase == IDLE:
            if self.restore_failed:
                self._troubles.report("join", f"not protected: {REFUSED}")
                raise Skip(REFUSED)
            self._join_in_background()
        if deadline is not None and self.wait_joined(deadline):
            session.call(step, fence.steps(), asks=True)  # the first call was no news to a daemon that had not this rank yet
            return
        if not session.link.up:
            self._troubles.report("daemon", f"not protected: {session.link.trouble}")
            raise Skip("no daemon")
        raise Skip(SUPERSEDED if session.phase == SUPERSEDED else "joining")  # also where it joined during these lines

    def wait_joined(self, deadline: float) -> bool:
        """While the ranks meet and join in the background; nobody waits without a daemon, or for one that is silent (P5)."""
        session = self._session
        session.wait(lambda: session.phase == READY or not session.link.up or not self._joiner.under_way, deadline)
        return session.phase == READY and session.link.up

    def _join_in_background(self) -> None:
        if not self._registry.owners:
            raise Skip("nothing registered")
        if self._joiner.may_start:
            state = resolve.tensors(self._registry)
            self._accumulation.sample(state)
            self._joiner.in_background(resolve.whole(self._registry, state))

    def _check_progress(self, step: int, forced: bool) -> None:
        self.progress.called(step)
        if not self._registry.of_kind("optimizer"):
            return
        if forced or self.progress.moved(self._looks()):
            return
        self.progress.skipped(step)
        raise Skip("no optimizer step since the last snapshot")

    def _looks(self) -> Iterator[Seen]:
        """At parameters and registered tensors; none finds what is not where it was. The first one leaves FSDP2's gathered
        parameters alone, for those that optimizers hold are the shards."""
        plan, recall = self._plan, self._recall
        for look in (self._tensors_anew,) if recall is None else (recall.there, recall.tensors):
            tensors = look()
            if plan is not None and tensors is not None:
                yield Seen.of(plan.watched, tensors)

    def _tensors_anew(self) -> list[Tensor] | None:
        """In the order of the plan's first entries; None when they are others."""
        entries = resolve.tensors(self._registry).entries
        keys = self._plan.keys[: len(entries)] if self._plan is not None else ()
        return [entry.tensor for entry in entries] if tuple(entry.key for entry in entries) == keys else None

    # --- the capture --------------------------------------------------------------------------------------------
    def _capture(
        self, handle: Handle, grant: Grant, slot: SlotView, meta: dict[str, Any], keep: bool, deadline: float
    ) -> None:
        began = time.monotonic()
        session = self._session
        session.clock.captures()
        self._engine.settle_audits(began + AUDIT_TIMEOUT_S)  # an earlier snapshot that no optimizer step came after
        bound_s = max(float(session.policy.get("fence_timeout_s", 0.0)), deadline - began)
        if self._engine.busy(slot) and not self._engine.drain(bound_s):
            raise Skip("busy")
        found = self._lookup(handle.step, meta)
        tensors, packed, plan = found.tensors, found.packed, found.plan
        self._accumulation.look(handle.step)
        self._attributes.look(self._registry, tensors)
        if not plan.layout.frozen_bytes:
            self._frozen.not_needed(plan)
        if plan.layout.frozen_at > slot.capacity:
            self._ask_for_more(plan, slot.capacity)
        patience_s = max(0.0, deadline - time.monotonic())
        frozen = self._frozen.slot_for(plan, tensors, patience_s) if plan.layout.frozen_bytes else None
        try:
            with searched_later():
                look = found.look()
                job = self._job(handle, grant, slot, frozen, plan, tensors, len(packed), keep)
                self._write_objects(slot, packed, plan)
                gather(tensors, job, self._engine.statics, self._races)
            job.blocked_s = time.monotonic() - began
            self._taken += 1
            self.progress.taken(look.seen)
            self._captured = Captured(handle.step, tree.encode(meta, "meta"), look)
            if keep:
                self.kept[handle.step] = session.epoch
                while len(self.kept) > KEPT_MAX:
                    self.kept.pop(next(iter(self.kept)), None)
            self._troubles.clear(AGAIN)
            handle.grant, handle.slot = grant.number, grant.slot
            session.follow(handle)
            self._engine.submit(job)
        finally:
            if frozen is not None:
                frozen.slot.segment.unpin()

    @searched_later()
    def _lookup(self, step: int, meta: dict[str, Any]) -> Found:
        """What is there now. Quickly, if nothing was replaced."""
        recall, session = self._recall, self._session
        assert session.world is not None, "a grant without a world"
        self._registry.look_again()
        tensors = recall.tensors() if recall is not None and recall.plan.world is session.world else None
        if recall is not None and tensors is not None:
            extras, beside = recall.extras, recall.beside
            state = State(aliases=recall.aliases, odd=recall.odd(), groups=recall.groups, extras=extras, beside=beside)
            resolve.objects(self._registry, state, step, meta)
            packed: bytes = msgpack.packb(state.objects)
            everything = recall.with_inside(tensors, state)
            if everything is not None and len(packed) <= recall.plan.objects_max:
                return Found(everything, packed, recall.plan, len(tensors), hashes(state.objects, state.entries))
        return self._look_up_anew(session.world, step, meta)

    def _look_up_anew(self, world: World, step: int, meta: dict[str, Any]) -> Found:
        modules.prepare(part for owner in self._registry.of_kind("module") for part in owner.value.modules())
        state = resolve.tensors(self._registry)
        found = len(state.entries)
        state.entries += gradients.entries(state)
        hanging = len(state.entries)
        self._accumulation.sample(state)
        complete.check(self._registry, state)
        resolve.objects(self._registry, state, step, meta)
        packed: bytes = msgpack.packb(state.objects)
        replicas = int(self._session.policy.get("replicas", 0))
        plan = make_plan(state, world, replicas, len(packed), self._plan)
        self._plan = plan
        self._recall = Recall(self._registry, state, plan, found) if Recall.can_hold(state) else None
        tensors = [entry.tensor for entry in state.entries]
        return Found(tensors, packed, plan, hanging, hashes(state.objects, state.entries[hanging:]))

    def _ask_for_more(self, plan: Plan, have: int) -> NoReturn:
        needed, session = plan.layout.frozen_at, self._session
        with session.changed:
            session.wants_bytes = needed
        session.link.send(wire.Resize(needed, record_bytes=plan.record_bytes))
        raise Outgrown(f"{session.larger(needed)}, the slot has {have}")

    def _job(
        self, handle: Handle, grant: Grant, slot: SlotView, frozen: FrozenSlot | None, plan: Plan, tensors: Sequence[Tensor],
        objects_bytes: int, keep: bool,
    ) -> Job:  # fmt: skip
        every = int(self._session.policy.get("audit_every", 0))
        doubt, self._doubt = self._doubt, False
        return Job(
            step=handle.step, grant=grant.number, came_at=grant.came_at, slot=slot, frozen=frozen.slot if frozen else None,
            fills=frozen is not None and frozen.to_fill,
            found=frozen is not None and self._engine.statics.found(frozen.slot),
            content=frozen.content if frozen else None,
            connection=self._session.connection, plan=plan, handle=handle,
            objects_bytes=objects_bytes, keep=keep, audit=every > 0 and (doubt or (self._taken + 1) % every == 0),
            versions=Versions(plan.watched, tensors), of_state=Versions(plan.watched_state, tensors),
            looked=not plan.copies_behind,
        )  # fmt: skip

    def _write_objects(self, slot: SlotView, packed: bytes, plan: Plan) -> None:
        capacity = plan.layout.objects_capacity
        libc.write(slot.address, packed)
        libc.zero(slot.address + len(packed), capacity - len(packed))

    # --- how it ended (on the capture thread) -------------------------------------------------------------------
    def sealed(self, job: Job) -> None:
        session = self._session
        if session.connection != job.connection or not session.link.up:
            self.void(job, "connection to the daemon lost")
            return
        self._troubles.clear(*RECOVERED)  # before anybody can hear of the seal
        layout = job.plan.layout
        fds = [memfd_object(layout.encoded)] if session.layout_is_new(layout.layout_id) else []
        note = wire.SealedSlot(
            job.slot.number,
            job.grant,
            job.step,
            layout.layout_id,
            job.objects_bytes,
            job.keep,
            job.capture_s,
            job.blocked_s,
            job.came_at,
            -1 if job.frozen is None else job.frozen.number,
        )
        try:
            sent = session.link.send(note, fds)
            failpoint("capture.sealed")
        finally:
            for fd in fds:
                os.close(fd)
        with session.changed:
            job.handle.became("captured" if sent else "void: connection to the daemon lost")
            session.changed.notify_all()

    def void(self, job: Job, reason: str) -> None:
        session = self._session
        self._doubt |= bool(job.written)
        self._registry.were_written(job.written, job.grant)
        if session.connection == job.connection:
            owners = self._registry.owners
            unfenced = {name for name in job.written if name in owners and owners[name].writes_unfenced}  # one may be gone again
            found = {name: () if name in unfenced else keys for name, keys in job.written.items()}
            written = {name: list(keys) for name, keys in bounded(found).items()}
            session.link.send(wire.GaveUp(job.grant, job.step, brief(reason), written))
        with session.changed:
            self._lost(job.handle, f"void: {reason}")
            session.changed.notify_all()
        self._tell_doubtful(job)
        if reason == "fence timeout":
            text = f"snapshot {job.step} is void: its capture was slower than fence_timeout_s, training went on without it"
            self._troubles.report("fence", text)
        elif reason.partition(":")[0] not in (TAKEN_BACK, "closed"):
            self._troubles.report(
                "hidden write" if job.written else "capture", f"snapshot {job.step} is void: {reason}"
            )

    def _tell_doubtful(self, job: Job) -> None:
        """For as long as this process lives: nobody else can say which checkpoints are not to be restored."""
        if job.doubtful is None:
            return
        first, last, keys = job.doubtful
        self._troubles.report(
            f"doubtful {first}",
            f"snapshots of the steps {first} to {last} may hold {', '.join(keys[:NAMED_MAX])} as it was earlier: it was written by"
            f" hand, past version counters and samples, and found at step {job.step} by comparing all of it",
        )
