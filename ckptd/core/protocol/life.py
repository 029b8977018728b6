"""A job's life on one node (D19): who may still come back to it, in which order its memory goes, and what stays when it is over.

The steward knows which ranks live, and tells every node; each node keeps what it was told (machine/lifetime.py). Whoever lacks
memory asks what each job could spare (``orders``, ``spare``). All of it is decided here, from plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, IntEnum

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol.messages import Inventory, InventoryRequest, JoinReport, Message, OpenSession


class Life(str, Enum):
    RUNNING = "running"  # a rank lives, or nobody can say that none does
    ORPHANED = "orphaned"  # no rank lives, and they did not all say goodbye
    FINISHED = "finished"  # every rank left its with block without an exception
    FORGOTTEN = "forgotten"  # nothing is left of it here but a tombstone


# (from, to) -> the guard. docs/ARCHITECTURE.md shows this table.
TRANSITIONS: dict[tuple[Life, Life], str] = {
    (Life.RUNNING, Life.ORPHANED): "the steward: no rank lives; or no word of a steward for orphan_linger_s, and no rank here",
    (Life.RUNNING, Life.FINISHED): "the steward: every rank said goodbye",
    (Life.ORPHANED, Life.RUNNING): "a rank is here, or joins; or the steward: a rank lives",
    (Life.ORPHANED, Life.FINISHED): "the steward: the last goodbye was heard late",
    (Life.FINISHED, Life.RUNNING): "a new start of the job joins",
    (Life.ORPHANED, Life.FORGOTTEN): "nothing of it is in memory here, and no steward speaks, for job_linger_s; or `ckptd forget`",
    (Life.FINISHED, Life.FORGOTTEN): "the same",
}


@dataclass
class JobLife:
    """``since``: when it entered ``state``, by this node's clock; of an earlier life of the daemon, too. Invariant: in the past."""

    state: Life = Life.RUNNING
    since: float = 0.0

    def may_become(self, state: Life) -> bool:
        return (self.state, state) in TRANSITIONS

    def become(self, state: Life, since: float) -> None:
        assert self.may_become(state), f"{self.state.value} -> {state.value} is no transition"
        self.state, self.since = state, since

    @property
    def over(self) -> bool:
        """Nobody trains; a new start may still come for what is left."""
        return self.state in (Life.ORPHANED, Life.FINISHED)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What a node remembers of a job that it has forgotten.

    ``epoch``: the highest that it knew; a new start takes a higher one, so that a node that was away supersedes nothing.
    ``ordered``: the highest that was forgotten by the operator's word (0: none); what is left of it in memory counts no more.
    ``sealed``: the newest in which every rank of the node had sealed a snapshot (0: none): something may be lost.
    Invariant: 0 <= ordered, sealed <= epoch.
    """

    epoch: int = 0
    ordered: int = 0
    sealed: int = 0

    def forbids(self, epoch: int) -> bool:
        """There is no way back to it: a newer one was forgotten, or it was itself, by order."""
        return epoch < self.epoch or epoch <= self.ordered

    def over(self, other: Tombstone) -> Tombstone:
        return Tombstone(max(self.epoch, other.epoch), max(self.ordered, other.ordered), max(self.sealed, other.sealed))


NO_TOMBSTONE = Tombstone()


def grave(number: int, nonce: str) -> EpochRecord:
    """An epoch without ranks, claimed on storage in the place of a job that was forgotten there: nothing was before it."""
    return EpochRecord(number, nonce, (), (), before=(-1, ()))


def is_grave(record: EpochRecord) -> bool:
    return record.world == 0 and record.before[0] < 0


def revives(message: Message, tombstone: Tombstone) -> bool:
    """Does this word of another node concern a life of the job after the one that lies here? A keep-alive, a question of a steward
    or a copy on its way for what was forgotten does not; a new start of the job does, whatever its nodes know of it. What this node
    has forgotten by itself may live elsewhere: so does a steward of that epoch, and whoever takes this node for its steward."""
    if isinstance(message, (JoinReport, InventoryRequest)):
        return True
    known = getattr(message, "record", None) or getattr(message, "known", None)
    number = known.number if known is not None else getattr(message, "epoch", 0)
    lives = isinstance(message, OpenSession) or (isinstance(message, Inventory) and not message.attempt)
    return tombstone.epoch == 0 or number > tombstone.epoch or (number == tombstone.epoch > tombstone.ordered and lives)


class Order(IntEnum):
    """In which order memory goes when there is too little; the first costs least."""

    RELEASED = 0  # slots of dead ranks with nothing in them
    FINISHED_DURABLE = 1
    ORPHANED_DURABLE = 2
    FINISHED_UNSTORED = 3
    ORPHANED_LAST = 4  # all but one newest complete snapshot, unless the operator lets go of that, too

    @property
    def asks_storage(self) -> bool:
        """Durable is asked of storage at that moment; no answer, no release."""
        return self in (Order.FINISHED_DURABLE, Order.ORPHANED_DURABLE)


def orders(life: Life, age_s: float, policy: Policy) -> tuple[Order, ...]:
    """What a job may be asked to spare under pressure, ``age_s`` after it entered this state."""
    if life not in (Life.ORPHANED, Life.FINISHED):
        return ()
    found = [Order.RELEASED]
    if policy.durable and (life is Life.FINISHED or age_s >= policy.breakpoint_grace_s):
        found.append(Order.FINISHED_DURABLE if life is Life.FINISHED else Order.ORPHANED_DURABLE)
    if life is Life.FINISHED and not policy.durable and age_s >= policy.job_linger_s:
        found.append(Order.FINISHED_UNSTORED)
    if age_s >= policy.orphan_linger_s:
        found.append(Order.ORPHANED_LAST)
    return tuple(found)


def expired(life: Life, age_s: float, policy: Policy) -> tuple[Order, ...]:
    """What goes without pressure: what storage holds and nobody has come for, and what was never meant to outlive its job."""
    linger_s = policy.job_linger_s if life is Life.FINISHED else policy.orphan_linger_s
    if age_s < linger_s:
        return ()
    unforced = (Order.FINISHED_DURABLE, Order.ORPHANED_DURABLE, Order.FINISHED_UNSTORED)
    return tuple(order for order in orders(life, age_s, policy) if order in unforced)


def spare(
    order: Order,
    held: Collection[SnapshotId],
    complete: SnapshotId | None,
    durable: Collection[SnapshotId],
    is_candidate: Callable[[SnapshotId], bool],
    policy: Policy,
) -> set[SnapshotId]:
    """Which of the ``held`` snapshots go. ``complete``: what is kept of the whole ones. ``durable``: as storage
    said just now."""
    if order is Order.RELEASED:
        return set()
    if order.asks_storage:
        newest = max(filter(is_candidate, durable), default=None)
        return set() if newest is None else {snapshot for snapshot in held if snapshot.at <= newest.at}
    if order is Order.FINISHED_UNSTORED or policy.orphan_drop:
        return set(held)
    return set() if complete is None else {snapshot for snapshot in held if snapshot != complete}
