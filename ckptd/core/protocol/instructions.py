"""What the job's machine wants done; its shell does it and answers with events (design D5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.life import Tombstone
from ckptd.core.protocol.messages import Message, Source, WritePiece
from ckptd.core.protocol.written import Written
from ckptd.core.redundancy.parity_sets import ParityShard
from ckptd.core.state_map.layout import Layout


@dataclass(frozen=True, slots=True)
class Send:
    """To another node, or to this one (the shell loops it back as Received)."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class Connect:
    """These nodes matter to the job: keep links to them (NodeUp/NodeDown follow)."""

    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Call it where it holds up nothing else: with thousands of ranks it takes long. What comes of it depends on its arguments
    alone, which nobody changes. Answered by Computed."""

    number: int
    call: Callable[[], object]


@dataclass(frozen=True, slots=True)
class PersistEpoch:
    """Write it down (state directory, fsync) before anything that follows in the same batch leaves the node. ``ran``: the
    newest epoch before it that trained here, as far as this node knows; it counts should ``record`` never run."""

    record: EpochRecord
    ran: EpochRecord | None = None


@dataclass(frozen=True, slots=True)
class PersistSealed:
    """Write down, beside the job's epoch, that all ranks here have sealed a snapshot in it: once per epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PersistLife:
    """Write down that the job has been in this state (life.Life) for so long, beside its epoch."""

    state: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Bury:
    """The job is forgotten here: write the tombstone, then let go of all its memory, its records and of this machine."""

    tombstone: Tombstone


@dataclass(frozen=True, slots=True)
class ReadDurable:
    """turn: of the question, as answers to an earlier one may come late."""

    attempt: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class ClaimEpoch:
    """Exclusively, on durable storage; without storage the shell answers ok at once."""

    attempt: str
    record: EpochRecord


@dataclass(frozen=True, slots=True)
class PrepareRestore:
    """For each local rank: tell it what the snapshot holds, take its wants, fetch, verify -> RankFetched per rank.

    snapshot None: tell the ranks that there is nothing to restore (no RankFetched follows).
    A PrepareRestore of a later round replaces an earlier one.
    """

    record: EpochRecord
    round: int
    ranks: tuple[int, ...]
    snapshot: SnapshotId | None
    durable: bool
    sources: tuple[Source, ...]
    per_rank: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadNow:
    """The vote passed: local ranks write their tensors -> RankLoaded."""

    round: int


@dataclass(frozen=True, slots=True)
class FailJoin:
    """Tell the local ranks of this attempt that restore()/join failed; they raise."""

    attempt: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class FailRestore:
    round: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class FinishRestore:
    """All ranks loaded: drop scratch and pins of the restore, snapshots may begin."""

    round: int


@dataclass(frozen=True, slots=True)
class GiveSlot:
    """Tell the rank it may capture into this slot at its first snapshot() with step >= from_step."""

    rank: int
    slot: int
    grant: int
    from_step: int


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Tell the rank that the grant is void; the machine frees the slot once the rank has answered RankMissed
    or sealed it (the rank may be in the middle of its copy)."""

    rank: int
    grant: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellWritten:
    """Tell this node's ranks that the snapshot under this grant is void, as these tensors were written past a rank's fence: they
    copy them before snapshot() returns from now on."""

    grant: int
    written: Written


@dataclass(frozen=True, slots=True)
class Supersede:
    """Tell this local rank that a newer epoch exists: it takes no more snapshots."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TellLevel:
    """To local ranks and to the metrics: what holds for this snapshot. void: its reason."""

    snapshot: SnapshotId
    level: int
    wanted: int
    durable: bool
    void: str = ""


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """The slot's content is not needed any more: own slots stay allocated (FREE), replica extents are released."""

    slot: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Send the tier prefix of this held slot to that node -> ReplicaSent here, ReplicaArrived there."""

    snapshot: SnapshotId
    rank: int
    slot: int
    tier: int
    to: str


@dataclass(frozen=True, slots=True)
class MakeParity:
    """Make this shard of a parity set from the sources, verified -> ParityMade; with ``data`` the slot of the shard's own
    member, as a tier-1 copy -> ReplicaArrived. Either way ParityFailed when it cannot be done."""

    snapshot: SnapshotId
    shard: ParityShard
    sources: tuple[Source, ...]
    data: bool = False


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write these pieces of held slots under this attempt -> FilesWritten. The slots are pinned until then."""

    snapshot: SnapshotId
    attempt: str
    record: EpochRecord
    pieces: tuple[tuple[int, WritePiece], ...]  # (slot, piece)
    per_rank: tuple[str, ...] = ()  # "t:key"/"o:name" that differ between ranks in this snapshot


@dataclass(frozen=True, slots=True)
class CancelWrite:
    snapshot: SnapshotId
    attempt: str


@dataclass(frozen=True, slots=True)
class Commit:
    """All reports are in: check them through our own mount, publish the manifest -> CommitDone, then retention."""

    snapshot: SnapshotId
    attempt: str
    record: EpochRecord
    reports: tuple[bytes, ...]
    layouts: Mapping[int, Layout]  # of each rank
    per_rank: tuple[str, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class Alarm:
    """For health, metrics and the log. kind: "silent_corruption", "degraded", "no_memory", "breakpoint", ..."""

    kind: str
    text: str


Instruction = (
    Send | Connect | Compute | PersistEpoch | PersistSealed | PersistLife | Bury | ReadDurable | ClaimEpoch | PrepareRestore
    | LoadNow | FailJoin | FailRestore | FinishRestore | GiveSlot | TakeBack | TellWritten | Supersede | TellLevel | FreeSlot
    | Replicate | MakeParity | WriteFiles | CancelWrite | Commit | Alarm
)  # fmt: skip
