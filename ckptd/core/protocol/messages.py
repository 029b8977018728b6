"""What daemons tell each other about one job (design D9-D11). Plain values; wire/ encodes them.

Every message travels in an envelope (job, epoch or attempt inside the message, sender's node id). Messages may be lost,
delayed, repeated and reordered: each is a fact or a request that can be said again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.written import Written
from ckptd.core.redundancy.parity_sets import ParityShard


# --- joining, inventory, restore --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RestoreAsk:
    """What restore() asked for; all ranks of an attempt must ask the same. None anywhere: no restore wanted."""

    step: int | None = None
    source: str | None = None  # None | "memory" | "durable"
    allow_fresh: bool = False


@dataclass(frozen=True, slots=True)
class JoinReport:
    """Node -> steward-elect (node of rank 0 of the attempt): these local ranks stand ready. Said twice a second; the world, and
    what else would be long, by its digest, and whole when it is asked for (ReportAgain): most nodes would say the same."""

    attempt: str
    ranks: tuple[str, ...]  # (): with what follows, as whoever had the same ``digest`` said it
    nodes: tuple[NodeInfo, ...]
    here: tuple[int, ...]  # ranks on the sender
    ask: RestoreAsk | None
    known: EpochRecord | None  # newest epoch the sender knows of this job
    opened: bool = False  # the sender is at work on the epoch that was opened for this attempt
    trains: bool = False  # these ranks were let into that epoch, by a daemon that knew it
    digest: bytes = b""  # of ranks, nodes and known


@dataclass(frozen=True, slots=True)
class ReportAgain:
    """Steward-elect -> node: nobody has said yet what is behind the digest of its report."""

    attempt: str


@dataclass(frozen=True, slots=True)
class InventoryRequest:
    attempt: str
    nodes: tuple[NodeInfo, ...]  # so that a daemon outside the new world can answer
    turn: int = 0  # which of this attempt's rounds of questions; the answer names it
    tables: tuple[str, ...] = ()  # digests of those that the asker has: the answer brings each other one once


@dataclass(frozen=True, slots=True)
class HoldingFact:
    """The sender's memory holds this rank's slot of this snapshot, sums verified. tier 0: all of it.

    shard: it is no rank's slot but a parity set's parity, under the parity set's holding rank; the digests are those of its
    members, each name behind "RANK|".
    """

    snapshot: SnapshotId
    rank: int
    tier: int
    layout_id: str
    digests: tuple[tuple[str, bytes], ...] = ()  # of MAYBE/REPLICA fragments ("t:key") and objects ("o:name")
    keep: bool = False
    shard: ParityShard | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """Answer to InventoryRequest (attempt set), or the sender's holdings told to a new steward (attempt "")."""

    attempt: str
    known: EpochRecord | None
    holdings: tuple[HoldingFact, ...]
    layouts: dict[str, bytes] = field(default_factory=dict)  # leaves; one of each table that the asker lacks with that
    certified: tuple[tuple[SnapshotId, int, bool], ...] = ()  # (snapshot, level, durable) the sender was told
    session: str = ""  # with serial: see OpenSession. Without a session and an attempt it is to register: who is the steward?
    serial: int = 0
    done: bool = False  # the sender knows that the restore of ``known`` was completed by all ranks
    never: bool = False  # the sender knows that it was not: one of its own ranks did not load, or it was called off
    incarnation: str = ""  # of the sender: unchanged since ``known`` opened, it has forgotten nothing
    ran: EpochRecord | None = None  # the newest epoch before ``known`` that trained on the sender
    turn: int = 0  # of the request, or of the newest hello of the session, that this answers
    sealed: int = 0  # newest epoch in which every rank of the sender sealed a snapshot
    buried: int = 0  # the highest epoch of this job that the sender has forgotten, for whatever reason (life.Tombstone)
    forgotten: int = 0  # the highest that it has forgotten by the operator's word: what is left of it counts no more
    part: int = 1  # of an answer whose tables are too many for one message: all but the last part have layouts alone
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank's slot of a snapshot is held in memory, or a parity set's parity (``shard``)."""

    node: str
    rank: int
    tier: int
    layout_id: str
    shard: ParityShard | None = None


@dataclass(frozen=True, slots=True)
class EpochOpen:
    """Steward -> members (and old holders, who learn that they are superseded): the one decision."""

    attempt: str
    record: EpochRecord
    round: int
    snapshot: SnapshotId | None  # None: nothing to restore
    durable: bool  # a committed checkpoint of that snapshot may fill gaps
    sources: tuple[Source, ...] = ()
    per_rank: tuple[str, ...] = ()  # "t:key"/"o:name" that differed between ranks in that snapshot
    errors: tuple[str, ...] = ()  # why newer snapshots were passed over, who did not answer


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """Steward -> members: no epoch was opened, every rank raises."""

    attempt: str
    code: str  # "unreachable" | "unrecoverable" | "mismatch" | "timeout" | "storage" | "superseded"
    reason: str


@dataclass(frozen=True, slots=True)
class Vote:
    """Node -> steward: a rank's slices are here and verified (phase "fetched") or written (phase "loaded")."""

    epoch: int
    round: int
    rank: int
    phase: str  # "fetched" | "loaded"
    ok: bool
    code: str = ""  # "damage": another snapshot may still serve; "unreachable": so may the same, later; "mismatch": final
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RestoreGo:
    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class RestoreAbort:
    epoch: int
    round: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """All ranks have loaded: pins fall, grants begin."""

    epoch: int
    round: int


# --- snapshots --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RankState:
    """Node -> steward, after every change: how far a rank is and how many slots may be granted.

    free_slots counts what is FREE and what an unsettled grant holds: a grant is settled by Sealed or Missed, and this
    message always comes before them, so the steward never counts a slot twice.
    """

    epoch: int
    rank: int
    step: int  # newest step for which snapshot() was called, -1: none
    free_slots: int
    asks: int | None = None  # must=True waits for a grant of exactly this step
    left: str = ""  # "finished" | "clean" (said goodbye, after an exception) | "died": the rank is not there any more
    short: str = ""  # why it has fewer slots than it should
    grant: int = 0  # the newest that the sender, or a rank of its, has heard of: no other capture takes its number
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Steward -> nodes: every rank captures at its first snapshot() with step >= from_step not taken by an earlier grant."""

    epoch: int
    grant: int
    from_step: int
    session: str = ""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Node -> steward: a rank's slot is complete and its sums are made."""

    epoch: int
    fact: HoldingFact
    plan_id: str
    layouts: dict[str, bytes] = field(default_factory=dict)  # its leaf; empty once the steward of this epoch knows it
    came_at: int | None = None  # newest step that the rank had called when the grant came to it
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Missed:
    """Node -> steward: this rank will not deliver that grant. written: what was written past its fence."""

    epoch: int
    grant: int
    rank: int
    reason: str
    written: Written = field(default_factory=dict)
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Void:
    """Steward -> nodes: nobody fills a slot under this grant any more, nor keeps any copy of ``snapshot`` where it is named.

    grant 0: only the snapshot, of a grant that nobody answers for any more. written: what every rank copies before its snapshot()
    returns from now on.
    """

    epoch: int
    grant: int
    reason: str
    snapshot: SnapshotId | None = None
    session: str = ""
    written: Written = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """Node -> steward: a replica arrived and was verified; or (lost=True) a holding is gone or damaged."""

    epoch: int
    fact: HoldingFact
    lost: bool = False
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Node -> steward: copies or parity that this node wanted could not be made for want of memory somewhere; or (short=False)
    they can again."""

    epoch: int
    short: bool
    reason: str = ""
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Node -> steward: this node is about to go, what it holds shall lie elsewhere before; or (leaving=False) it stays."""

    epoch: int
    leaving: bool
    session: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Departures:
    """Steward -> nodes: these are about to go, place nothing on them that another one can take."""

    epoch: int
    session: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remainder:
    """Steward -> a leaving node: what holds only as long as it stays. ``slots`` of so many bytes (slots and parts of parity) are
    needed from it, ``stuck`` of them have nowhere to go. falls: (snapshot, level now, level without the leaving nodes)."""

    epoch: int
    session: str
    slots: int
    nbytes: int
    stuck: int = 0
    reasons: tuple[str, ...] = ()
    falls: tuple[tuple[SnapshotId, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DegradationChanged:
    """Steward -> nodes: protect what comes in this way, as there is no memory for what the policy wants (P8), or is again."""

    epoch: int
    session: str
    redundancy: str  # redundancy.parse


@dataclass(frozen=True, slots=True)
class Certificate:
    """Steward -> members and old holders: what holds now. level -1: incomplete, 0: sealed everywhere, f: protected(f).

    ``serial`` grows; a later serial about the same snapshot replaces an earlier one (levels may fall).
    """

    epoch: int
    serial: int
    snapshot: SnapshotId
    level: int
    wanted: int  # level the policy asks for; level < wanted: degraded
    durable: bool
    releases: tuple[SnapshotId, ...] = ()  # older ones whose current level is not above this one's: their memory may go
    session: str = ""


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """whole: with its table, of which the asker has the leaf."""

    epoch: int
    layout_id: str
    whole: bool = False


@dataclass(frozen=True, slots=True)
class LayoutReply:
    epoch: int
    layouts: dict[str, bytes]


# --- durable ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WritePiece:
    """Write these fragments and, if objects, the rank's objects, of a held slot. ``runs``: (first, end) of their numbers in the
    layout, ascending; None: all."""

    rank: int
    layout_id: str
    runs: tuple[tuple[int, int], ...] | None
    objects: bool

    def numbers(self, count: int) -> Sequence[int]:
        """Of the fragments of a layout with so many, within which the runs lie."""
        return range(count) if self.runs is None else [*chain.from_iterable(starmap(range, self.runs))]


@dataclass(frozen=True, slots=True)
class WriteOrder:
    epoch: int
    snapshot: SnapshotId
    attempt: str
    pieces: tuple[WritePiece, ...]
    per_rank: tuple[str, ...] = ()  # "t:key"/"o:name" that differ between ranks in this snapshot


@dataclass(frozen=True, slots=True)
class Wrote:
    """Node -> steward. ``report`` is persist's own description of the files (opaque to the core)."""

    epoch: int
    snapshot: SnapshotId
    attempt: str
    ok: bool
    reason: str = ""
    report: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteCancel:
    epoch: int
    snapshot: SnapshotId
    attempt: str


@dataclass(frozen=True, slots=True)
class FlushAsk:
    """Node -> steward: make this step durable."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class LevelAsk:
    """Node -> steward: a rank of ours waits for this snapshot, and we hold nothing of it; where nobody does, it is void."""

    epoch: int
    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Steward (first, successor, or back after a crash) -> node: tell me your holdings, I speak for the job now.

    The nonce opens a session: from here on the node tells everything to this steward alone, beginning with an Inventory,
    each message with this session and the next serial, repeated until Ack. It obeys grants, voids and certificates
    of this session only. So a steward's books about a node are in order and complete, and what an earlier life of
    either side still has under way is recognised. Each time that the link went or came back the steward asks again, with the next
    turn: an inventory that was under way by then may be older than what the node did for another steward.
    """

    epoch: int
    nonce: str
    turn: int = 0  # the inventory that answers names it


@dataclass(frozen=True, slots=True)
class Ack:
    """Steward -> node: every message of the session up to this serial is in my books. Also a keep-alive, which brings the word
    on the job's life (life.Life; "": not known yet) and why no snapshot is granted at the moment (waiting.py; "": one is)."""

    epoch: int
    session: str
    serial: int
    life: str = ""
    waits: str = ""


@dataclass(frozen=True, slots=True)
class Holders:
    """Steward -> a node that holds this rank's slot: it lacks copies, these are all live ones; make the missing ones.

    tier >= 0: one more copy of that tier, away from these nodes: a slice that several ranks captured lost one of them, or a
    node that is about to go holds it.
    """

    epoch: int
    session: str
    snapshot: SnapshotId
    rank: int
    nodes: tuple[tuple[str, int], ...]  # (node, tier)
    tier: int = -1


@dataclass(frozen=True, slots=True)
class ParityOrder:
    """Steward -> node: hold this shard of a parity set, made from these sources; or, with ``data``, the slot of the shard's own
    member, which is held nowhere any more or by a node that is about to go, as a tier-1 copy."""

    epoch: int
    session: str
    snapshot: SnapshotId
    shard: ParityShard
    sources: tuple[Source, ...]
    data: bool = False


@dataclass(frozen=True, slots=True)
class Stale:
    """Answer to a message of an older epoch: the job has moved on."""

    known: EpochRecord


Message = (
    JoinReport | ReportAgain | InventoryRequest | Inventory | EpochOpen | JoinRefused | Vote | RestoreGo
    | RestoreAbort | RestoreDone | RankState | Grant | Sealed | Missed | Void | Held | Shortage | Leaving
    | Departures | Remainder | DegradationChanged | Certificate | LayoutRequest | LayoutReply | WriteOrder | Wrote
    | WriteCancel | FlushAsk | LevelAsk | OpenSession | Ack | Holders | ParityOrder | Stale
)  # fmt: skip
