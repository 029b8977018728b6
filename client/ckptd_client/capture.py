"""The capture engine: one thread copies in the background, the fence helps when training has caught up (design D6).

Jobs are done one after the other. The trainer's thread only ever waits in ``fence``, and no longer than its bound (P5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor, UntypedStorage

from ckptd.core.failpoint import FailpointError, failpoint
from ckptd_client import _switches, device, libc
from ckptd_client.accelerator import Accelerator, aside
from ckptd_client.collectives import storages
from ckptd_client.copying import Copy
from ckptd_client.interrupts import by_a_signal
from ckptd_client.job import Chunk, Job, OnSealed, OnVoid
from ckptd_client.segments import SlotView
from ckptd_client.standing import may_be_in_the_same_call, standing
from ckptd_client.statics import Statics, mark_of
from ckptd_client.versions import Versions

log = logging.getLogger("ckptd")
INTERRUPTED = "interrupted by an exception"
STOP_WAIT_S = 5.0  # at close, for the chunk in flight
DEVICE_POLL_S = (
    0.002  # is the device done? Asked, not waited for, so that the next job can be enqueued meanwhile
)
# A counter moves when the write is over. Without a fence the look at the counters comes this much later than the last byte, for a
# write that was under way then; or twice as long as the capture took, if that is longer; or until the thread that called snapshot()
# has come out of the call that it was in then, but no longer than IN_A_CALL_MAX_S.
WRITE_S = 0.2
IN_A_CALL_MAX_S, IN_A_CALL_POLL_S = 10.0, 0.02


class Engine:
    """``on_sealed``/``on_void`` run on the capture thread, each exactly once per job, after its last byte."""

    def __init__(self, on_sealed: OnSealed, on_void: OnVoid) -> None:
        self._on_sealed, self._on_void = on_sealed, on_void
        self._jobs: deque[Job] = deque()
        self._warming: deque[tuple[SlotView, Iterator[Callable[[], object]], Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.statics = Statics()
        self._given_up = (-1, "")  # of which step nothing is captured any more, and why
        self.newest = -1  # the grant of the job that came last, which is answered when that is over
        self.fenced_s = 0.0  # seconds that optimizers have waited, all together

    # --- the trainer's side -------------------------------------------------------------------------------------
    def submit(self, job: Job) -> None:
        for slot in job.slots:
            slot.segment.pin()
        with self._changed:
            if job.step == self._given_up[0]:
                job.stop = self._given_up[1]
            if self._closing:
                job.stop = "closed"
            self.newest = job.grant
            self._jobs.append(job)
            self._start()
            self._changed.notify_all()

    def busy(self, slot: SlotView) -> bool:
        """Is a job still writing into this slot?"""
        with self._changed:
            return any(
                used.segment is slot.segment and used.offset == slot.offset
                for job in self._jobs
                for used in (job.slots if job.fills else [job.slot])
            )

    def fills_frozen(self) -> Job | None:
        """The job that captures the frozen part, while it is not over."""
        with self._changed:
            return next((job for job in self._jobs if job.fills), None)

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._jobs

    def reads(self, written: Sequence[Tensor | UntypedStorage]) -> bool:
        """Does a capture that is under way read the storage of one of these?"""
        asked = storages(written)
        with self._changed:
            jobs = list(self._jobs)
        return any(asked & job.storages for job in jobs)

    def fence(self, timeout_s: float) -> float:
        """Return once no source is read any more, or after ``timeout_s`` with what was left void. Seconds it took.

        The caller's thread copies along: with nothing to hide behind, two threads move more than one.
        """
        began = time.monotonic()
        if not self._jobs:
            return 0.0
        self._look(self._jobs)
        if not self._copy_until(began + timeout_s):
            self._stop_all("fence timeout")
        self._audit(began + timeout_s)
        self._hold_back_devices()
        spent = time.monotonic() - began
        self.fenced_s += spent
        for job in list(self._jobs):
            job.blocked_s += spent
        return spent

    def settle(self, deadline: float) -> None:
        """Let jobs that wait for a fence end, when no optimizer step is going to come. For the training thread, which writes
        nothing meanwhile."""
        if self._jobs and self._copy_until(deadline):
            self._look(self._jobs)
            self._audit(deadline)

    def settle_audits(self, deadline: float) -> None:
        """The same, but nobody waits for those that need no audit."""
        if any(job.audit for job in list(self._jobs)):
            self.settle(deadline)
        self._look([job for job in list(self._jobs) if job.copied])

    def stop(self, grant: int, reason: str) -> bool:
        """True when the job had not been sealed yet: it will end void."""
        with self._changed:
            for job in self._jobs:
                if job.grant == grant and not job.over:
                    job.stop = job.stop or reason
                    self._changed.notify_all()
                    return True
        return False

    def give_up(self, step: int, reason: str) -> None:
        """Void what captures of this step are not over, and those that come. The next call names another one."""
        with self._changed:
            self._given_up = step, reason
            for job in self._jobs:
                if job.step == step and not job.over:
                    job.stop = job.stop or reason
            self._changed.notify_all()

    def stop_unfenced(self, reason: str) -> None:
        """Void what no fence was passed for yet."""
        with self._changed:
            for job in self._jobs:
                if not job.looked and not job.over:
                    job.stop = job.stop or reason
            self._changed.notify_all()

    def stop_connection(self, connection: int, reason: str) -> None:
        with self._changed:
            for job in self._jobs:
                if job.connection == connection:
                    job.stop = job.stop or reason
            self._changed.notify_all()

    def warm(self, slot: SlotView, accelerator: Accelerator | None, ready: Callable[[], None]) -> None:
        """Fill the page tables of a new slot and register it, off the critical path. ``ready`` is called on the capture thread."""
        slot.segment.pin()
        with self._changed:
            self._warming.append((slot, _warming(slot, accelerator), ready))
            self._start()
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is over. False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        self._stop_all("closed")
        self._look(self._jobs)
        with self._changed:
            self._closing = True
            for job in self._jobs:
                if job.audit:
                    job.stop = job.stop or "closed"
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)
        while self._warming:
            self._warming.popleft()[0].segment.unpin()
        self.statics.forget()

    # --- the fence ----------------------------------------------------------------------------------------------
    def _copy_until(self, deadline: float) -> bool:
        """Copy along until all is copied. False: the deadline (monotonic seconds) came first."""
        try:
            while not self._all_copied():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._help(left)
        except BaseException:  # Ctrl-C, or what a signal handler raises
            self._interrupted()
            raise
        return True

    def _interrupted(self) -> None:
        """This thread copies nothing any more, and nobody knows how much of its chunk."""
        me = threading.get_ident()
        with self._changed:
            for job in self._jobs:
                if me in job.in_flight:
                    job.in_flight = [each for each in job.in_flight if each != me]
                    job.stop = job.stop or INTERRUPTED
            self._changed.notify_all()

    def _all_copied(self) -> bool:
        with self._changed:
            return all(job.copied for job in self._jobs)

    def _help(self, left_s: float) -> None:
        with self._changed:
            found = self._claim()
            if found is None:
                if not all(job.copied for job in self._jobs):
                    self._changed.wait(left_s)
                return
        self._run(*found, helping=True)

    def _stop_all(self, reason: str) -> None:
        with self._changed:
            for job in self._jobs:
                if not job.copied:
                    job.stop = job.stop or reason
            self._changed.notify_all()

    def _look(self, jobs: Iterable[Job]) -> None:
        """Were sources written since snapshot()? Asked once of each job: at the first fence, or before its seal when none was.
        Later the optimizer may rightly have written."""
        with self._changed:
            for job in jobs:
                asked = _switches.VERSIONS and not job.looked
                found = [*job.versions.moved(), *job.of_state.moved()] if asked else []
                if any(one.behind for one in found):
                    job.were_written([one for one in found if one.fenced], "written before the fence:")
                    job.were_stepped({one.key for one in found})
                job.looked, job.of_state = True, Versions((), ())  # at last: who is interrupted before has not looked
            self._changed.notify_all()

    def _hold_back_devices(self) -> None:
        """Training may write what a void snapshot reads. It waits for none, least of all for one whose copies are being enqueued,
        which may take as long as the device likes."""
        for job in list(self._jobs):
            if job.device is not None and job.enqueued and not job.stop:
                job.device.hold_back()

    def _audit(self, deadline: float) -> None:
        """Compare slot and source while both should still be what snapshot() saw. A device does it by itself: its copies may not
        have arrived yet, and the training stream has other work."""
        for job in list(self._jobs):
            if job.audit and not job.stop:
                here, there = _compared(job)
                try:
                    if there and job.device is not None:
                        job.device.compare(there)
                    trouble = ""
                except RuntimeError as error:
                    trouble = f"audit failed: {error}"
                found, to_the_end = _differing(here, deadline)
                with self._changed:
                    job.stop = job.stop or trouble
                    if found:
                        self._written_by_hand(job, found)
                    job.audit, job.compared = False, to_the_end
                    self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------------------------
    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckptd-capture", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                on_its_way, task = self._on_its_way(), self._task()
                while task is None:
                    if self._closing and not self._jobs:
                        return
                    self._changed.wait(DEVICE_POLL_S if on_its_way else self._pause_s())
                    on_its_way, task = self._on_its_way(), self._task()
            task()

    def _task(self) -> Callable[[], None] | None:
        """What the thread does next. Under the lock. Devices first: the fence waits for what is not yet enqueued."""
        waiting = self._not_enqueued()
        if waiting is not None:
            return partial(self._enqueue, waiting)
        found = self._claim()
        if found is not None:
            return partial(self._run, *found, helping=False)
        if not self._jobs:
            return self._warm_one if self._warming else None
        first = self._jobs[0]
        if first.copied and not first.on_device and (first.stop or (not first.audit and self._unripe_s(first) <= 0)):
            return partial(self._end, first)
        return None

    def _on_its_way(self) -> bool:
        """Under the lock, and before ``_task``: copies arrive, and a graph's capture ends, without a word. What was missed then is
        looked for again, also where it has come since."""
        return any(job.on_device or job.to_enqueue for job in self._jobs)

    def _pause_s(self) -> float | None:
        """Until the thread looks again by itself where no device is at work. Under the lock, after ``_task``."""
        first = self._jobs[0] if self._jobs else None
        waits = first is not None and first.copied and not first.audit and not first.looked
        return self._unripe_s(first) if first is not None and waits else None

    @staticmethod
    def _unripe_s(job: Job) -> float:
        """How long the seal of a job that is copied still waits for a fence."""
        if job.looked:
            return 0.0
        now = time.monotonic()
        if not job.copied_at:
            job.copied_at, job.stood = now, standing(job.thread)
        left_s = job.copied_at + max(WRITE_S, 2 * (job.copied_at - job.began)) - now
        if left_s > 0 or job.stood is None or now > job.copied_at + IN_A_CALL_MAX_S:
            return left_s
        return IN_A_CALL_POLL_S if may_be_in_the_same_call(job.stood) else left_s

    def _not_enqueued(self) -> Job | None:
        """Under the lock."""
        return next((job for job in self._jobs if job.to_enqueue and job.device is not None and job.device.has_room()), None)

    def _claim(self) -> tuple[Job, Chunk] | None:
        """The next piece of the oldest job that has one. Under the lock."""
        for job in self._jobs:
            chunk = job.next_chunk()
            if chunk is not None:
                return job, chunk
            if not job.copied:
                return None  # its slot may be the next job's slot
        return None

    def _run(self, job: Job, chunk: Chunk, *, helping: bool) -> None:
        trouble = ""
        try:
            if chunk.first:
                failpoint("capture.helping" if helping else "capture.tensor")
            chunk.copy.run(chunk.begin, chunk.length)
        except (RuntimeError, FailpointError) as error:
            if by_a_signal(error):
                raise
            trouble = f"copy of {chunk.copy.key} failed: {error}"
        with self._changed:
            job.in_flight.remove(threading.get_ident())
            if trouble:
                job.stop = job.stop or trouble
            if not job.in_flight:
                self._changed.notify_all()

    def _enqueue(self, job: Job) -> None:
        assert job.device is not None
        try:
            all_of_it = job.device.enqueue()
        except (RuntimeError, FailpointError) as error:
            job.stop, all_of_it = job.stop or f"device copies failed: {error}", True
        with self._changed:
            job.enqueued = all_of_it
            self._changed.notify_all()

    def _end(self, job: Job) -> None:
        """Seal or void; then the slot may be used again."""
        try:
            if job.device is not None and job.enqueued:
                sampled, compared = job.device.finish()
                if compared:
                    self._written_by_hand(job, compared, sampled)
                elif sampled:
                    job.were_written(sampled, "hidden write:")
            self._look([job])
            self._check_static(job)
            job.capture_s = time.monotonic() - job.began
            failpoint("capture.sealing")
        except (RuntimeError, FailpointError) as error:
            job.stop = job.stop or str(error)
        with self._changed:
            job.over = True
        try:
            if job.stop:
                if job.fills:
                    self.statics.forget(job.frozen)
                self._on_void(job, job.stop)
            else:
                self.statics.names(job.frozen)
                self._on_sealed(job)
        except Exception:
            log.exception("ckptd client: end of the capture of step %d", job.step)
        with self._changed:
            self._jobs.remove(job)
            self._changed.notify_all()
        for slot in job.slots:
            slot.segment.unpin()

    def _check_static(self, job: Job) -> None:
        """A snapshot that leans on what was written meanwhile is void."""
        moved = [copy for copy, tensor, mark in job.static if mark_of(tensor, copy.source) != mark]
        if job.static and job.content is not None and not moved:
            changed = job.content.of.differing(job.content.samples, job.content.of.read())
            moved = [job.static[at][0] for at in changed]
        if moved and not job.stop:
            job.were_written(moved, "written while it was copied:")
        for copy, tensor, mark in job.unproven:
            if job.stop:
                break
            differs = self._differs(copy)
            if mark_of(tensor, copy.source) != mark:  # what snapshot() saw is not there to be compared any more
                job.stop = f"{copy.key} was written while it was compared"
            elif differs:
                self._another(job, copy)
        if job.frozen is not None and not job.stop:
            (self.statics.finished if job.fills else self.statics.proved)(job.frozen)
            self.statics.sealed(job.frozen, job.step, compared=job.compared or bool(job.unproven))

    def _differs(self, copy: Copy) -> bool:
        """Gigabytes may have to be compared. The next snapshot's copies are enqueued meanwhile: a fence waits for that."""
        for begin, length in copy.chunks():
            with self._changed:
                waiting = self._not_enqueued()
            if waiting is not None:
                self._enqueue(waiting)
            with aside(copy.source.device):
                if copy.differs(begin, length):
                    return True
        return False

    def _another(self, job: Job, copy: Copy) -> None:
        """What lies in the frozen slot is not what the parameter is now."""
        if job.found:
            self.statics.forget(job.frozen)
            job.stop = f"{copy.key} is not what was kept of it: it is captured anew"
        else:
            self._written_by_hand(job, [copy])

    def _written_by_hand(self, job: Job, found: Sequence[Copy], sampled: Sequence[Copy] = ()) -> None:
        """Comparing has shown it. Of what is frozen and was not ``sampled`` as such nobody knows since when."""
        job.were_written(found, "hidden write:")
        seen = {copy.key for copy in sampled}
        frozen = {copy.key for copy in (*job.held, *(copy for copy, _, _ in job.unproven))} - seen
        doubted = sorted(frozen & {copy.key for copy in found})
        since = self.statics.doubtful(job.frozen) if job.frozen is not None and doubted else None
        if since is not None and job.doubtful is None:
            job.doubtful = (*since, doubted)
            job.stop = f"{job.stop}; doubtful: the steps {since[0]} to {since[1]}"

    def _warm_one(self) -> None:
        slot, steps, ready = self._warming[0]
        step = next(steps, None)
        if step is not None:
            step()
            return
        ready()
        with self._changed:
            self._warming.popleft()
        slot.segment.unpin()


def _warming(slot: SlotView, accelerator: Accelerator | None) -> Iterator[Callable[[], object]]:
    for address, nbytes in slot.pieces():
        yield partial(libc.advise, address, nbytes, libc.MADV_POPULATE_WRITE)
    while accelerator is not None and slot.segment.next_piece() is not None:
        yield partial(device.register_next, slot.segment, accelerator)


def _compared(job: Job) -> tuple[list[Copy], list[Copy]]:
    """What an audit compares: on the host, and on the device."""
    found = [*job.fenced, *(copy for copy, _, _ in job.static), *job.held]
    if job.device is None:
        return found, []
    copied_here = set(map(id, job.copies))
    held_here = {id(copy) for copy in job.held if copy.source.is_cpu}
    here = [copy for copy in found if id(copy) in copied_here or id(copy) in held_here]
    kept = set(map(id, here))
    return here, [copy for copy in found if id(copy) not in kept]


def _differing(copies: list[Copy], deadline: float) -> tuple[list[Copy], bool]:
    """Tensors that were written past the fence; did the time last for all?"""
    found: list[Copy] = []
    for copy in copies:
        for begin, length in copy.chunks():
            if time.monotonic() > deadline:
                return found, False
            with aside(copy.source.device):
                differs = copy.differs(begin, length)
            if differs:
                found.append(copy)
                break
    return found, True
