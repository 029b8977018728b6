"""This node's view of its job's life (life.py has the states): the steward's word, the ranks here, the operator's order.

A node that forgets a job says so with ``Bury``; its shell then drops the machine, and keeps the tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.events import ForgetOrdered, HoldingFound, Restarted, SpareAsked
from ckptd.core.protocol.instructions import Alarm, Bury, PersistLife
from ckptd.core.protocol.life import JobLife, Life, Order, Tombstone, expired, orders, spare
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.joining import Joining
from ckptd.core.protocol.machine.levels import Levels
from ckptd.core.protocol.machine.opening import Opening
from ckptd.core.protocol.machine.ranks import DIED, FINISHED, Ranks
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.protocol.machine.uplink import Uplink

RETURN_S = 30.0  # ranks come back to a restarted daemon within some seconds (the client's longest pause is 10); then they are dead


class Lifetime:
    """``steward_holds``: does this node speak as the steward of something that is held anywhere? None: it is not the steward."""

    def __init__(
        self,
        ctx: Context,
        ranks: Ranks,
        slots: Slots,
        levels: Levels,
        uplink: Uplink,
        joining: Joining,
        opening: Opening,
        steward_holds: Callable[[], bool | None],
    ) -> None:
        self._ctx, self._ranks, self._slots, self._levels = ctx, ranks, slots, levels
        self._uplink, self._joining, self._opening = uplink, joining, opening
        self._steward_holds = steward_holds
        self.life = JobLife()
        self.buried = False
        self._began_at: float | None = None  # the first tick of this machine
        self._known_at = 0.0  # when somebody last knew of the ranks: the steward, or we of our own

    # --- what happens -------------------------------------------------------------------------------------------
    def on_restarted(self, event: Restarted) -> None:
        self._ctx.tombstone, self._ctx.sealed = event.tombstone, max(event.sealed, event.tombstone.sealed)
        if event.life:
            self.life = JobLife(Life(event.life), self._ctx.now - max(0.0, event.life_s))

    def on_found(self, event: HoldingFound) -> None:
        """Memory of an epoch that could not be written down: what was written of the job's life is of an older one."""
        if event.snapshot.epoch > self._ctx.number:
            self._become(Life.RUNNING)

    def on_heard(self, message: msg.Ack) -> None:
        """The steward's word, in our session."""
        if not message.life:
            return
        self._known_at = self._ctx.now
        if not self.here():
            self._become(Life(message.life))

    def new_epoch(self) -> None:
        """What is said of the one before does not hold for it, also on a node that has no rank in it."""
        self._known_at = self._ctx.now
        self._slots.spared.clear()
        self._become(Life.RUNNING)

    def on_tick(self) -> None:
        now = self._ctx.now
        if self._began_at is None:
            self._began_at = self._known_at = now
        self._tell_missing()
        if self.here():
            self._known_at = now
            self._become(Life.RUNNING)
        elif now - self._known_at >= self._ctx.policy.orphan_linger_s and self._ctx.record is not None:
            self._become(Life.ORPHANED, self._known_at)
        if self._alive() and self._joining.join is None:
            self._ctx.ordered = 0  # they are back, and go on
        self.on_tombstone(self._ctx.ordered)
        if self._nothing_is_left(now - self._began_at):
            self._bury(self._ctx.number)

    def on_forget(self, event: ForgetOrdered) -> None:
        """The operator's word, here or through another node: whatever was known up to this epoch. A running job stays."""
        if event.epoch >= self.newest() and not self.refusal()[0]:
            self._bury(event.epoch, event.epoch)

    def on_tombstone(self, ordered: int) -> bool:
        """``ordered``: the highest epoch that another node, or storage, has forgotten by the operator's word. True: it took that
        order while we were away, or whoever gave it died before we heard; so we forget as well, once no rank may come back."""
        if not ordered or ordered < self.newest() or self._ctx.record is None or self.here():
            return False
        if self._returning():
            self._ctx.ordered = max(self._ctx.ordered, ordered)
            return False
        self._bury(ordered, ordered)
        return True

    def on_spare(self, event: SpareAsked) -> None:
        """Memory is short here, or its time is over. Durable: what storage said just now."""
        if event.order not in self.orders():
            return
        complete, is_candidate = self.complete(), self._ctx.is_candidate
        going = spare(event.order, self._slots.sealed.keys(), complete, event.durable, is_candidate, self._ctx.policy)
        stored = {snapshot.at for snapshot in (*event.durable, *(s for s, said in self._levels.told.items() if said.durable))}
        for snapshot in sorted(going if event.most is None else going & set(event.most)):
            self._let_go(snapshot, stored=snapshot.at in stored)

    # --- what it is ---------------------------------------------------------------------------------------------
    def here(self) -> bool:
        """A rank lives here, or stands at restore(); or a restore is under way."""
        return self._alive() or self._joining.join is not None or self._opening.open is not None

    def _alive(self) -> bool:
        return any(not rank.left for rank in self._ranks.here.values())

    def _returning(self) -> float:
        """For how many seconds ranks that lived with an earlier process of this daemon may still come back to it."""
        ours = self.life.state is Life.RUNNING and any(rank not in self._ranks.here for rank in self._ctx.local_ranks())
        began_at = self._ctx.now if self._began_at is None else self._began_at
        return max(0.0, RETURN_S - (self._ctx.now - began_at)) if ours else 0.0

    def newest(self) -> int:
        """The newest epoch of this life of the job; one that could not be written down is known by what was sealed in it."""
        sealed = self._ctx.sealed if self._ctx.record is not None else 0  # else it may be of a life that was forgotten
        return max([self._ctx.number, sealed, *(snapshot.epoch for snapshot in self._slots.sealed)])

    def age(self, now: float) -> float:
        """Seconds in this state."""
        return max(0.0, now - self.life.since)

    def orders(self) -> tuple[Order, ...]:
        return orders(self.life.state, self.age(self._ctx.now), self._ctx.policy)

    def expired(self) -> tuple[Order, ...]:
        """What it would spare without being pressed."""
        return expired(self.life.state, self.age(self._ctx.now), self._ctx.policy) if self._slots.sealed else ()

    def complete(self) -> SnapshotId | None:
        """Of those that are certified whole the best protected, of those the newest: none gives way to a worse one (P3)."""
        told, released = self._levels.told, self._levels.released
        whole = [s for s, said in told.items() if said.level >= 0 and self._ctx.is_candidate(s) and s not in released]
        return max(whole, key=lambda s: (min(told[s].level, told[s].wanted), s), default=None)

    def refusal(self) -> tuple[str, float]:
        """Why `ckptd forget` may not have it, "" when it may; and for how many seconds that holds, 0 where nobody can say."""
        if self.here():
            return "ranks of it are here", 0.0
        if self._returning():
            return "this daemon has just been restarted, and ranks of it may come back", self._returning()
        if self._ctx.now < self._slots.frozen_until:
            return "a start of it asked a moment ago what there is to restore", self._slots.frozen_until - self._ctx.now
        if self.life.state is Life.RUNNING and self._uplink.session and self._ctx.is_up(self._uplink.steward):
            return f"it runs, says its steward {self._uplink.steward}", 0.0
        return "", 0.0

    # --- transitions --------------------------------------------------------------------------------------------
    def _become(self, state: Life, since: float | None = None) -> None:
        if state is self.life.state or not self.life.may_become(state):
            return
        self.life.become(state, self._ctx.now if since is None else since)
        if self._ctx.record is not None:
            self._ctx.emit(PersistLife(state.value, self.age(self._ctx.now)))

    def _bury(self, epoch: int, ordered: int = 0) -> None:
        if not self.buried:
            self.buried = True
            self.life.state = Life.FORGOTTEN
            sealed = self._ctx.sealed
            self._ctx.emit(Bury(Tombstone(max(epoch, sealed), ordered, sealed).over(self._ctx.tombstone)))

    def _nothing_is_left(self, seconds: float) -> bool:
        """``seconds``: of this machine. One without an epoch is somebody's question, or a word of a node that was away. What is not
        here may be elsewhere: as long as a steward speaks there is a job, and this node may have to succeed it."""
        holds = self._steward_holds()
        if self.here() or self._slots.sealed or self._slots.filling() or holds:
            return False
        linger_s, now = self._ctx.policy.job_linger_s, self._ctx.now
        if self._ctx.record is None:
            return seconds >= linger_s
        silent_s = min(seconds, now - self._uplink.heard_at)
        return self.life.over and self.age(now) >= linger_s and (holds is False or silent_s >= linger_s)

    def _tell_missing(self) -> None:
        """Ranks that lived with an earlier process of this daemon, and have not come back to it."""
        state = self.life.state
        if self.here() or self._returning():
            return
        for rank in self._ctx.local_ranks():
            if rank not in self._ranks.here:
                self._ranks.attach(rank).left = FINISHED if state is Life.FINISHED else DIED

    def _let_go(self, snapshot: SnapshotId, *, stored: bool) -> None:
        self._slots.mark_spared(snapshot)
        facts = [slot.fact for slot in self._slots.sealed.get(snapshot, ()) if slot.fact is not None and not slot.released]
        for fact in facts:
            self._uplink.tell_held(fact, lost=True)
        if self._ctx.policy.durable and not stored and any(fact.keep for fact in facts):
            text = f"step {snapshot.step} was to be kept, and is not on storage: the job is over, and its memory went"
            self._ctx.emit(Alarm("kept", text))
        self._slots.release(snapshot)


def told_life(left: Collection[str | None]) -> str:
    """The steward's word, from what it knows of each rank: why it left, "" of one that lives, None of one nobody has told of."""
    if any(why == "" for why in left):
        return Life.RUNNING.value
    if not left or any(why is None for why in left):
        return ""
    return str((Life.FINISHED if all(why == FINISHED for why in left) else Life.ORPHANED).value)

