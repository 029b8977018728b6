"""The client as a training loop sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from ckptd.wire.names import job_key
from ckptd_client import (
    accelerator,
    autostart,
    fence,
    graphs,
    nested,
    resolve,
    rules_file,
    sockets,
    versions,
    watch,
)
from ckptd_client.apply import Restored
from ckptd_client.capture import Engine
from ckptd_client.explicit import Explicit
from ckptd_client.handles import LEVELS, RELEASED, Handle, given_up, reached, step_of
from ckptd_client.joining import Joiner
from ckptd_client.own_values import OwnValues
from ckptd_client.registering import Registering
from ckptd_client.registry import Registry
from ckptd_client.releasing import Releasing
from ckptd_client.rendezvous import NoDaemon
from ckptd_client.restore import Outcome, Restore, current_state
from ckptd_client.rules import Own
from ckptd_client.session import JOINING, READY, Session
from ckptd_client.snapshots import Snapshots
from ckptd_client.steering import Steering
from ckptd_client.stepclock import CALLS
from ckptd_client.troubles import HealthReport, Troubles

CONNECT_TIMEOUT_S = 5.0  # a daemon that runs answers at once; one that is stopped does not
JOIN_TIMEOUT_S, RESTORE_TIMEOUT_S = 300.0, 600.0  # when the daemon names no others
RESTORE_GRACE_S = 30.0  # beyond the daemons' own timeout: it is they who shall say what failed
FENCE_TIMEOUT_S = 60.0  # when the daemon names no other
MUST_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 600.0
EXIT_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 5.0
CAPTURE_LONG_S = 60.0  # of a graph; while one lasts, no copy is looked for
FORKED = "this process was forked from the one that connected"


class Client(Registering, Explicit, Releasing):
    """One rank of one job. Made by ``connect``; use it in a ``with`` block. Its methods, but release(), are the training thread's.

    A forked child (a loader's worker) has no part in it: there snapshots are skipped, ``restore`` and ``steps`` raise CkptdError,
    waits return "unreachable: ..." and what fences does nothing."""

    def __init__(self, job: str, path: str, *, must_timeout_s: float, state_bytes: int | None) -> None:
        self.job = job
        self.last_restore: dict[str, Any] = {}
        self.values: dict[str, Any] = {}  # registered plain values as restored
        self._jobs = {}
        self._pid = os.getpid()
        self._closed = False
        self._connect_timeout_s = CONNECT_TIMEOUT_S
        self._troubles = Troubles(job)
        self._registry = Registry()
        self._session = Session(path, job, self._troubles)
        self._joiner = Joiner(self._session, self._registry, self._troubles, state_bytes)
        self._engine = Engine(self._sealed, self._void)
        self._snapshots = Snapshots(self._session, self._engine, self._registry, self._joiner, self._troubles, must_timeout_s)
        self._steering = Steering(self._registry, self._troubles)
        self._must_timeout_s = must_timeout_s
        self._last: Handle | None = None  # newest snapshot that was taken
        self._newest: Handle | None = None  # what wait() is about: of the newest call
        self._asked = dict[str, Any](), False  # meta and keep of ``_last``
        self._session.stop_capture = self._engine.stop
        self._session.connection_lost = lambda lost: self._engine.stop_connection(lost, "connection to the daemon lost")
        self._session.written_there = self._registry.were_written
        self._session.slot_mapped = self._engine.warm
        self._own_values = OwnValues(self._registry, self._troubles)
        self._session.own_values = self._own_values.differ

    @classmethod
    def connect(
        cls,
        job: str,
        socket: str | os.PathLike[str] | None = None,
        *,
        required: bool = False,
        start_daemon: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        must_timeout_s: float = MUST_TIMEOUT_S,
        state_bytes: int | None = None,
    ) -> Client:
        """Find the daemon at ``socket``, CKPTD_SOCKET or where `ckptd run` listens; before or after init_process_group.

        Without a daemon training runs unprotected until one appears, unless ``required``: then CkptdError. ``start_daemon``
        (or CKPTD_AUTOSTART=1): local rank 0 starts one. ``state_bytes``: payload of one snapshot of this rank, when the
        prediction of optimizer state that is not born yet is known to be wrong. Raises CkptdError for a job name that could
        not be a directory.
        """
        job_key(os.geteuid(), job)
        starts = autostart.wanted(start_daemon)
        path = os.fspath(socket) if socket is not None else sockets.default(to_start=starts)
        client = cls(job, path, must_timeout_s=must_timeout_s, state_bytes=state_bytes)
        client._connect_timeout_s = timeout_s
        if starts:
            client._start_daemon(path, required)
        client._session.link.start()
        up = client._session.wait_up(timeout_s if required or autostart.listening(path) else 0.0)
        if not up:
            client._no_daemon(required)
        fence.join(client)
        watch.install()
        return client

    def _start_daemon(self, path: str, required: bool) -> None:
        try:
            autostart.ensure(path)
        except (CkptdError, OSError) as error:
            if required:
                raise
            self._troubles.report("start", f"not protected: {error}")

    def _no_daemon(self, required: bool) -> None:
        link = self._session.link
        refused = link.refused
        if required:
            link.close(None)
            if refused is not None:
                raise CkptdError(refused.what, where=refused.where, hint=refused.hint)
            raise CkptdError(link.trouble, where=link.path, hint="start `ckptd run` on this node")
        self._troubles.report("daemon", f"not protected: {link.trouble}")

    @property
    def _gone(self) -> str:
        """Why nothing can be done here; "" while it can. A forked child has our objects without the threads and memory that they
        speak of, and a lock of theirs may be held for ever: ask this before anything that takes one."""
        if os.getpid() != self._pid:
            return FORKED
        return "the client is closed" if self._closed else ""

    @property
    def node(self) -> dict[str, Any] | None:
        """How the daemon of this node is reached, for ``open(nodes=)`` elsewhere. None: it has not been heard of yet."""
        return self._session.node

    def _check_here(self) -> None:
        if self._gone:
            raise CkptdError(self._gone, where=self.job, hint="call Client.connect() in this process, or ask where it was called")

    # --- restoring ----------------------------------------------------------------------------------------------
    def restore(
        self,
        step: int | None = None,
        source: str | None = None,
        only: Sequence[str] | str | None = None,
        strict: bool = True,
        allow_fresh: bool = False,
        rules: Mapping[str, Own] | str | os.PathLike[str] | None = None,
    ) -> int | None:
        """Load the newest recoverable snapshot (or ``step``) into the registered objects; all ranks call it alike.

        Returns its step, None only when it is proven that the job has none and no ``step`` was asked for. source: None,
        "memory" or "durable". only: shell patterns of whole keys to load (``model.*``), each of which must fit one. After
        ``step=`` the job goes on from there: what lies beyond it is not restored any more, and goes with the next retention
        unless kept. strict=False: load what fits; what is left out is in the log and in ``last_restore["notes"]``.
        allow_fresh=True: None instead of an error when nothing can be reached or recovered. rules: {pattern: own("mean")} or a TOML
        file's path, what becomes of values that each rank had for itself where the world has another size now. Raises CkptdError on
        all ranks; nothing is written unless all can load, and the error says so when a rank's objects are dirty all the same.
        ``last_restore["mode"]``: "verified", "direct" (the daemon had no room for all bytes at once), "fresh", or "no daemon".
        """
        step = None if step is None else step_of(step)
        if source not in (None, "memory", "durable"):
            raise ValueError(f'source is None, "memory" or "durable", not {source!r}')
        self._check_here()
        patterns = [only] if isinstance(only, str) else only
        return self._restore(step, source, patterns, strict, allow_fresh, rules_file.given_own(rules))

    def _restore(
        self, step: int | None, source: str | None, only: Sequence[str] | Callable[[str], bool] | None, strict: bool,
        allow_fresh: bool, rules: Mapping[str, Own] = MappingProxyType({}),
    ) -> int | None:  # fmt: skip
        if graphs.captured_s() is not None or accelerator.capturing():
            raise CkptdError("restore() within a graph's capture", hint="restore before it, or after its end")
        session = self._session
        session.wait_up(self._connect_timeout_s)
        state = current_state(self._registry)
        self._engine.fence(self._fence_timeout_s)
        self._engine.drain(self._fence_timeout_s)
        deadline = time.monotonic() + self._restore_limit_s()
        self._snapshots.restore_failed = True  # until this one is over
        from ckptd.core.protocol import messages  # only who restores needs it

        try:
            ask = asdict(messages.RestoreAsk(step, source, allow_fresh))
            world = self._joiner.now(resolve.whole(self._registry, state), ask, session.link.trouble, deadline)
        except NoDaemon as error:
            if not allow_fresh:
                raise
            self._troubles.pass_on(f"restore() begins anew, whatever memory and storage have of this job: {error.what}", "")
            self.last_restore = {**Outcome(None).told, "mode": "no daemon", "passed_over": [error.what]}
            self._snapshots.restore_failed = False
            return None
        outcome = self._run_restore(Restore(session, self._registry, state, world, only, strict, rules), deadline)
        self.last_restore = outcome.told
        self.values = outcome.restored.values
        self._last = self._newest = None
        self._snapshots.begin_anew(state, outcome.step)
        return outcome.step

    def _restore_limit_s(self) -> float:
        """Until all have joined; while what cannot be reached is decided upon anew; and the last try."""
        policy = self._session.policy
        join_s, restore_s = policy.get("join_timeout_s", JOIN_TIMEOUT_S), policy.get("restore_timeout_s", RESTORE_TIMEOUT_S)
        return float(join_s) + 2 * float(restore_s) + RESTORE_GRACE_S

    def _run_restore(self, restore: Restore, deadline: float) -> Outcome:
        try:
            with torch.inference_mode(False):  # what is made anew is trained with later
                outcome = restore.run(deadline)
        except BaseException as error:
            self._session.left(error)
            raise
        self._session.left(None)
        return outcome

    # --- snapshots ----------------------------------------------------------------------------------------------
    def snapshot(
        self, step: int, meta: dict[str, Any] | None = None, keep: bool = False, must: bool = False
    ) -> Handle:
        """Capture the registered state as of now; returns at once, and never raises for a checkpoint's sake.

        The next optimizer step waits if it must. keep: retention never deletes this one, until ``release``. must: wait, for at most
        ``must_timeout_s`` of connect(), until this step may be captured instead of skipping it, and, when an earlier call has
        captured it here, until all ranks have. A daemon that is away is waited for in its first 15 seconds only.
        A second call for a step that is captured returns the same handle. When registered state has changed since, or it asks
        for a keep or meta that the first had not, its handle is "failed: captured before under this step, ..." with the remedy.
        meta: given back by a restore in ``last_restore``. Raises TypeError when ``step`` is no integer (numpy's and torch's are),
        and ValueError when it is none of 0 to 2^53.
        """
        step = step_of(step)
        handle = Handle(step, "capturing", self._wait_for_handle, away=self._session.is_away)
        self._newest = handle
        if keep:
            self._attainable("durable")  # who has no storage is told
        last, began = self._last, time.monotonic()
        if last is not None and last.step == step and last.taken and not self._gone:
            if must:
                # A rank that could not take part in that capture asks for another one, and waits for us to ask as well.
                self._wait_for_handle(last, "sealed", self._must_timeout_s)
            if last.taken:
                return self._again(handle, last, meta or {}, keep)
        left_s = self._must_timeout_s - (time.monotonic() - began)
        self._take(handle, meta or {}, keep=keep, must=must, wait_s=left_s)
        return handle

    def _again(self, handle: Handle, last: Handle, meta: dict[str, Any], keep: bool) -> Handle:
        """Its step is captured already."""
        if self._snapshots.changed(handle):
            return handle
        self._newest = last
        return handle if self._snapshots.lacks(handle, meta, keep) else last

    def _take(self, handle: Handle, meta: dict[str, Any], **how: Any) -> None:
        if self._gone:
            handle.became(f"skipped: {self._gone}")
            return
        if accelerator.capturing():  # the copies would be made at each replay, and none of them now
            handle.became("skipped: a graph is being captured")
            return
        self._session.stepped(CALLS, not self._engine.idle)
        self._snapshots.take(handle, meta, **how)
        if handle.taken:
            self._last, self._asked = handle, (meta, how["keep"])
            self._steering.look()

    def communication(self) -> AbstractContextManager[None]:
        """Mark what a step spends on the network: with the daemon's ``pacing = "windows"`` copies are sent between the marks
        only. Cheap, and without effect otherwise.

        On an accelerator mark what the host waits for; a collective that is only enqueued says nothing of when it runs.
        """
        return self._session.clock.communication()

    def fence(self) -> None:
        """Call it before writing by hand what was registered with ``fenced=True``: returns once the bytes are out."""
        if not self._gone:
            self._snapshots.progress.fenced()
            self.hold()

    def hold(self) -> None:
        """Called by the hook before an optimizer writes. What is being captured into a graph writes at its replays."""
        if accelerator.capturing():
            graphs.writes()
        elif not self._gone and not self._engine.idle:
            self._engine.fence(self._fence_timeout_s)

    def reads(self, written: Sequence[torch.Tensor | torch.UntypedStorage]) -> bool:
        return not self._gone and not self._engine.idle and self._engine.reads(written)

    def stepped(self) -> None:
        """Call it after each step that is made without calling a torch optimizer's ``step()``: a replayed graph, an optimizer of
        one's own. Else its snapshots are skipped: nobody saw that training moved on. Call ``fence()`` before each such step too,
        and captures overlap with training; without it what was registered is copied before ``snapshot()`` returns."""
        if not self._gone:
            self._session.stepped(CALLS, not self._engine.idle)
            self._session.close_step()
            if self._snapshots.progress.stepped():
                self._engine.stop_unfenced("a step was made before fence() was called")

    def before_step(self, optimizer: Optimizer) -> None:
        """Called by the hook when an optimizer's step begins; ``hold`` follows before that step writes."""
        if not self._gone:
            self._session.stepped(id(optimizer), not self._engine.idle)
            self._session.close_step()

    def counters(self) -> list[tuple[int, int]]:
        """Asked before and after a graph is captured: does it write what only a fence protects?"""
        return [] if self._gone else versions.of_what_is_fenced(self._registry)

    def not_fenced(self, optimizer: Optimizer) -> None:
        """This optimizer is replayed by a graph: what it writes is copied before snapshot() returns from now on."""
        for owner in self._registry.of_kind("optimizer"):
            if optimizer in nested.optimizers(owner.value):
                owner.captured = True

    @property
    def _fence_timeout_s(self) -> float:
        return float(self._session.policy.get("fence_timeout_s", FENCE_TIMEOUT_S))

    def _sealed(self, job: Any) -> None:
        self._snapshots.sealed(job)

    def _void(self, job: Any, reason: str) -> None:
        self._snapshots.void(job, reason)

    # --- waiting ------------------------------------------------------------------------------------------------
    def wait(self, level: str = "durable", timeout: float | None = None) -> str:
        """Wait until the snapshot of the newest call has reached ``level`` ("sealed", "protected", "durable"), at most ``timeout``
        seconds. Returns its status then, never that of an older step; "unreachable" without a daemon, "nothing to wait for"
        before a first snapshot(). What was skipped or failed is told at once: nothing is captured late, as the state may be
        another by now; ``snapshot(step, must=True)`` waits for its turn. What became void is captured again while all that is
        registered is as it was. Where the daemon has no storage "protected" is waited for, with a warning."""
        if level not in LEVELS:
            raise ValueError(f"level is one of {LEVELS}, not {level!r}")
        if self._gone:
            return self._left(self._newest, level)
        deadline = time.monotonic() + (WAIT_TIMEOUT_S if timeout is None else timeout)
        while True:
            handle = self._newest
            if handle is None:
                return self._ended(level, None, "unreachable" if not self._session.link.up else "nothing to wait for")
            status = self._reach(handle, level, deadline)
            if status.startswith(("skipped", "failed")):
                return self._ended(level, handle, status if self._session.link.up else "unreachable")
            # Also where its daemon was lost: it may be back soon.
            if not status.startswith("void") or given_up(status) or time.monotonic() >= deadline:
                return self._ended(level, handle, status)
            changed = self._snapshots.since(handle)
            if changed:
                return self._ended(level, handle, status, f"; it is not captured again, as the state has changed since: {changed}")
            self._captures_again(handle, deadline)

    def _captures_again(self, void: Handle, deadline: float) -> None:
        again = self._newest = Handle(void.step, "capturing", self._wait_for_handle, away=self._session.is_away)
        self._snapshots.wait_joined(deadline)
        meta, keep = self._asked
        self._take(again, meta, keep=keep, must=True, wait_s=deadline - time.monotonic())
        void.goes_on_as(again)

    def _wait_for_handle(self, handle: Handle, level: str, timeout: float | None) -> str:
        if level not in LEVELS:
            raise ValueError(f"level is one of {LEVELS}, not {level!r}")
        if self._gone:
            return self._left(handle, level)
        deadline = time.monotonic() + (WAIT_TIMEOUT_S if timeout is None else timeout)
        return self._ended(level, handle, self._reach(handle, level, deadline))

    def _left(self, handle: Handle | None, level: str) -> str:
        """Nobody tells us any more: what was reached before is known, and nothing else."""
        if handle is not None and handle.status == RELEASED and self._gone != FORKED:
            return RELEASED
        if handle is None or self._gone == FORKED or not reached(handle.fact, level, self._session.attainable):
            return f"unreachable: {self._gone}"
        return handle.status

    def _reach(self, handle: Handle, level: str, deadline: float) -> str:
        session = self._session
        session.clock.waits()
        if handle.taken:
            self._engine.settle(deadline)
        level = self._attainable(level)
        ask = wire.WaitFor(handle.step, handle.grant, level)
        if handle.taken:
            session.link.send(ask)

        def over() -> bool:
            ended = not handle.taken or handle.left or handle.status == RELEASED
            return ended or reached(handle.fact, level, session.attainable)

        session.wait(over, deadline, again=ask)
        return handle.status

    def _ended(self, level: str, handle: Handle | None, status: str, more: str = "") -> str:
        """Not everybody looks at what a wait returns (P15). That nothing was taken for want of a daemon has been said."""
        over = handle is None and self._session.called < 0  # a run that had ended when it was started again makes no step
        found = handle.fact if handle is not None else None
        if over or reached(found, self._attainable(level), self._session.attainable):
            return status
        step = f"step {handle.step} is " if handle is not None else ""
        if handle is not None and status.startswith("skipped") and self._session.phase in (JOINING, READY):
            more = f"; snapshot({handle.step}, must=True) waits for its turn"
        if self._session.link.up:
            self._troubles.pass_on(f"wait({level!r}) ended otherwise: {step}{status}{more}", "")
        elif handle is not None and handle.taken and status != RELEASED:  # what it was nobody knows it to be now
            text = f"{step}{status} as far as the daemon had said, and the daemon is unreachable"
            self._troubles.pass_on(f"wait({level!r}) ended otherwise: {text}", "")
            return "unreachable"
        return status

    def _attainable(self, level: str) -> str:
        """Nobody waits for storage that is not there."""
        if level != "durable" or self._session.policy.get("durable", True):
            return level
        self._troubles.report("storage", "nothing becomes durable: the daemon has no storage root (ckptd run --storage-root DIR)")
        return "protected"

    def steps(self) -> list[dict[str, Any]]:
        """The newest 400 snapshots that the daemon knows, in memory and on storage: dicts with epoch, step, level, wanted, durable,
        where; of storage keep, damaged, without, abandoned (the job went back before it). Raises CkptdError without a daemon."""
        self._check_here()
        reply = self._session.ask(wire.ListSteps, ANSWER_TIMEOUT_S)
        if not isinstance(reply, wire.Steps):
            raise CkptdError("the daemon does not answer", where=self._session.link.path, hint="see client.health()")
        return reply.rows

    def health(self) -> HealthReport:
        """What keeps this rank from being protected, ours and the daemon's words. Never raises; waits 5 s once if it hangs."""
        if self._gone:
            return HealthReport(False, [f"not protected: {self._gone}"])
        session = self._session
        reply = session.ask(wire.AskHealth, ANSWER_TIMEOUT_S)
        problems = self._troubles.problems()
        device_s = accelerator.stalled_s()
        ours = {"fence_s": self._engine.fenced_s + device_s, "device_fence_s": device_s, "own": self._own_values.without_rule}
        synchronous = {name: owner.synchronous for name, owner in self._registry.owners.items() if owner.synchronous}
        captured_s = graphs.captured_s()
        if captured_s is not None and captured_s > CAPTURE_LONG_S:
            problems.append(f"a graph has been captured for {captured_s:.0f} s, and snapshots wait for its capture_end()")
        facts = session.facts() | ours | {"lost": self._troubles.losses(), "synchronous": synchronous}
        if isinstance(reply, wire.Health):
            problems += [text for text in reply.problems if text not in problems]
            facts["daemon"] = reply.facts
        elif session.link.up:
            problems.append("the daemon does not answer")
        elif not problems:
            problems.append(f"not protected: {session.link.trouble}")
        return HealthReport(not problems, problems, facts)

    # --- the end ------------------------------------------------------------------------------------------------
    def close(self, *, finished: bool = True) -> None:
        """Leave. finished=False: the job did not end well, its memory is kept for whoever comes next."""
        if self._gone:
            return
        self._closed = True
        self._close_named(finished)
        fence.leave(self)
        self._joiner.give_up()
        self._engine.close()
        self._session.link.close(wire.Goodbye(finished))
        self._session.segments.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Without an exception: the newest snapshot is waited for (bounded) until it is protected."""
        if kind is None and not self._gone and self._last is not None and self._session.link.up:
            self._engine.settle(time.monotonic() + self._fence_timeout_s)
            self._engine.drain(self._fence_timeout_s)
            self._wait_for_handle(self._last, "protected", EXIT_TIMEOUT_S)
        self.close(finished=kind is None)


__all__ = ["Client", "Handle", "HealthReport", "Restored"]
