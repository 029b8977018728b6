"""restore(): one decision for all ranks, two phases (design D11). Nothing is written before every rank can be; what fails
after that is an error on all ranks, which says whose objects are dirty."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import FailpointError, failpoint
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import memfd_object
from ckptd_client import resolve
from ckptd_client.apply import Objects, Restored
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import State, check_fits, matches
from ckptd_client.garbage import searched_later
from ckptd_client.load import Memory
from ckptd_client.loading import Loading
from ckptd_client.registry import Registry
from ckptd_client.rules import Own
from ckptd_client.segments import Segment
from ckptd_client.session import Session
from ckptd_client.wants import Wanted, wanted
from ckptd_client.world import World

REASON_CHARS_MAX = 12_000  # must fit a frame, whatever its characters
DIRTY = "wholly or partly written, and not by all ranks alike"
DIRTY_HINT = "do not train with what is registered: mend the cause and restore() again, or start the processes anew"

log = logging.getLogger("ckptd")


@dataclass
class Outcome:
    """``step`` None: proven that there is nothing. ``facts``: seconds, bytes by source, remarks; the same keys in either case,
    so that a program can print them without a look at which it is."""

    step: int | None
    facts: dict[str, Any] = field(
        default_factory=lambda: {"epoch": None, "step": None, "mode": "fresh", "bytes": {}, "seconds": {}}
    )
    restored: Restored = field(default_factory=Restored)

    @property
    def told(self) -> dict[str, Any]:
        """What a program sees of it."""
        return {**self.facts, "meta": self.restored.meta, "notes": self.restored.notes}


def _fits(key: str, patterns: Sequence[str]) -> bool:
    return matches(key, patterns) or matches(key.rstrip("."), patterns)


class Restore:
    """One restore() of this rank, after the join was sent."""

    def __init__(
        self,
        session: Session,
        registry: Registry,
        state: State,
        world: World,
        only: Sequence[str] | Callable[[str], bool] | None,
        strict: bool,
        rules: Mapping[str, Own],
    ) -> None:
        self._session, self._registry, self._state, self._world = session, registry, state, world
        self._only, self._strict, self._rules = only, strict, rules
        self._wanted = Wanted()
        self._catalogue: Catalogue | None = None
        self._opened: wire.Opened | None = None
        self._outcome = Outcome(None)
        self._loading: Loading | None = None

    def run(self, deadline: float) -> Outcome:
        """Raises CkptdError when the job cannot be restored, on all ranks alike."""
        while True:
            try:
                message, body, fds = self._session.next_restore(deadline)
            except CkptdError as error:
                raise self._failed(error.what, error.where, error.hint) from error
            try:
                if isinstance(message, wire.Opened):
                    with searched_later():
                        self._offered(message, body)
                elif isinstance(message, wire.LoadPlan):
                    with searched_later():
                        self._load(message, body, fds)
                elif isinstance(message, wire.Failed):
                    raise self._failed(message.reason, message.code, message.hint)
                elif isinstance(message, wire.Ready):
                    return self._outcome
            finally:
                for fd in fds:
                    os.close(fd)

    # --- what is there ------------------------------------------------------------------------------------------
    def _offered(self, message: wire.Opened, body: bytes) -> None:
        """A new round replaces an earlier one: another snapshot, or the same from other sources."""
        self._opened, self._outcome = message, Outcome(None)
        self._outcome.facts["passed_over"] = list(message.errors)
        if message.snapshot is None:
            if message.errors:
                self._session.troubles.report("fresh", f"restore() found nothing: {'; '.join(message.errors)}")
            return
        try:
            self._catalogue = Catalogue.decode(body, self._world.rank)
            for owner in self._registry.of_kind("boxes"):
                owner.value.offered(self._catalogue)
            only = self._selector()
            if self._rules:
                check_fits("rules", list(self._rules), self._known_names(), _fits)
            self._wanted = wanted(
                self._registry, self._state, self._catalogue, self._world, only, self._strict, self._rules
            )
        except CkptdError as error:
            self._refuse(message.round, [str(error)])
            return
        if self._wanted.problems:
            self._refuse(message.round, self._wanted.problems)
            return
        dirty = self._loading is not None and self._loading.dirty
        self._loading = Loading(self._wanted, self._decode, dirty=dirty)
        self._send_object(wire.Wants(message.round), self._wanted.encode())

    def _selector(self) -> Callable[[str], bool] | None:
        """Raises CkptdError naming a pattern that fits nothing: what was asked for would not be loaded, and nobody told."""
        if self._only is None or callable(self._only):
            return self._only
        patterns = list(self._only)
        check_fits("only", patterns or [""], self._known_names(), _fits)
        return lambda key: _fits(key, patterns)

    def _known_names(self) -> set[str]:
        """What is in the snapshot, or registered here."""
        assert self._catalogue is not None, "it has been read"
        known = {*self._catalogue.tensors, *self._catalogue.objects, *self._catalogue.aliases}
        known |= {entry.key for entry in self._state.entries}
        for owner in self._registry.owners.values():
            known.update(resolve.object_names(owner, self._state))
        return known

    def _refuse(self, round_: int, problems: list[str]) -> None:
        told = self._session.troubles.all_of("restore", problems)
        text = f"{len(problems)} mismatches, by cause: {told}" if len(problems) > 1 else f"1 mismatch: {told}"
        if len(text) > REASON_CHARS_MAX:
            text = text[:REASON_CHARS_MAX] + " ... (cut)"
        self._session.link.send(wire.WantsRefused(round_, "mismatch", text))

    def _send_object(self, message: object, body: bytes) -> None:
        fd = memfd_object(body)
        try:
            self._session.link.send(message, [fd])
        finally:
            os.close(fd)

    # --- loading ------------------------------------------------------------------------------------------------
    def _load(self, message: wire.LoadPlan, body: bytes, fds: list[int]) -> None:
        opened, loading = self._opened, self._loading
        if opened is None or opened.snapshot is None or loading is None or message.round != opened.round:
            return
        began = time.monotonic()
        try:
            failpoint("restore.load")
            plan = msgpack.unpackb(body, strict_map_key=False, use_list=False)
            memory = Memory(fds, message.segment_bytes, self._known)
            try:
                last = loading.take(plan, memory)
            finally:
                memory.close()
            if last:
                self._finish(loading, opened.snapshot[1])
        except Exception as error:  # whatever it was, the other ranks must hear of it
            if not isinstance(error, CkptdError | FailpointError | ValueError | OSError):
                log.exception("ckptd client: loading the snapshot")
            dirty = "its objects are dirty: " if loading.dirty else ""
            reason = f"{dirty}{_told(error)}"[:REASON_CHARS_MAX]
            seconds = loading.load_s + time.monotonic() - began
            self._session.link.send(wire.Loaded(message.round, False, reason, seconds))
            return
        loading.load_s += time.monotonic() - began
        if not last:
            self._session.link.send(wire.LoadedPart(message.round, int(plan.get("part", 0))))
            return
        self._outcome.step = opened.snapshot[1]
        self._outcome.facts |= {
            "epoch": opened.snapshot[0],
            "step": opened.snapshot[1],
            "mode": loading.mode,
            "bytes": loading.bytes,
            "seconds": {**loading.seconds, "load": loading.load_s},
        }
        failpoint("restore.loaded")
        self._session.link.send(wire.Loaded(message.round, True, "", loading.load_s))

    def _known(self, fd: int, nbytes: int) -> Segment | None:
        with self._session.changed:
            return self._session.segments.find(fd, nbytes)

    def _decode(self, plan: dict[str, Any], memory: Memory) -> Objects:
        assert self._catalogue is not None, "wants come after the catalogue"
        return Objects(
            self._registry, self._state, self._world, self._catalogue, self._wanted, plan, memory
        )

    def _finish(self, loading: Loading, step: int) -> None:
        """All tensors are written."""
        assert loading.objects is not None, "decoded before the first write"
        restored = loading.objects.apply(step)
        restored.notes += self._wanted.notes
        for note in restored.notes:
            log.info("ckptd job %s: %s", self._session.job, note)
        left_out = self._wanted.left_out
        if left_out:
            told = self._session.troubles.all_of("left out of the restore", left_out)
            log.warning("ckptd job %s: step %d was restored without %d: %s", self._session.job, step, len(left_out), told)
        passed = self._outcome.facts["passed_over"]
        if self._world.rank == 0 and any(text.startswith("step ") for text in passed):  # the same on all ranks
            log.warning("ckptd job %s: step %d was restored and no newer one: %s", self._session.job, step, "; ".join(passed))
        for text in self._wanted.warnings:
            log.warning("ckptd job %s: %s", self._session.job, text)
        restored.notes += left_out + self._wanted.warnings
        self._outcome.restored = restored

    def _failed(self, what: str, where: str, hint: str) -> CkptdError:
        """Says so when this rank's objects were written to: they are of no step any more that all ranks share."""
        if self._loading is not None and self._loading.dirty:
            what = f"{what}; the objects registered on rank {self._world.rank} are dirty: {DIRTY}"
            hint = hint or DIRTY_HINT
        return CkptdError(what, where=where, hint=hint)


def _told(error: Exception) -> str:
    """In one line, with its remedy: another rank raises it with words of its own behind."""
    if not isinstance(error, CkptdError):
        return str(error) or type(error).__name__
    return error.what + (f" [{error.where}]" if error.where else "") + (f"; {error.hint}" if error.hint else "")


def current_state(registry: Registry) -> State:
    """What is registered now. Raises CkptdError when nothing is."""
    if not registry.owners:
        raise CkptdError(
            "nothing is registered", hint="call register(model=..., optimizer=...) before restore()"
        )
    return resolve.tensors(registry, loading=True)
