"""The restore phases of one job on this node (design D11): tell the ranks what the snapshot holds, take their wants, bring
every slice into local memory and verify it, vote, let them load, clean up."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.daemon.local_slots import RankSlots
from ckptd.daemon.meter import check_seconds
from ckptd.daemon.rebuild_host import RebuildHost
from ckptd.daemon.services import Services, log
from ckptd.recover.handover import DIRECT, Frame, Handover
from ckptd.recover.host import Unrecoverable
from ckptd.recover.rebuild import Rebuild
from ckptd.recover.stored import is_away
from ckptd.recover.wants import WANTS_BYTES_MAX, Wants
from ckptd.wire import rank as wire
from ckptd.wire.rank_link import RankSession
from ckptd.wire.seqpacket import memfd_object

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

NO_STORAGE = "; this daemon has no storage_root to look into"
HINTS = {
    "unreachable": "bring the missing daemons or the storage back; restore(step=...) takes an older step, allow_fresh=True none",
    "unrecoverable": "`ckptd ls` shows what exists",
    "mismatch": "register the same objects as when the snapshot was taken, or use only=/strict=False/key_map",
    "timeout": "look at the logs of ranks and daemons for who went or did not answer; join_timeout_s bounds the wait for ranks, "
    "restore_timeout_s that for the restore",
    "memory": "raise memory_budget, or restore into more nodes",
    "superseded": "another start of this job took over; stop this one",
    "left": "a rank, or its node's daemon, died during the restore: start the job again",
    "internal": "the daemon's log has the trace; please report it",
    "damage": "`ckptd status` names the damaged copies; an older step may be asked for with restore(step=...)",
}
PROBLEMS_TOLD_MAX = 4  # of links to other daemons, with the end of a start that waited for them
DIRTY = "it had begun to write when the rest of its slices could not be had, its objects are dirty: {what}"


@dataclass
class Loading:
    """One rank's load plans. ``plan``: a memfd of the next one, made before the vote. ``going``: every rank voted yes, the rank may
    write. ``bringing``: the next part is under way."""

    handover: Handover
    frame: Frame
    plan: int
    going: bool = False
    bringing: bool = False

    def release(self) -> None:
        self.handover.release()
        if self.plan >= 0:
            os.close(self.plan)


@dataclass
class Round:
    """One offer of one snapshot to the local ranks. ``waiting``: they owe their wants, or their slices are being fetched."""

    do: ins.PrepareRestore
    host: RebuildHost
    started: float
    waiting: set[int]
    rebuild: Rebuild | None = None
    asked: set[int] = field(default_factory=set)
    ready: dict[int, Loading] = field(default_factory=dict)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)


class Restore:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self._round: Round | None = None
        self._attempts: dict[int, str] = {}  # rank -> attempt it waits in
        self._joined_at: dict[str, float] = {}

    def joining(self, rank: int, attempt: str) -> None:
        self._attempts[rank] = attempt
        self._joined_at.setdefault(attempt, self._services.now())

    # --- the machine's instructions -----------------------------------------------------------------------------
    def prepare(self, do: ins.PrepareRestore) -> None:
        self._drop_round()
        host = RebuildHost(self._services, self._job, do.record)
        self._round = Round(do, host, self._services.now(), set(do.ranks))
        joined_at = self._joined_at.get(do.record.nonce)
        if joined_at is not None:
            self._job.meter.decided(self._round.started - joined_at)
        if do.snapshot is None:
            for rank in do.ranks:
                self._tell(rank, wire.Opened(do.record.number, do.round, None, list(do.errors)))
            return  # Ready follows with FinishRestore, when every node is in the epoch
        if do.durable:
            host.pass_on(f"{do.record.number}/{do.round}/{do.record.nonce}")
        if do.errors:
            log.warning("job=%s epoch=%d restores %s: %s", self._job.job, do.record.number, do.snapshot, "; ".join(do.errors))
        self._spawn(self._offer(self._round), "offer")

    def load_now(self, do: ins.LoadNow) -> None:
        current = self._current(do.round)
        if current is None:
            return
        for rank, loading in sorted(current.ready.items()):
            loading.going = True
            self._send_plan(rank, do.round, loading)

    def fail_join(self, do: ins.FailJoin) -> None:
        ranks = [rank for rank, attempt in self._attempts.items() if attempt == do.attempt]
        for rank in ranks:
            del self._attempts[rank]
        self._refuse(do.attempt, ranks, do.code, do.reason)

    def fail(self, do: ins.FailRestore) -> None:
        current = self._current(do.round)
        if current is not None:
            self._refuse(current.do.record.nonce, self._still_theirs(current), do.code, do.reason)
        self._drop_round()

    def _refuse(self, attempt: str, ranks: list[int], code: str, reason: str) -> None:
        if self._joined_at.pop(attempt, None) is None:
            return  # of the attempt's end and its round's the first is told: behind it a rank stands at its next restore()
        self._services.complaints.say(f"job={self._job.job}", f"restore refused: {reason} [{code}]")
        if code == "timeout":  # a daemon of another release is never heard of by the core
            others = [problem.text for problem in self._services.health.problems() if problem.kind == "control"]
            reason = "; ".join([reason, *others[:PROBLEMS_TOLD_MAX]])
        for rank in ranks:
            self._tell(rank, wire.Failed(code, reason, self._hint(code)))

    def _hint(self, code: str) -> str:
        without = code == "unrecoverable" and not self._services.policy.durable
        return HINTS.get(code, "") + (NO_STORAGE if without else "")

    def finish(self, do: ins.FinishRestore) -> None:
        current = self._current(do.round)
        if current is not None:
            for rank in self._still_theirs(current):
                self._tell(rank, wire.Ready(current.do.record.number))
            self._joined_at.pop(current.do.record.nonce, None)
        self._drop_round()

    def _still_theirs(self, current: Round) -> list[int]:
        """Ranks whose process stands in this round: a rank may be a later start's by now, which it is not the end of."""
        nonce = current.do.record.nonce
        return [rank for rank in current.do.ranks if self._attempts.get(rank, nonce) == nonce]

    def abandon(self) -> None:
        """The ranks come back by themselves."""
        self._attempts.clear()
        self._joined_at.clear()
        self._drop_round()

    # --- the ranks' answers -------------------------------------------------------------------------------------
    def on_message(self, session: RankSession, own: RankSlots, message: Any, fds: list[int]) -> None:
        """Raises ValueError for what no rank says."""
        current = self._current(getattr(message, "round", -1))
        if current is None or own.rank not in current.waiting | set(current.ready):
            return
        if isinstance(message, wire.Wants) and fds:
            if own.rank in current.asked:
                return  # once per round: its first answer is being looked for, or there
            current.asked.add(own.rank)
            try:
                fd = os.dup(fds[0])
            except OSError as error:
                self._failed(current, own.rank, error)
                return
            self._spawn(self._assemble(current, own.rank, fd), f"restore rank {own.rank}")
        elif isinstance(message, wire.WantsRefused):
            current.waiting.discard(own.rank)
            self._job.feed(ev.RankFetched(own.rank, current.do.round, False, message.code, message.reason))
        elif isinstance(message, wire.Loaded):
            check_seconds(message.seconds)
            self._loaded(current, own.rank, message)
        elif isinstance(message, wire.LoadedPart):
            self._loaded_part(current, own.rank, message)

    def _loaded_part(self, current: Round, rank: int, message: wire.LoadedPart) -> None:
        """What comes twice, or is of a part that the rank has not, brings nothing."""
        loading = current.ready.get(rank)
        if loading is None or not loading.going or loading.bringing or loading.handover.last:
            return
        if message.part == loading.handover.part:
            loading.bringing = True
            self._spawn(self._next_part(current, rank, loading), f"next part for rank {rank}")

    def _loaded(self, current: Round, rank: int, message: wire.Loaded) -> None:
        loading = current.ready.get(rank)
        if loading is not None and message.ok and not loading.handover.last:
            message = replace(message, ok=False, reason="it said that all is loaded before it was")
        if loading is not None:
            seconds = {**loading.handover.seconds, "load": message.seconds}
            outcome = "ok" if message.ok else "failed"
            self._services.metrics.restored(self._job.job, outcome, loading.handover.bytes_by_source, seconds)
            if message.ok:
                self._job.meter.restored(loading.handover.bytes_by_source, seconds)
        failpoint("restore.done")
        self._job.feed(ev.RankLoaded(rank, current.do.round, message.ok, message.reason))

    async def _offer(self, current: Round) -> None:
        do = current.do
        try:
            current.rebuild = await self._services.in_work(Rebuild, current.host, do)
            fd = memfd_object(await current.rebuild.catalogue())
        except Exception as error:  # whatever it is, all ranks of the job wait for this vote
            for rank in do.ranks:
                self._failed(current, rank, error)
            return
        assert do.snapshot is not None, "nothing to offer otherwise"
        opened = wire.Opened(
            do.record.number, do.round, [do.snapshot.epoch, do.snapshot.step], list(do.errors)
        )
        for rank in do.ranks:
            self._tell(rank, opened, [fd])
        os.close(fd)

    async def _assemble(self, current: Round, rank: int, fd: int) -> None:
        """``fd``: of its wants, which it takes."""
        started = self._services.now()
        try:
            assert current.rebuild is not None, "wants come after the offer"
            wants = await self._services.read_object(self._job.uid, fd, WANTS_BYTES_MAX, Wants.decode)
            handover = await current.rebuild.assemble(rank, wants)
        except Exception as error:  # whatever it is, all ranks of the job wait for this vote
            self._failed(current, rank, error)
            return
        decide = current.started - self._joined_at.get(current.do.record.nonce, current.started)
        handover.seconds = {"decide": decide, "transfer": self._services.now() - started}
        if handover.mode == DIRECT:
            log.warning("job=%s no room for all of rank %d's slices: direct mode", self._job.job, rank)
        try:
            frame = await self._services.in_work(handover.frame)
            loading = Loading(handover, frame, memfd_object(frame.plan))
        except Exception as error:
            handover.release()
            self._failed(current, rank, error)
            return
        except BaseException:
            handover.release()
            raise
        if self._round is current:
            current.ready[rank] = loading
            self._fetched(current, rank, True)
        else:
            loading.release()

    async def _next_part(self, current: Round, rank: int, loading: Loading) -> None:
        """The rank has begun to write: what fails here cannot be undone, and is said on all ranks."""
        started, handover = self._services.now(), loading.handover
        try:
            await handover.advance()
            handover.seconds["transfer"] += self._services.now() - started
            loading.frame = await self._services.in_work(handover.frame)
            loading.plan = memfd_object(loading.frame.plan)
        except Exception as error:  # whatever it is, all ranks of the job wait for this rank
            log.error("job=%s part %d of rank %d", self._job.job, handover.part, rank, exc_info=error)
            what = error.what if isinstance(error, CkptdError) else str(error) or repr(error)
            if self._round is current:
                said = wire.Loaded(current.do.round, False, DIRTY.format(what=what))
                self._loaded(current, rank, said)
            return
        loading.bringing = False
        if self._round is current:
            self._send_plan(rank, current.do.round, loading)

    def _failed(self, current: Round, rank: int, error: Exception) -> None:
        code = "internal"
        if isinstance(error, Unrecoverable):
            code = error.code
            log.warning("job=%s restore of rank %d: %s: %s", self._job.job, rank, code, error.what)
        elif isinstance(error, CkptdError | OSError | ValueError):
            code = "unreachable" if is_away(error) else "damage"
            log.warning("job=%s restore of rank %d: %s: %s", self._job.job, rank, code, str(error) or repr(error))
        else:
            self._services.went_wrong(f"restore of rank {rank} of {self._job.job}", error, self._job.job)
        what = error.what if isinstance(error, Unrecoverable) else str(error) or repr(error)
        self._fetched(current, rank, False, code, what)

    def _fetched(self, current: Round, rank: int, ok: bool, code: str = "", reason: str = "") -> None:
        if self._round is current:
            failpoint("restore.vote")
            current.waiting.discard(rank)
            self._job.feed(ev.RankFetched(rank, current.do.round, ok, code, reason))

    def _send_plan(self, rank: int, number: int, loading: Loading) -> None:
        plan, loading.plan = loading.plan, -1
        self._tell(rank, wire.LoadPlan(number, loading.frame.segment_bytes), [plan, *loading.frame.fds])
        os.close(plan)

    def _tell(self, rank: int, message: object, fds: list[int] | None = None) -> None:
        own = self._job.local_slots.by_rank.get(rank)
        if own is not None and own.session is not None:
            own.session.send(message, fds or [])

    def _current(self, number: int) -> Round | None:
        return self._round if self._round is not None and self._round.do.round == number else None

    def _spawn(self, coroutine: Any, what: str) -> None:
        task = self._services.spawn(coroutine, f"{what} {self._job.job}")
        if self._round is not None:
            self._round.tasks.append(task)

    def _drop_round(self) -> None:
        over, self._round = self._round, None
        if over is not None:
            for task in over.tasks:
                task.cancel()
            self._services.spawn(self._clear(over), f"end of a restore of {self._job.job}")

    async def _clear(self, over: Round) -> None:
        """Its memory is lent to nobody else before the last thread that may write into it has ended."""
        if over.tasks:
            await asyncio.wait(over.tasks)
        if over.rebuild is not None:
            await over.rebuild.ended()
        for loading in over.ready.values():
            loading.release()
        await over.host.release()
        if over.rebuild is not None:
            try:
                await over.rebuild.close()
            except (CkptdError, OSError) as error:
                self._services.health.event("storage", str(error))
