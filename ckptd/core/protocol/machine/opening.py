"""The epoch as this node knows it: refuse older ones, write the newer one down, fetch, vote, load (design D10, D11)."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.events import RankFetched, RankLoaded
from ckptd.core.protocol.instructions import (
    FailRestore,
    FinishRestore,
    LoadNow,
    PersistEpoch,
    PrepareRestore,
    Supersede,
)
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.machine.joining import RESTORE_PATIENCE, Joining
from ckptd.core.protocol.machine.ranks import Ranks
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.messages import (
    EpochOpen,
    JoinRefused,
    RestoreAbort,
    RestoreDone,
    RestoreGo,
    Stale,
    Vote,
)

STEWARD_AWAY_S = 20.0  # beyond steward_timeout_s, within which a successor that saw the restore completed says so
REJOIN_S = 5.0  # all ranks stood there when the epoch was opened; one that is not back by then has failed its restore()


class Opening:
    """``open``: the restore under way here. Cancelling what belonged to older epochs is ``entered``'s task (machine.py)."""

    def __init__(self, ctx: Context, joining: Joining, ranks: Ranks, slots: Slots) -> None:
        self._ctx, self._joining, self._ranks, self._slots = ctx, joining, ranks, slots
        self.open: EpochOpen | None = None
        self._steward = ""
        self._prepared = False
        self._went = False
        self._since = 0.0
        self._votes: dict[int, Vote] = {}
        self._voted_at = 0.0

    # --- from the steward ---------------------------------------------------------------------------------------
    def refuses(self, record: EpochRecord) -> bool:
        """An older epoch, or another one of the same number."""
        known = self._ctx.record
        return known is not None and (record.number < known.number or (record.number == known.number and record != known))

    def is_forgotten(self, record: EpochRecord) -> bool:
        """Older than what this node has forgotten, or forgotten by order."""
        return self._ctx.tombstone.forbids(record.number)

    def on_open(self, sender: str, message: EpochOpen) -> None:
        if self.refuses(message.record):
            assert self._ctx.record is not None
            self._ctx.send(sender, Stale(self._ctx.record))
            return
        newer = message.record != self._ctx.record
        if newer:
            self.enter(message.record)
            self._ctx.never = bool(self._ctx.local_ranks())  # until they have loaded
        if newer or (self.open is None and not self._ctx.done):
            self._begin(sender, message)
        elif self.open is not None:
            self._repeat_votes()

    def enter(self, record: EpochRecord) -> None:
        """From here on nothing of an older epoch is obeyed."""
        ctx = self._ctx
        if ctx.done or any(snapshot.epoch == ctx.number for snapshot in self._slots.sealed):
            ctx.ran = ctx.record
        ctx.emit(PersistEpoch(record, ctx.ran))
        if self.open is not None and self.open.record.nonce != record.nonce:
            ctx.emit(FailRestore(self.open.round, "superseded", f"epoch {record.number} was opened"))
        here = self._joining.join.asks if self._joining.join is not None else {}
        same = self._joining.join is not None and self._joining.join.attempt == record.nonce
        for rank in self._ranks.here.values():
            if not rank.left and not (same and rank.rank in here):
                ctx.emit(Supersede(rank.rank, record.number))
        ctx.record, ctx.done = record, False
        ctx.never = False
        if record.parent is not None:
            self._slots.keep(record.parent)
        ctx.learn_of(record)
        self._ranks.restart(())
        self._forget()

    def _begin(self, sender: str, message: EpochOpen) -> None:
        self._forget()
        self.open, self._steward, self._since = message, sender, self._ctx.now
        self._joining.answer(message.record.nonce, answered=True)
        if message.snapshot is not None:
            self._slots.pin("restore", message.snapshot)
        self.on_joined()

    def on_joined(self) -> None:
        """Go on once every local rank of the epoch stands here."""
        message = self.open
        ranks = self._ctx.local_ranks()
        if message is None or self._prepared or not ranks:
            return
        join = self._joining.join
        if join is not None and join.attempt != message.record.nonce:
            for rank in ranks:
                self._vote(Vote(message.record.number, message.round, rank, "fetched", False, "superseded",
                                "a newer start of the job joined"))  # fmt: skip
            return
        if not self._joining.all_here(message.record.nonce, ranks):
            return
        self._prepared = True
        self._ranks.restart(ranks)
        self._ctx.emit(
            PrepareRestore(message.record, message.round, ranks, message.snapshot, message.durable,
                           message.sources, message.per_rank, message.errors)
        )  # fmt: skip
        if message.snapshot is None:
            for rank in ranks:
                self._vote(Vote(message.record.number, message.round, rank, "loaded", True))

    def on_go(self, sender: str, message: RestoreGo) -> None:
        if self.open is None and message.epoch == self._ctx.number and not self._ctx.done:
            # Our ranks had voted in an earlier life of this daemon; with its death their restore() failed.
            reason = "its daemon was restarted in mid-restore"
            for rank in self._ctx.local_ranks():
                self._ctx.send(sender, Vote(message.epoch, message.round, rank, "loaded", False, "left", reason))
        if not self._current(message.epoch, message.round):
            return
        if self._prepared and not self._went:
            self._went = True
            self._ctx.emit(LoadNow(message.round))

    def on_abort(self, message: RestoreAbort) -> None:
        if self._current(message.epoch, message.round):
            self._ctx.never = True
            self._fail(message.code, message.reason)

    def on_refused(self, message: JoinRefused) -> None:
        """The steward refuses an attempt between two decisions, when there is no restore that it could abort."""
        opened = self.open
        if opened is not None and opened.snapshot is not None and opened.record.nonce == message.attempt and not self._went:
            self._ctx.never = True
            self._fail(message.code, message.reason)

    def on_done(self, message: RestoreDone) -> bool:
        """True when this node heard it for the first time."""
        if message.epoch != self._ctx.number or self._ctx.done:
            return False
        self._ctx.done, self._ctx.never = True, False
        self._ctx.emit(FinishRestore(message.round))
        if self._ctx.record is not None:
            self._joining.close(self._ctx.record.nonce)
        self._forget()
        return True

    # --- from the local ranks -----------------------------------------------------------------------------------
    def on_fetched(self, event: RankFetched) -> None:
        if self._current(self._ctx.number, event.round):
            self._vote(
                Vote(self._ctx.number, event.round, event.rank, "fetched", event.ok, event.code, event.reason)
            )

    def on_loaded(self, event: RankLoaded) -> None:
        if self._went and self._current(self._ctx.number, event.round):
            code = "" if event.ok else "load"
            self._vote(Vote(self._ctx.number, event.round, event.rank, "loaded", event.ok, code, event.reason))

    def on_left(self, rank: int) -> None:
        if self.open is not None and rank in self._ctx.local_ranks():
            phase = "loaded" if self._went else "fetched"
            reason = f"rank {rank} is gone"
            self._vote(Vote(self._ctx.number, self.open.round, rank, phase, False, "left", reason))

    def on_tick(self) -> None:
        if self.open is None:
            return
        if self._ctx.now - self._since > RESTORE_PATIENCE * self._ctx.policy.restore_timeout_s:
            self._fail("timeout", f"nothing heard from the steward {self._steward}")
        elif self._ctx.lost(self._steward, STEWARD_AWAY_S):
            self._fail("left", f"{self._steward}, the node of rank 0, led the restore and is gone")
        elif self._votes and self._ctx.now - self._voted_at >= RESEND_S:
            self._repeat_votes()
        elif not self._prepared and not self._votes and self._ctx.now - self._since > REJOIN_S:
            self._vote_absent(self.open)

    def _vote_absent(self, message: EpochOpen) -> None:
        """This daemon was restarted in mid-restore: its ranks lost it, their restore() raised, so all must."""
        for rank in self._ctx.local_ranks():
            reason = "it does not wait at its daemon any more, which was restarted in mid-restore"
            self._vote(Vote(message.record.number, message.round, rank, "fetched", False, "left", reason))

    def _current(self, epoch: int, number: int) -> bool:
        return self.open is not None and epoch == self._ctx.number and number == self.open.round

    def _fail(self, code: str, reason: str) -> None:
        assert self.open is not None
        self._ctx.emit(FailRestore(self.open.round, code, reason))
        self._joining.close(self.open.record.nonce)
        self._forget()

    def _vote(self, vote: Vote) -> None:
        self._votes[vote.rank] = vote
        loaded = {rank for rank, said in self._votes.items() if said.phase == "loaded" and said.ok}
        self._ctx.never = self._ctx.never and not loaded >= set(self._ctx.local_ranks())
        self._ctx.send(self._steward, vote)

    def _repeat_votes(self) -> None:
        self._voted_at = self._ctx.now
        for vote in self._votes.values():
            self._ctx.send(self._steward, vote)

    def _forget(self) -> None:
        self._slots.unpin("restore")
        self.open, self._prepared, self._went = None, False, False
        self._votes, self._steward = {}, ""
