"""Local ranks stand at restore() or their first snapshot(): the steward-elect is told until it answers (design D10, D11)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.protocol.events import RankJoined
from ckptd.core.protocol.instructions import FailJoin
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.messages import Inventory, JoinRefused, JoinReport, ReportAgain, RestoreAsk

RESTORE_PATIENCE = 1.5  # times restore_timeout_s, before a node that hears nothing fails its own ranks
PATIENCE_S = 5.0  # beyond the steward's own limits, before a node gives up on the steward
ATTEMPTS_KEPT_MAX = 64
DIGEST_BYTES = 16  # of a report


@dataclass
class Join:
    attempt: str
    ranks: tuple[str, ...]
    nodes: tuple[NodeInfo, ...]
    asks: dict[int, RestoreAsk | None] = field(default_factory=dict)  # of the local ranks that stand here
    since: float = 0.0  # the first rank came, the epoch was opened, or the steward began anew
    told_at: float = -1e9
    whole: bool = False  # the next report brings all of it: it was asked for
    digest: bytes = b""
    digest_of: EpochRecord | None = None  # beside the world
    answered: bool = False  # the epoch is opening
    trains: bool = False  # the epoch of this attempt runs, and this daemon lost what it knew of it


class Joining:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.join: Join | None = None
        self._past: dict[str, None] = {}  # attempts that were replaced, failed or opened: none of them begins again

    def on_joined(self, event: RankJoined) -> None:
        join = self.join
        if join is None or join.attempt != event.attempt:
            if event.attempt in self._past:
                self._ctx.emit(FailJoin(event.attempt, "superseded", "this start of the job was superseded"))
                return
            if join is not None:
                self.fail("superseded", "a newer start of the job joined")
            join = self.join = Join(event.attempt, event.ranks, event.nodes, since=self._ctx.now)
            self._ctx.learn(event.nodes, self._ctx.number + 1)
        if (join.ranks, join.nodes) != (event.ranks, event.nodes):
            self.fail("mismatch", "local ranks disagree about the world")
            return
        join.asks[event.rank] = event.ask
        join.trains |= event.trains
        self._tell(join)

    def on_left(self, rank: int) -> None:
        """Gone before the epoch opened: without it nobody can restore."""
        if self.join is not None and self.join.asks.pop(rank, 0) != 0 and not self.join.asks:
            self.close()

    def on_refused(self, message: JoinRefused) -> None:
        if self.join is not None and self.join.attempt == message.attempt:
            self.fail(message.code, message.reason)

    def on_again(self, sender: str, message: ReportAgain) -> None:
        """What we said was lost, or forgotten."""
        join = self.join
        if join is not None and (join.attempt, join.ranks[0]) == (message.attempt, sender):
            join.whole = True
            self._tell(join)

    def on_tick(self) -> None:
        join, policy = self.join, self._ctx.policy
        if join is None:
            return
        limit = policy.join_timeout_s + policy.inventory_timeout_s
        if join.answered:  # a restore takes its own time, which is Opening's to bound; this is for one that was forgotten
            limit = RESTORE_PATIENCE * policy.restore_timeout_s
        if self._ctx.now - join.since > limit + PATIENCE_S and not join.trains:
            self.fail("timeout", f"no answer from the steward-elect {join.ranks[0]}")
        elif self._ctx.now - join.told_at >= RESEND_S:
            self._tell(join)

    def answer(self, attempt: str, *, answered: bool) -> None:
        """The steward-elect opened an epoch for this attempt; or (False) it said hello, so it may have forgotten.

        Reports go on until the restore is done: an attempt whose ranks are not heard of any more must not open anything.
        """
        join = self.join
        if join is None or join.attempt != attempt:
            return
        if answered or join.answered:
            join.since = self._ctx.now
        join.answered = answered

    def trains_in(self, attempt: str) -> bool:
        """Our ranks are let go already: what was known of their epoch is lost here."""
        return self.join is not None and self.join.trains and self.join.attempt == attempt

    def all_here(self, attempt: str, ranks: tuple[int, ...]) -> bool:
        return self.join is not None and self.join.attempt == attempt and set(ranks) <= set(self.join.asks)

    def fail(self, code: str, reason: str) -> None:
        if self.join is not None:
            self._ctx.emit(FailJoin(self.join.attempt, code, reason))
            self.close()

    def close(self, attempt: str = "") -> None:
        """The attempt is answered, one way or the other."""
        if self.join is not None and attempt in ("", self.join.attempt):
            self.retire(self.join.attempt)
            self.join = None

    def is_past(self, attempt: str) -> bool:
        return attempt in self._past

    def retire(self, attempt: str) -> None:
        self._past[attempt] = None
        while len(self._past) > ATTEMPTS_KEPT_MAX:
            del self._past[next(iter(self._past))]

    def _tell(self, join: Join) -> None:
        """One report per distinct ask, so that the steward sees it when ranks asked for different things."""
        join.told_at = self._ctx.now
        by_ask: dict[RestoreAsk | None, list[int]] = {}
        for rank, ask in sorted(join.asks.items()):
            by_ask.setdefault(ask, []).append(rank)
        record, elect = self._ctx.record, join.ranks[0]
        if not join.digest or join.digest_of != record:
            text = repr((join.ranks, join.nodes, record)).encode()
            join.digest, join.digest_of = hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest(), record
        ranks, nodes, known = (join.ranks, join.nodes, record) if join.whole or elect == self._ctx.me.node else ((), (), None)
        join.whole = False
        for ask, here in by_ask.items():
            report = JoinReport(join.attempt, ranks, nodes, tuple(here), ask, known, join.answered, join.trains, join.digest)
            self._ctx.send(elect, report)
        self._seek(join)

    def _seek(self, join: Join) -> None:
        """Whoever knows the epoch that these ranks train in answers one that registers and who does not with its record."""
        record, me = self._ctx.record, self._ctx.me.node
        if join.trains and not self._ctx.trained_in(join.attempt):
            for node in join.nodes:
                if node.node != me:
                    self._ctx.send(node.node, Inventory("", record, ()))
