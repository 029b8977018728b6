"""What happened on this node, told to the job's machine by its shell (design D5)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.life import NO_TOMBSTONE, Order, Tombstone
from ckptd.core.protocol.messages import Message, RestoreAsk
from ckptd.core.protocol.written import Written
from ckptd.core.redundancy.parity_sets import ParityShard
from ckptd.core.state_map.layout import Layout


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A local rank stands at restore() or its first snapshot(). A new attempt supersedes what the machine was doing.

    ``attempt`` becomes the epoch's nonce. The same attempt again, when the known epoch's nonce equals it, is a rank that
    comes back to its restarted daemon: it is attached to the running epoch, nothing is opened or restored.
    """

    rank: int
    attempt: str
    ranks: tuple[str, ...]
    nodes: tuple[NodeInfo, ...]
    ask: RestoreAsk | None
    running: bool = True  # with the known epoch's attempt: False says that the rank still waits inside restore()
    trains: bool = False  # it was let into an epoch with this attempt: if we do not know that one, somebody else does
    grant: int = 0  # the newest that it was given, by whatever process of its daemon


@dataclass(frozen=True, slots=True)
class RankLeft:
    rank: int
    clean: bool  # said goodbye; False: its pidfd fired
    finished: bool = False  # its with block ended without an exception


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """Memory for this rank's own slots is there: these slot ids exist, FREE, in addition to what the machine knows."""

    rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotsGone:
    """The shell retired these (FREE) slots, for re-sizing."""

    rank: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotsShort:
    """There is no memory for all of this rank's own slots, in the words of the arena; "": there is."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankProgress:
    """snapshot(step) was called on a local rank; nothing is known yet of its outcome. asks: must=True waits."""

    rank: int
    step: int
    asks: bool = False


NOT_HERE = "the rank is not here"
OTHER_MAPPER = "another process maps its slot"
STILL_READ = "its slot is still being read"
NO_SLOT = "no free slot"
NO_MEMORY = "no memory"
REFUSED_AT_ONCE = (NOT_HERE, OTHER_MAPPER, STILL_READ, NO_SLOT, NO_MEMORY)  # the next grant would fare no better


@dataclass(frozen=True, slots=True)
class RankMissed:
    """``step``: of the snapshot that the rank takes for captured, where it is not the rank itself that gave it up. ``written``:
    past its fence."""

    rank: int
    grant: int
    reason: str
    step: int | None = None
    written: Written = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotSealed:
    """The rank finished its capture into this slot and the daemon made its sums."""

    rank: int
    slot: int
    grant: int
    step: int
    layout: Layout
    digests: tuple[tuple[str, bytes], ...]
    keep: bool = False
    came_at: int | None = None  # newest step that the rank had called when the grant came to it; None: not known


@dataclass(frozen=True, slots=True)
class SlotDamaged:
    """A held slot (own or replica) no longer matches its sums: quarantined."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class HoldingFound:
    """At start: the segment header of a re-adopted memfd names a sealed slot (own or replica)."""

    slot: int
    snapshot: SnapshotId
    rank: int
    tier: int
    own: bool
    layout: Layout
    digests: tuple[tuple[str, bytes], ...]
    keep: bool = False
    shard: ParityShard | None = None  # it is a parity set's parity
    layouts: tuple[Layout, ...] = ()  # of the parity set's members


@dataclass(frozen=True, slots=True)
class ReplicaArrived:
    """A peer's slot was received into our memory and verified."""

    snapshot: SnapshotId
    rank: int
    tier: int
    slot: int
    layout: Layout
    digests: tuple[tuple[str, bytes], ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSent:
    """Result of a Replicate instruction. ok=False: peer refused, vanished, or found damage."""

    snapshot: SnapshotId
    rank: int
    tier: int
    to: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ParityMade:
    """A parity set's parity was made here and verified. digests, layouts: of its members."""

    snapshot: SnapshotId
    shard: ParityShard
    slot: int
    layout: Layout
    digests: tuple[tuple[str, bytes], ...]
    layouts: tuple[Layout, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class ParityFailed:
    """Result of a MakeParity: a source refused, vanished or is damaged, or there is no memory."""

    snapshot: SnapshotId
    shard: ParityShard
    data: bool
    reason: str


@dataclass(frozen=True, slots=True)
class NodeUp:
    node: str


@dataclass(frozen=True, slots=True)
class NodeDown:
    node: str


@dataclass(frozen=True, slots=True)
class Received:
    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class Computed:
    """Answer to Compute, by the machine that asked. error: what the call raised."""

    number: int
    value: object
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EpochClaimed:
    """Answer to ClaimEpoch. ok=False with taken > 0: that number exists already, the highest is ``taken``."""

    attempt: str
    number: int
    ok: bool
    taken: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DurableRead:
    """Answer to ReadDurable: what storage knows of this job. ok=False: storage did not answer. forgotten: the newest epoch that
    stands for the operator's order to forget it (life.grave); 0: none. turn: as it was asked."""

    attempt: str
    ok: bool
    newest: EpochRecord | None = None
    commits: tuple[SnapshotId, ...] = ()
    reason: str = ""
    forgotten: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class FilesWritten:
    """Answer to WriteFiles."""

    snapshot: SnapshotId
    attempt: str
    ok: bool
    reason: str = ""
    report: bytes = b""


@dataclass(frozen=True, slots=True)
class CommitDone:
    """Answer to Commit. ok also when another attempt of the same snapshot had committed first."""

    snapshot: SnapshotId
    attempt: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankFetched:
    """Answer to PrepareRestore for one rank: all its slices are verified in local memory, or why not."""

    rank: int
    round: int
    ok: bool
    code: str = ""  # "damage" | "unreachable" | "mismatch" | "timeout"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankLoaded:
    rank: int
    round: int
    ok: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FlushAsked:
    """A rank wants this step to be durable."""

    step: int


@dataclass(frozen=True, slots=True)
class LevelAsked:
    """A rank waits for a level of what it captured of this step under this grant."""

    step: int
    grant: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """This node is to go soon: hand away what only it holds. on=False: it stays after all."""

    on: bool


@dataclass(frozen=True, slots=True)
class Restarted:
    """First event of a machine whose daemon came back: what it had persisted (instructions.PersistEpoch)."""

    known: EpochRecord | None
    ran: EpochRecord | None = None
    life: str = ""  # of life.Life, as it was written down (instructions.PersistLife)
    life_s: float = 0.0  # for how long it has been so
    tombstone: Tombstone = NO_TOMBSTONE  # of an earlier life of the job that was forgotten here
    sealed: int = 0  # instructions.PersistSealed


@dataclass(frozen=True, slots=True)
class SpareAsked:
    """Memory is short on this node, or a job's time is over: let go of what ``order`` says may go now.

    ``durable``: what storage has of the job, asked just now. ``most``: not more than these snapshots (None: all).
    """

    order: Order
    durable: tuple[SnapshotId, ...] = ()
    most: tuple[SnapshotId, ...] | None = None


@dataclass(frozen=True, slots=True)
class ForgetOrdered:
    """`ckptd forget`: whatever there is of the job up to this epoch goes."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One that is no rank reads these snapshots; none: he has ended. What this node has of them stays for him, as far as nobody who
    trains lacks it."""

    reader: str
    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the shell sends one about every 100 ms."""


Event = (
    RankJoined | RankLeft | SlotsReady | SlotsGone | SlotsShort | RankProgress | RankMissed | SlotSealed | SlotDamaged
    | HoldingFound
    | ReplicaArrived | ReplicaSent | ParityMade | ParityFailed | NodeUp | NodeDown | Received | Computed | EpochClaimed
    | DurableRead
    | FilesWritten | CommitDone | RankFetched | RankLoaded | FlushAsked | LevelAsked | DrainAsked | SpareAsked | ForgetOrdered
    | Restarted | Reading | Tick
)  # fmt: skip
