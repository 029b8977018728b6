"""Where this rank stands with its daemon: connection, epoch, grants, slots, levels (design D2, D9-D11).

Messages arrive on the link's thread; the trainer's thread reads and waits under ``changed``.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.events import NO_MEMORY, NOT_HERE
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import memfd_object, read_memfd_object
from ckptd.wire.world import pack_world
from ckptd_client import fence
from ckptd_client.accelerator import Accelerator
from ckptd_client.cold import Cold
from ckptd_client.grants import Grant, Grants
from ckptd_client.handles import ASK_EVERY_S, SILENT_AFTER_S, Handle, Handles, newest_of
from ckptd_client.link import Link, close_all
from ckptd_client.segments import Segments, SlotView
from ckptd_client.stepclock import StepClock
from ckptd_client.troubles import Troubles, brief
from ckptd_client.world import World

LEVELS_KEPT_MAX = 1024  # steps whose level is remembered
LAYOUTS_KNOWN_MAX = 8  # of the newest that were sent; the daemon remembers twice as many of a rank
RESTORE_SILENT_AFTER_S = 60.0  # SILENT_AFTER_S of a daemon that restores: it may be busy
LOST_HINT = "start the job again: a daemon that its keeper or systemd starts again finds its memory; its log says why it ended"

GRANTED_AHEAD, TAKEN_BACK = "granted ahead", "taken back"
LARGER = "slots are being made larger"
NO_GRANT_YET, SILENT = "no grant yet: none has arrived", "the daemon is silent"

IDLE, JOINING, READY, SUPERSEDED = "idle", "joining", "ready", "superseded"


class Session:
    """``stop``: (grant, reason) -> was the capture under it still running? ``lost``: (connection) its captures are void."""

    def __init__(self, path: str, job: str, troubles: Troubles) -> None:
        self.changed = threading.Condition()
        self.link = Link(path, job, self._on_message, self._on_up, self._on_down, self._on_refused)
        self.job, self.troubles = job, troubles
        self.segments = Segments()
        self.frozen_slot = -1  # where the frozen part may be captured, or was; -1: nowhere yet
        self.wants_bytes = 0  # of a slot, where the state has outgrown those that there were
        self.frozen_holds = ""  # layout id of what was in it when it was mapped
        self.grants, self.clock = Grants(), StepClock()
        self.policy: dict[str, Any] = {}
        self.node: dict[str, Any] | None = None
        self._lost_at = 0.0  # since when no daemon has this rank; 0: one has
        self.connection = 0  # grows with every welcome; 0: never connected
        self.phase = IDLE
        self.world: World | None = None
        self.epoch, self.called = 0, -1  # called: the newest step that snapshot() was given
        self._before = -1  # the newest step called before that one which no grant took
        self._optimizer_steps = -1  # made when ``called`` was
        self.handed_over = False  # its steps are of what saving() is given, whatever training does meanwhile
        self._asking = self.restoring = False  # must=True waits; restore() does
        self.waits, self._waits_at = "", 0.0  # why the daemon grants nothing, and since when we know that cause
        self.levels: dict[int, wire.Level] = {}
        self.stop_capture: Callable[[int, str], bool] = lambda grant, reason: False
        self.connection_lost: Callable[[int], None] = lambda connection: None
        self.written_there: Callable[[dict[str, list[str]], int], None] = lambda written, grant: None
        self.slot_mapped: Callable[[SlotView, Accelerator | None, Callable[[], None]], None] = lambda slot, on, ready: ready()
        self.own_values: Callable[[list[str]], None] = lambda keys: None
        self.accelerator: Accelerator | None = None  # that the rank's tensors lie on
        self._cold = Cold()
        self._handles = Handles()
        self._inbox: deque[tuple[Any, bytes, list[int]]] = deque()
        self._replies: dict[int, Any] = {}
        self._requests, self._in_vain = 0, -SILENT_AFTER_S  # monotonic seconds of the question that was not answered in time
        self._join: tuple[wire.Join, bytes] | None = None  # as it was sent, and the world beside it
        self._layouts: deque[str] = deque(maxlen=LAYOUTS_KNOWN_MAX)  # ids that this connection's daemon knows, the newest ones
        self._on: dict[type, Callable[[Any, list[int]], None]] = {
            wire.Mapped: self._mapped,
            wire.Retire: lambda m, _: self.segments.retire(m.slot),
            wire.Opened: self._opened,
            wire.LoadPlan: self._load_plan,
            wire.Failed: self._failed,
            wire.Ready: self._ready,
            wire.GrantSlot: self._granted,
            wire.TakeBack: self._taken_back,
            wire.WrittenThere: lambda m, _: self.written_there(m.written, m.grant),
            wire.Level: self._level,
            wire.Superseded: self._superseded,
            **dict.fromkeys((wire.Steps, wire.Health, wire.Released), self._reply),
        }

    # --- the connection -----------------------------------------------------------------------------------------
    def _on_up(self, welcome: wire.Welcome) -> None:
        with self.changed:
            self.connection += 1
            self.policy, self.node = dict(welcome.policy), dict(welcome.node)
            self.clock.on = self.policy.get("pacing", "off") != "off"
            self.clock.each = self.policy.get("pacing") == "windows"
            rejoin = self._join if self.phase in (READY, JOINING) and not self.restoring else None
            self.changed.notify_all()
        if rejoin is None:
            self.troubles.clear("daemon")  # else with its first word on that: it may yet turn us away
        if self.policy.get("durable"):
            self.troubles.clear("storage")
        self._offer()
        if rejoin is not None:
            message, body = rejoin
            try:
                # the daemon knows the attempt, or learns it
                self._send_join(replace(message, ask=None, trains=self.phase == READY, grant=self.grants.newest), body)
            except OSError as error:
                self.troubles.report("join", f"not protected: the daemon cannot be told the world: {error}")

    def _offer(self) -> None:
        offers = self.segments.offers()
        for at in range(0, len(offers), wire.FDS_PER_FRAME_MAX):
            part = offers[at : at + wire.FDS_PER_FRAME_MAX]
            self.link.send(wire.Offer([name for name, _ in part]), [fd for _, fd in part])

    def _on_down(self, reason: str) -> None:
        with self.changed:
            lost = self.connection
            self._lost_at = self._lost_at or time.monotonic()
            self.grants.clear()
            self._cold.clear()
            self.waits = ""
            self._layouts.clear()
            self.segments.forget_connection()
            self.wants_bytes = 0  # the next daemon may have what this one had not
            self.frozen_slot = -1  # the next daemon may give that number to another slot
            if self.restoring:
                self._inbox.append((wire.Failed("lost", f"the daemon was lost: {reason}", LOST_HINT), b"", []))
            self.changed.notify_all()
        self.segments.let_go()
        self.troubles.report("daemon", f"not protected: connection to the daemon lost ({reason})")
        self.connection_lost(lost)

    def _on_refused(self, refused: wire.Refused) -> None:
        with self.changed:
            trained = self.phase in (READY, JOINING)
            self.changed.notify_all()
        if trained:
            self.troubles.report("join", f"not protected: {CkptdError(refused.what, where=refused.where, hint=refused.hint)}")

    def wait_up(self, timeout_s: float) -> bool:
        """Is the daemon there, within ``timeout_s``?"""
        with self.changed:
            self.changed.wait_for(lambda: self.link.up or self.link.refused is not None, timeout_s)
        return self.link.up

    def is_away(self, handle: Handle) -> bool:
        with self.changed:
            return self._handles.is_unsure(handle, self.link, self._lost_at)

    def wait_back(self, deadline: float) -> None:
        """For a daemon that was lost a moment ago, and may be starting again; not for one that stays away (P5)."""
        back_by = min(deadline, self._lost_at + SILENT_AFTER_S)
        self.wait(lambda: not self._lost_at or self.phase != READY, back_by)

    # --- messages -----------------------------------------------------------------------------------------------
    def _on_message(self, message: Any, fds: list[int]) -> None:
        self.troubles.clear("daemon")
        try:
            with self.changed:
                self._on[type(message)](message, fds)
                self.changed.notify_all()
            self.segments.let_go()  # not under the lock: a device takes its time
        finally:
            close_all(fds)  # handlers take out what they keep

    def _mapped(self, message: wire.Mapped, fds: list[int]) -> None:
        fd = fds.pop() if fds else None
        try:
            slot = self.segments.map_slot(
                message.slot, message.segment, message.segment_bytes, message.offset, message.capacity, fd
            )
        except (OSError, KeyError) as error:
            self.troubles.report("mapping", f"cannot map the daemon's memory: {error}")
            return
        if message.frozen:
            self.frozen_slot, self.frozen_holds = message.slot, message.holds
        if self.accelerator is not None:
            self._cold.begin(message.slot)
        self.slot_mapped(slot, self.accelerator, lambda: self._slot_ready(message.slot))

    def _slot_ready(self, slot: int) -> None:
        with self.changed:
            for grant in self._cold.ready(slot):
                self._granted(grant, [])
            self.changed.notify_all()

    def _opened(self, message: wire.Opened, fds: list[int]) -> None:
        if self.restoring:
            body = read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX) if fds else b""
            self._inbox.append((message, body, []))
        elif message.snapshot is None:
            for text in message.errors:
                self.troubles.report("begins_anew", f"{text}. restore() goes on from it; another job name keeps both")
        else:
            self.link.send(wire.WantsRefused(message.round, "mismatch", "this rank did not ask for a restore"))

    def _load_plan(self, message: wire.LoadPlan, fds: list[int]) -> None:
        if self.restoring and fds:
            body = read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX)
            self._inbox.append((message, body, fds[1:]))
            del fds[1:]

    def _failed(self, message: wire.Failed, fds: list[int]) -> None:
        if self.restoring:
            self._inbox.append((message, b"", []))
            return
        if self.phase == IDLE:
            return  # of a restore that this rank has left already
        self.phase = IDLE
        self.troubles.report("join", f"not protected: {message.reason} ({message.code})")

    def _ready(self, message: wire.Ready, fds: list[int]) -> None:
        if message.epoch != self.epoch:
            self.levels.clear()
            self._handles.clear()
            self.clock.forget()
        self.epoch, self.phase = message.epoch, READY
        if self.called >= 0:
            self.link.send(wire.Called(self.called))  # a daemon that was restarted does not know
        self.segments.drop_unused()
        if self.restoring:
            self._inbox.append((message, b"", []))
        self._taken_in()

    def _taken_in(self) -> None:
        """Ready says so, and so does a grant: a daemon that has lost the running epoch and hears of it again says no Ready."""
        if self._lost_at:
            self._lost_at = 0.0
            self._handles.doubt()
        self._handles.ask(self.link)
        self.troubles.clear("join", "superseded")

    def _granted(self, message: wire.GrantSlot, fds: list[int]) -> None:
        if self._cold.keeps(message):
            return
        grant = Grant(message.slot, message.grant, message.from_step, self.called)
        if self.phase != READY or message.slot not in self.segments.slots:
            self.link.send(wire.GaveUp(message.grant, self.called, NO_MEMORY if self.phase == READY else NOT_HERE))
            return
        self._taken_in()
        self._handles.granted(message.slot, message.grant)
        open_ = self.step_is_open or self.grants.took(self.called)
        refused = self.grants.refusal(grant)
        if refused or not self.grants.arrive(grant, self.called, self._before if open_ else self.called):
            self.link.send(wire.GaveUp(message.grant, self.called, refused or "late"))
            if self._asking and not self.grants.refuses(self.called):  # whoever granted that one knew nothing of it yet
                self.link.send(wire.Called(self.called, True))

    def _taken_back(self, message: wire.TakeBack, fds: list[int]) -> None:
        if self._cold.take_back(message.grant) or self.grants.take_back(message.grant):
            self.link.send(wire.GaveUp(message.grant, self.called, TAKEN_BACK))
        else:
            self.stop_capture(message.grant, f"{TAKEN_BACK}: {message.reason}" if message.reason else TAKEN_BACK)
            # which then says GaveUp itself

    def _level(self, message: wire.Level, fds: list[int]) -> None:
        handle = self._handles.of(message.step)
        if message.epoch != self.epoch or (handle is not None and not self._handles.hear(handle, message)):
            return
        self.levels[message.step] = message
        while len(self.levels) > LEVELS_KEPT_MAX:
            del self.levels[min(self.levels)]
        if message.void:
            self._layouts.clear()  # it may be void because the daemon does not know one of them
            self.grants.void(message.grant)
            self.troubles.lost(message.step, f"void: {message.void}")
            self.troubles.report("void", f"snapshot {message.step} is void: {message.void}")
        elif message.level >= 0:
            self.troubles.clear("void")

    def _superseded(self, message: wire.Superseded, fds: list[int]) -> None:
        if message.epoch >= self.epoch:  # equal: somebody else joined as this rank
            self.phase = SUPERSEDED
            self.grants.clear()
            self._handles.clear()
            if self.restoring:
                self._inbox.append((wire.Failed("superseded", "a newer start of the job joined in this rank's place"), b"", []))
            self.troubles.report("superseded", f"epoch {message.epoch} of this job was opened elsewhere; no more snapshots")

    def _reply(self, message: Any, fds: list[int]) -> None:
        if message.request:
            self._replies[message.request] = message
        if isinstance(message, wire.Health):
            self._hear_waits(str(message.facts.get("waits", self.waits)))
            self._hear_problems(message)
            self.own_values(list(message.facts.get(wire.OWN_VALUES, ())))

    def _hear_waits(self, text: str) -> None:
        if text.partition(":")[0] != self.waits.partition(":")[0]:
            self._waits_at = time.monotonic()
        self.waits = text

    def _hear_problems(self, message: wire.Health) -> None:
        """Asked for by nobody (request 0) it is heard in a wait, which may be for just that: worth a warning."""
        if not message.request and not message.ok:
            for text in message.problems:
                self.troubles.pass_on(text)

    # --- joining ------------------------------------------------------------------------------------------------
    def join(
        self, world: World, state_bytes: int, frozen_bytes: int, record_bytes: int, ask: dict[str, Any] | None, *,
        restoring: bool,
    ) -> None:
        """Raises CkptdError without a connection. Answers come to ``next_restore`` when ``restoring``."""
        message = wire.Join(world.attempt, world.rank, state_bytes, ask, frozen_bytes, record_bytes=record_bytes)
        body = pack_world(world.ranks, world.nodes)
        with self.changed:
            self._drop_inbox()
            for number in self.grants.clear():  # else their slots would wait for this rank's word for ever
                self.link.send(wire.GaveUp(number, self.called, "the rank joins anew"))
            self._layouts.clear()  # a job that was taken back is another one to the daemon
            self.world, self._join = world, (message, body)
            self.phase, self.restoring = JOINING, restoring
            if restoring:
                self.called = self._before = self._optimizer_steps = -1
        try:
            sent = self._send_join(message, body)
        except OSError as error:
            self.left(error)
            text = f"the world of {world.size} ranks cannot be told to the daemon: {error}"
            raise CkptdError(text, where=self.job) from error
        if not sent:
            lost = CkptdError("the daemon was lost before the join", where=self.link.path, hint=LOST_HINT)
            self.left(lost)
            raise lost

    def _send_join(self, message: wire.Join, body: bytes) -> bool:
        fd = memfd_object(body)
        try:
            return self.link.send(message, [fd])
        finally:
            os.close(fd)

    def next_restore(self, deadline: float) -> tuple[Any, bytes, list[int]]:
        """The daemon's next word about the restore, its body and fds (the caller's). Raises CkptdError at the deadline."""
        self.wait(lambda: bool(self._inbox), deadline, RESTORE_SILENT_AFTER_S)
        with self.changed:
            if not self._inbox:
                raise CkptdError("the daemon did not answer in time", where=self.link.path, hint="see its log")
            return self._inbox.popleft()

    def left(self, error: BaseException | None) -> None:
        """restore() is over; after an error the rank has no part in any epoch."""
        with self.changed:
            self.restoring = False
            if error is not None and self.phase == JOINING:
                self.phase = IDLE
            self._drop_inbox()

    def _drop_inbox(self) -> None:
        while self._inbox:
            close_all(self._inbox.popleft()[2])

    # --- snapshots ----------------------------------------------------------------------------------------------
    @property
    def step_is_open(self) -> bool:
        """Is the state still that of the step called last? Then a grant for it may yet be taken (wait, must)."""
        return self.handed_over or self._optimizer_steps == fence.steps()

    def close_step(self) -> None:
        """The optimizer moves on: grants for the step called last are late."""
        if self.grants.overdue:
            with self.changed:
                self._expire()

    def _expire(self) -> None:
        for number in self.grants.expire():
            self.link.send(wire.GaveUp(number, self.called, "late"))

    def call(self, step: int, optimizer_steps: int, *, asks: bool) -> None:
        """snapshot(step) begins."""
        with self.changed:
            if step > self.called:
                self._expire()
                self._before = self._before if self.grants.took(self.called) else self.called
            self.called, self._optimizer_steps = step, optimizer_steps
            self._handles.ask(self.link)
        if self.phase == READY:  # else it hears of it when this rank is
            self.link.send_or_drop(wire.Called(step, asks, *self.clock.report()))

    def stepped(self, mark: int, busy: bool) -> None:
        """A step of training ends: the daemon hears of it with the next call, or now when that is long in coming."""
        if self.clock.stepped(mark, busy) and self.called >= 0 and self.phase == READY:
            self.link.send_or_drop(wire.Called(self.called, False, *self.clock.report()))

    def take(self, step: int, wait_s: float = 0.0) -> Grant | None:
        """The grant for this step; ``wait_s`` > 0 waits for one (must=True)."""
        taken: list[Grant] = []

        def look() -> bool:
            taken.extend(filter(None, [self.grants.take(step)]))
            return bool(taken) or self.phase != READY or not self.link.up or self.grants.passed_over(step, time.monotonic())

        self._asking = wait_s > 0
        if self._asking:
            self.clock.waits()
        try:
            self.wait(look, time.monotonic() + wait_s)
        finally:
            self._asking = False
        return taken[0] if taken else None

    def wait(
        self, true: Callable[[], bool], deadline: float, silent_after_s: float | None = None, again: object | None = None
    ) -> None:
        """Until ``true`` (called under the lock), the deadline (monotonic seconds), or a daemon that says nothing any more:
        nobody waits for a stopped one (P5). ``again``: said each ASK_EVERY_S, for a daemon that was restarted, or forgets."""
        quiet_since = time.monotonic()
        patience_s = SILENT_AFTER_S if silent_after_s is None else silent_after_s
        with self.changed:
            while not true():
                left = deadline - time.monotonic()
                heard = max(quiet_since, self.link.heard_at)
                if left <= 0 or time.monotonic() - heard > patience_s:
                    return
                if not self.changed.wait(min(left, ASK_EVERY_S)):
                    self.link.send_or_drop(wire.AskHealth(0))  # any answer will do
                    if again is not None:
                        self.link.send_or_drop(again)

    def not_granted(self, step: int) -> tuple[str, float]:
        """Why there is no grant for this step, as far as we were told (nobody is asked), and since how many seconds."""
        with self.changed:
            quiet_s = self.link.quiet_s
            if self.grants.passed_over(step, time.monotonic()):
                return f"{LARGER}: the other ranks went on meanwhile", 0.0
            if self.outgrown and quiet_s <= SILENT_AFTER_S:
                return self.larger(self.wants_bytes), 0.0  # also where a later step is granted, in a slot that is too small
            later = self.grants.later_than(step)
            if later is not None:
                return f"{GRANTED_AHEAD}: the next snapshot is the first from step {later} on", 0.0
            if not self.waits and quiet_s > SILENT_AFTER_S:
                return f"{SILENT}: nothing was heard of it for {quiet_s:.0f} s", quiet_s
            return self.waits or NO_GRANT_YET, time.monotonic() - self._waits_at

    @property
    def outgrown(self) -> bool:
        """Are there only slots yet that the state has outgrown? Under the lock."""
        live = (slot for number, slot in self.segments.slots.items() if number != self.frozen_slot)
        return self.wants_bytes > 0 and all(slot.capacity < self.wants_bytes for slot in live)

    def larger(self, nbytes: int) -> str:
        """Why a state that needs so many bytes waits: they are being made, or there is no memory, as the daemon has said then."""
        if self.waits.partition(":")[0] == NO_MEMORY:
            return self.waits
        return f"{LARGER}: a snapshot needs {nbytes} bytes"

    def give_up(self, number: int, step: int, reason: str) -> None:
        """A grant that was taken, of a step that is to be taken under another one."""
        with self.changed:
            self.grants.give_up(number, step)
        self.link.send(wire.GaveUp(number, step, brief(reason)))

    def follow(self, handle: Handle) -> None:
        with self.changed:
            self._handles.follow(handle)

    def layout_is_new(self, layout_id: str) -> bool:
        with self.changed:
            new = layout_id not in self._layouts
            self._layouts.extend([layout_id] * new)
            return new

    # --- questions ----------------------------------------------------------------------------------------------
    def ask(self, make: Callable[[int], object], timeout_s: float) -> Any | None:
        """Send a request and wait for its reply; None when there is no daemon or no answer in time. One that hangs is waited for
        once, until it has said a word again or SILENT_AFTER_S is over (P5)."""
        with self.changed:
            asked = time.monotonic()
            if self.link.heard_at < self._in_vain and asked < self._in_vain + SILENT_AFTER_S:
                return None
            self._requests += 1
            number = self._requests
        if not self.link.send(make(number)):
            return None
        with self.changed:
            self.changed.wait_for(lambda: number in self._replies or not self.link.up, timeout_s)
            if number not in self._replies:
                self._in_vain = asked
            return self._replies.pop(number, None)

    @property
    def attainable(self) -> int:
        """The highest protection that the job's failure domains allow."""
        return min(int(self.policy.get("replicas", 0)), self.world.domain_count - 1 if self.world is not None else 0)

    def facts(self) -> dict[str, Any]:
        where = {"phase": self.phase, "epoch": self.epoch, "step": self.called, "newest": newest_of(self.levels)}
        return {"connected": self.link.up, **where}
