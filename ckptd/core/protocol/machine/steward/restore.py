"""Opening an epoch: decide, claim its number, tell everyone, two votes, done (design D10, D11). All ranks or none.

Damage found while fetching leads to a new decision under a new number, with fresh inventories; nothing is changed under
ranks that have the old one. So does a holder that could not be reached, but that says nothing against what it holds: to leave
the snapshot out for it would go back a step that is there (P1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.events import DurableRead, EpochClaimed
from ckptd.core.protocol.instructions import Alarm, ClaimEpoch
from ckptd.core.protocol.machine.context import MEMBER_AWAY_S, RESEND_S, Context
from ckptd.core.protocol.machine.joining import Joining
from ckptd.core.protocol.machine.steward.decide import (
    ALARMS,
    Decision,
    Verdict,
    all_there_is,
    judge,
    spread,
)
from ckptd.core.protocol.machine.steward.gather import FRESH_S, Gather, Gathering
from ckptd.core.protocol.messages import (
    EpochOpen,
    Inventory,
    JoinRefused,
    JoinReport,
    ReportAgain,
    RestoreAbort,
    RestoreDone,
    RestoreGo,
    Stale,
    Vote,
)

NEWER = "a newer start of the job joined"
ALL_DAMAGED = "every snapshot found is damaged"
NO_NUMBER = "other starts of the job take every epoch number"
REFUSALS_KEPT_MAX = 16
WHOLE_AT_ONCE_MAX = 16  # reports, each with the world and an epoch: 0.7 MB of 4,096 ranks
CLAIM_TIMEOUT_S = (
    10.0  # storage that does not answer: the epoch opens without its claim, made up for before a commit
)
LEFT_PATIENCE_S = (
    15.0  # all ranks stood here, and one does not any more: its restore() has most likely raised
)
STRAGGLERS_S = 0.5  # after a bad vote, until the next decision
AWAY_PAUSE_S_MAX = 8.0  # the same, twice as long each time that a holder could not be reached
DECISIONS_MAX = 16  # per attempt, but for those after which a holder could not be reached: their time is bounded


@dataclass
class Restore:
    message: EpochOpen
    since: float
    said_at: float
    fetched: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    awake_since: float = 0.0  # what broke while this process stood still may be whole again, and we have not heard it yet
    failed_at: float | None = None
    damage: str = ""  # what was found; the snapshot is left out for it
    away: str = ""  # who could not be reached

    @property
    def record(self) -> EpochRecord:
        return self.message.record


class Restoring:
    def __init__(self, ctx: Context, joining: Joining, finished: Callable[[EpochRecord], None]) -> None:
        """finished: the record whose restore is complete."""
        self._ctx, self._joining, self._finished = ctx, joining, finished
        self.gathering = Gathering(ctx, joining)
        self.restore: Restore | None = None
        self._refused: dict[str, JoinRefused] = {}
        self._seen: dict[str, None] = {}  # attempts in the order they were first heard of
        self._judging: Gather | None = None  # as it was when it was given away to be judged
        self._claiming: Decision | None = None
        self._claimed_at = 0.0
        self._floor = 0
        self._asked = 0  # for their whole reports, since the last tick
        self._decisions = 0
        self._waits = 0  # decisions after which a holder could not be reached
        self._tried: dict[
            SnapshotId, tuple[int, str]
        ] = {}  # damaged: how many sources it had, what was found
        self._since = 0.0  # the attempt's first decision
        self.away = ""  # why the last one failed, when that was for a holder that could not be reached

    @property
    def busy(self) -> bool:
        return self.gathering.gather is not None

    # --- gathering ----------------------------------------------------------------------------------------------
    def on_report(self, sender: str, message: JoinReport) -> None:
        refused = self._refused.get(message.attempt)
        if refused is not None:
            self._ctx.send(sender, refused)
            return
        if message.ranks and message.ranks[0] != self._ctx.me.node:
            return
        gather = self.gathering.gather
        if gather is None or gather.attempt != message.attempt:
            if self._joining.is_past(message.attempt) or (gather is not None and message.attempt in self._seen):
                self._ctx.send(sender, JoinRefused(message.attempt, "superseded", NEWER))
                return
            if not message.ranks:
                self._ask_whole(sender, message.attempt)
                return
            if gather is not None:
                self._refuse("superseded", NEWER)
        elif not message.ranks and message.digest not in gather.told:
            self._ask_whole(sender, message.attempt)
            return
        self._seen[message.attempt] = None
        if self.gathering.gather is None:
            self._decisions, self._waits, self._tried, self.away = 0, 0, {}, ""
        self.gathering.on_report(sender, message)
        gather = self.gathering.gather
        assert gather is not None, "the report began it"
        if gather.wrong:
            self._refuse("mismatch", gather.wrong)
        elif self.restore is not None and not message.opened:
            self._say_open(self.restore, sender)
        elif self.gathering.complete() and gather.asking_since is None:
            self.gathering.ask()

    def _ask_whole(self, sender: str, attempt: str) -> None:
        """Few at once: what one of them says the others need not, and they report again."""
        if self._asked < WHOLE_AT_ONCE_MAX:
            self._asked += 1
            self._ctx.send(sender, ReportAgain(attempt))

    def on_inventory(self, sender: str, message: Inventory) -> None:
        self.gathering.on_inventory(sender, message)
        self._decide_if_ready()

    def on_durable(self, event: DurableRead) -> None:
        self.gathering.on_durable(event)
        self._decide_if_ready()

    def _decide_if_ready(self) -> None:
        gather = self._asking()
        if gather is None or self._judging is not None:
            return
        patient = not self.gathering.waited_long()
        if (patient and not all_there_is(gather, self.gathering.known_down())) or not self.gathering.complete():
            return
        excluded = tuple(s for s, (sources, _) in self._tried.items() if self._sources_now(s) >= sources)
        damaged = {s: reason for s, (_, reason) in self._tried.items()}
        self._judging, floor = gather.frozen(), self._least(gather)
        call = partial(judge, self._judging, patient, floor, excluded, damaged, self._ctx.policy.redundancy)
        self._ctx.compute(call, partial(self._judged, self._judging, floor))

    def _undecided(self) -> Gather | None:
        """Of a start whose ranks all stand here, and for which who may know what there is was asked."""
        return self._asking() if self.gathering.complete() else None

    def _asking(self) -> Gather | None:
        """The same, wherever its ranks are by now."""
        gather = self.gathering.gather
        if gather is None or gather.asking_since is None or self._claiming is not None or self.restore is not None:
            return None
        return gather

    def _least(self, gather: Gather) -> int:
        """The number of the epoch lies above it."""
        return max(self._floor, self._ctx.number, gather.tombstone.epoch)

    def _judged(self, frozen: Gather, floor: int, verdict: Decision | Verdict) -> None:
        """What has changed meanwhile is looked at anew."""
        self._judging = None
        gather = self._undecided()
        if gather is None:
            return
        if gather.frozen() != frozen or self._least(gather) != floor:
            self._decide_if_ready()
        elif verdict is Verdict.LOOK_AGAIN:
            self.gathering.look_again()
        elif isinstance(verdict, Decision):
            self._decided(gather, verdict)

    def _decided(self, gather: Gather, decision: Decision) -> None:
        running = self._running(gather)
        if running is not None:
            self._ctx.send(self._ctx.me.node, Stale(running))
            return
        self._decisions += 1
        self._since = self._ctx.now if self._decisions == 1 else self._since
        if decision.record is None:
            self._refuse(decision.code, decision.reason)
        elif self._decisions - self._waits > DECISIONS_MAX:
            self._refuse("unrecoverable", ALL_DAMAGED if self._tried else NO_NUMBER)
        else:
            self._claim(decision)

    def _running(self, gather: Gather) -> EpochRecord | None:
        """The epoch that our own ranks train in, of which this daemon, its steward, lost what it knew: a holder or storage has told
        of it, or what they sealed in it. Another one would send ranks back that have no need of it."""
        if not self._joining.trains_in(gather.attempt):
            return None
        newest = max((snapshot.epoch for snapshot in gather.heard_of()), default=0)
        possible = (record for record in gather.records if not gather.tombstone.forbids(record.number))
        tries = (record for record in possible if record.nonce == gather.attempt)
        last = max(tries, key=lambda record: record.number, default=None)
        if last is None or last.number >= max(newest, self._ctx.number + 1):
            return last
        nobodys = all(record.number != newest for record in gather.records)
        if newest > max(last.number, self._ctx.number) and nobodys and self._ctx.sealed == newest:
            # Its restore was tried again since, in the same world and, as far as anybody can tell, with the same past.
            return replace(last, number=newest)
        return None

    def _sources_now(self, snapshot: SnapshotId) -> int:
        """A damaged snapshot is tried again when damaged holdings were dropped since."""
        gather = self.gathering.gather
        assert gather is not None, "only a gathering decides"
        return sum(
            fact.snapshot == snapshot for answer in gather.answers.values() for fact in answer.holdings
        )

    # --- the claim ----------------------------------------------------------------------------------------------
    def _claim(self, decision: Decision) -> None:
        assert decision.record is not None, "refusals claim nothing"
        self._claiming, self._claimed_at = decision, self._ctx.now
        self._ctx.emit(ClaimEpoch(decision.record.nonce, decision.record))

    def on_claimed(self, event: EpochClaimed) -> None:
        """A number that is taken is another start's, which is asked before it is superseded: it may have gone far since we asked
        (P1). Storage that does not answer is made up for before a commit."""
        decision = self._claiming
        if decision is None or decision.record is None:
            return
        if (event.attempt, event.number) != (decision.record.nonce, decision.record.number):
            return  # the claim of a start that was given up meanwhile
        if not self._still_there(decision.record):
            return
        if not event.ok and event.taken >= event.number:
            self._claiming, self._floor = None, max(self._floor, event.taken)
            self.gathering.ask()
        elif event.reason and self._ctx.policy.durable:
            self._open_unclaimed(decision, event.reason)
        else:
            self._open(decision)

    def _still_there(self, record: EpochRecord) -> bool:
        """False: the ranks went meanwhile, or we stood still. If they are back it is decided anew, perhaps otherwise: under this
        number storage has, or will have, what was decided now."""
        if not self.gathering.complete():
            self._claiming, self._floor = None, max(self._floor, record.number)
            return False
        return True

    def _open_unclaimed(self, decision: Decision, reason: str) -> None:
        """Storage did not answer: nobody can say that the number is free, so it is one that nobody else will take. A fresh start
        that nobody declared is refused: if its nodes died now, nothing would tell the next one that it ran (P1)."""
        record = decision.record
        assert record is not None, "refusals open nothing"
        if decision.proven_fresh:
            self._refuse("unreachable", f"storage did not answer: {reason}")
            return
        number = record.number + spread(record.nonce, record.number)
        self._open(replace(decision, record=replace(record, number=number)))

    # --- the epoch ----------------------------------------------------------------------------------------------
    def _open(self, decision: Decision) -> None:
        self._claiming = None
        record, found = decision.record, decision.candidate
        assert record is not None, "refusals open nothing"
        self._floor = record.number
        message = EpochOpen(
            record.nonce,
            record,
            record.number,  # rounds never repeat in a job: every decision has a number of its own
            found.snapshot if found is not None else None,
            found.durable if found is not None else False,
            found.sources if found is not None else (),
            found.per_rank if found is not None else (),
            decision.errors,
        )
        self.restore = Restore(message, self._ctx.now, self._ctx.now, awake_since=self._ctx.now)
        for text in decision.errors:
            for words, kind in ALARMS.items():
                if text.startswith(words):
                    self._ctx.emit(Alarm(kind, text))
        self._ctx.learn_of(record)
        for node in self._everyone():
            self._say_open(self.restore, node)

    def _everyone(self) -> list[str]:
        """Members, holders, and whoever else may be at work on an older epoch: it ends now."""
        gather = self.gathering.gather
        return list(gather.asked) if gather is not None else []

    def _say_open(self, restore: Restore, node: str) -> None:
        message = restore.message
        if node not in restore.record.ranks:  # it has nothing to fetch
            message = replace(message, sources=())
        self._ctx.send(node, message)

    def on_vote(self, vote: Vote) -> None:
        restore = self.restore
        if restore is None or (vote.epoch, vote.round) != (restore.record.number, restore.message.round):
            return
        if not vote.ok:
            self._against(restore, vote)
            return
        votes = restore.loaded if vote.phase == "loaded" else restore.fetched
        if vote.rank in votes:
            return  # repeated; answers to repetitions would go round in circles
        votes.add(vote.rank)
        if len(restore.loaded) == restore.record.world:
            self._complete(restore)
        elif len(restore.fetched) == restore.record.world and not restore.loaded:
            self._say_go(restore)

    def _against(self, restore: Restore, vote: Vote) -> None:
        if vote.phase != "fetched" or vote.code not in ("damage", "unreachable"):
            self._refuse(vote.code or "unrecoverable", f"rank {vote.rank}: {vote.reason}")
            return
        if restore.failed_at is None:
            restore.failed_at = self._ctx.now
        if vote.code == "damage":
            restore.damage = restore.damage or vote.reason
        else:
            restore.away = restore.away or f"rank {vote.rank}: {vote.reason}"

    def _complete(self, restore: Restore) -> None:
        self.gathering.gather = self.restore = None
        self._finished(restore.record)

    def _decide_anew(self, restore: Restore) -> None:
        snapshot = restore.message.snapshot
        self.away = "" if restore.damage else restore.away
        if self.away and self._ctx.now - self._since > self._ctx.policy.restore_timeout_s:
            self._refuse("unreachable", self.away)
            return
        self._waits += bool(self.away)
        if snapshot is not None and restore.damage:
            self._tried[snapshot] = (len(restore.message.sources), restore.damage)
        self.restore = None
        self.gathering.ask()

    def _pause(self, restore: Restore) -> float:
        """Until the next decision. Damage is there to stay; who could not be reached may be back soon, or later."""
        if restore.damage:
            return STRAGGLERS_S
        return min(AWAY_PAUSE_S_MAX, STRAGGLERS_S * 2.0 ** self._waits)

    # --- refusing and giving up ---------------------------------------------------------------------------------
    def _refuse(self, code: str, reason: str) -> None:
        """No epoch (or none any more): every rank of the attempt raises. Ranks that train wait for nothing: who knows their epoch
        may be back later, and is asked again with their next report."""
        gather = self.gathering.gather
        assert gather is not None, "only an attempt can be refused"
        if code in ("unreachable", "timeout") and self.restore is None and self._joining.trains_in(gather.attempt):
            self.gathering.gather = self._claiming = None
            return
        refused = self._refused[gather.attempt] = JoinRefused(gather.attempt, code, reason)
        for kept in (self._refused, self._seen):
            while len(kept) > REFUSALS_KEPT_MAX:
                del kept[next(iter(kept))]
        for node in gather.nodes:
            self._ctx.send(node.node, refused)
        self._stop(code, reason)

    def _stop(self, code: str, reason: str) -> None:
        restore = self.restore
        if restore is not None:
            for node in self._everyone():
                self._ctx.send(node, RestoreAbort(restore.record.number, restore.message.round, code, reason))
        self.gathering.gather = self.restore = self._claiming = None

    def opens(self, record: EpochRecord) -> bool:
        """It is the epoch that is being opened here: whoever is faster than our word to ourselves says nothing new."""
        return self.restore is not None and self.restore.record == record

    def on_higher(self, record: EpochRecord) -> None:
        """Somebody knows a newer epoch than the one that is being opened here: decide again, above it."""
        self._floor = max(self._floor, record.number)
        self.gathering.learn(record)
        if self.restore is not None and record.number >= self.restore.record.number:
            self.restore = None
            self.gathering.ask()

    def overtaken(self, record: EpochRecord) -> None:
        """The attempt that was gathered here has its epoch already: an earlier life of this daemon opened it."""
        gather = self.gathering.gather
        if gather is not None and gather.attempt == record.nonce and self.restore is None:
            self.gathering.gather = self._claiming = None

    def stood_still(self) -> None:
        """This process was stopped: whether the ranks still stand there must be heard anew."""
        if self.gathering.gather is not None:
            self.gathering.gather.heard_at.clear()
        if self.restore is not None:
            self.restore.awake_since = self._ctx.now

    def already_done(self, record: EpochRecord) -> None:
        """Somebody saw the epoch completed that these reports ask about: there is nothing to decide. Reports of a newer start go on
        being gathered: who has answered it may not be there to be asked again (P3)."""
        gather = self.gathering.gather
        if gather is not None and gather.attempt == record.nonce:
            self.gathering.gather = self.restore = self._claiming = None

    # --- time ---------------------------------------------------------------------------------------------------
    def on_tick(self) -> None:
        self._asked = 0
        gather, now = self.gathering.gather, self._ctx.now
        if gather is None:
            return
        self.gathering.on_tick()
        if gather.asking_since is None:
            self._watch_joins(gather)
        elif self._claiming is not None:
            record = self._claiming.record
            if now - self._claimed_at > CLAIM_TIMEOUT_S and record is not None and self._still_there(record):
                self._open_unclaimed(self._claiming, "timeout")
        elif self.restore is not None:
            self._look_after(self.restore)
        else:
            self._watch_joins(gather)
            self._decide_if_ready()

    def _watch_joins(self, gather: Gather) -> None:
        patience = self._ctx.policy.join_timeout_s
        if gather.asking_since is not None or gather.all_stood_here():
            patience = min(patience, LEFT_PATIENCE_S)
        if self.gathering.complete():
            gather.since = self._ctx.now
        elif self._ctx.now - gather.since > patience:
            lately = {rank for rank, heard in gather.heard_at.items() if self._ctx.now - heard < FRESH_S}
            missing = [str(rank) for rank in range(len(gather.ranks)) if rank not in lately]
            self._refuse("timeout", f"ranks {', '.join(missing)} did not join, or left again")

    def _look_after(self, restore: Restore) -> None:
        now = self._ctx.now
        lost = self._lost(restore)
        if lost:
            self._refuse("left", f"{', '.join(lost)}, which the job was being restored to, cannot be reached any more")
        elif restore.failed_at is not None and now - restore.failed_at >= self._pause(restore):
            self._decide_anew(restore)
        elif now - restore.since > self._ctx.policy.restore_timeout_s:
            lacking = sorted(set(range(restore.record.world)) - restore.loaded)
            self._refuse("timeout", f"ranks {', '.join(map(str, lacking))} did not restore in time")
        elif now - restore.said_at >= RESEND_S:
            restore.said_at = now
            self._repeat(restore)

    def _lost(self, restore: Restore) -> list[str]:
        """Nodes of ranks that have not loaded, and that will not: whoever restores beside them waits for nothing."""
        record = restore.record
        if self._ctx.now - restore.awake_since < self._ctx.policy.steward_timeout_s + MEMBER_AWAY_S:
            return []
        lacking = {record.ranks[rank] for rank in range(record.world) if rank not in restore.loaded}
        return sorted(node for node in lacking & self._ctx.down.keys() if self._ctx.lost(node, MEMBER_AWAY_S))

    def _repeat(self, restore: Restore) -> None:
        record = restore.record
        if restore.message.snapshot is not None and len(restore.fetched) == record.world:
            self._say_go(restore)
        lacking = {
            record.ranks[rank] for rank in range(record.world) if rank not in restore.fetched | restore.loaded
        }
        members = {node.node for node in record.nodes}
        for node in (*sorted(lacking), *(other for other in self._everyone() if other not in members)):
            self._say_open(restore, node)

    def _say_go(self, restore: Restore) -> None:
        record = restore.record
        lacking = {record.ranks[rank] for rank in range(record.world) if rank not in restore.loaded}
        for node in sorted(lacking):
            self._ctx.send(node, RestoreGo(record.number, restore.message.round))

    def say_done(self, record: EpochRecord, node: str) -> None:
        self._ctx.send(node, RestoreDone(record.number, record.number))
