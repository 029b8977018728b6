"""Messages between the shells of two daemons, beside core.protocol.messages, on the same control link (design D3, D4).

Bytes always flow by *push*: whoever receives issues the single-use ticket (wire.bulk), whoever sends connects with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.messages import HoldingFact


@dataclass(frozen=True, slots=True)
class ReplicaOffer:
    """I want you to hold this slot's tier prefix. sums cover the blocks of that prefix."""

    transfer: str
    snapshot: SnapshotId
    rank: int
    tier: int
    layout: bytes
    objects_bytes: int
    sums: bytes
    digests: tuple[tuple[str, bytes], ...] = ()  # the whole slot's, as its own node made them
    keep: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaTicket:
    """Receiver -> sender: push now; once said, or without a ticket: at work on it."""

    transfer: str
    ticket: bytes  # wire.bulk.Ticket.encode(); empty while memory is made ready


@dataclass(frozen=True, slots=True)
class ReplicaDone:
    """Receiver -> sender: verified and sealed (ok), or refused ("no memory", "stale epoch", "damage", ...)."""

    transfer: str
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchAsk:
    """Push me these byte spans of that held slot, one after the other, verified against your sums first. within_s: for
    protection, so paced, and done within so many seconds; 0: for a restore, as fast as it goes."""

    transfer: str
    snapshot: SnapshotId
    rank: int
    spans: tuple[tuple[int, int], ...]  # (payload offset, length)
    ticket: bytes
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchDone:
    """Holder -> asker. Each span, cut every BLOCK_BYTES from its start, has an xxh3_128 per unit: the sum made at the seal where
    all units of the span are whole blocks, a sum of what was sent (its blocks verified first) elsewhere."""

    transfer: str
    ok: bool
    sums: bytes = b""
    reason: str = ""
    again: bool = False  # nothing is wrong with the slot: the way to the asker broke, or there was no memory for it


@dataclass(frozen=True, slots=True)
class FetchBad:
    """Asker -> holder: what you sent did not match its sums. Look at your copy."""

    snapshot: SnapshotId
    rank: int


@dataclass(frozen=True, slots=True)
class CardAsk:
    """What does your slot of this rank say about itself? For parity over it, which keeps it."""

    transfer: str
    snapshot: SnapshotId
    rank: int


@dataclass(frozen=True, slots=True)
class Card:
    """Holder -> asker. sums cover the blocks of the tier-1 prefixes."""

    transfer: str
    ok: bool
    reason: str = ""
    layout: bytes = b""
    objects_bytes: int = 0
    sums: bytes = b""
    digests: tuple[tuple[str, bytes], ...] = ()
    keep: bool = False


@dataclass(frozen=True, slots=True)
class MapAsk:
    """Tell me this layout, of a slot or of a parity set's member that you hold; its leaf, where its table is one of ``tables``."""

    transfer: str
    layout_id: str
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MapPart:
    """Holder -> asker. data: encoded, or the leaf; empty where nothing with this layout is held."""

    transfer: str
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadAsk:
    """Of what a restore reads from storage: who reads this value? With a ticket, to whoever does: push me it, once it is read."""

    transfer: str
    restore: str
    piece: bytes
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class ReadTold:
    """``reader``: it, which is the asker where nobody was before him; "": nobody here knows. ``ok``: it was pushed, ``sums`` as in
    FetchDone, of one span; else it is not to be had here."""

    transfer: str
    ok: bool = False
    sums: bytes = b""
    reader: str = ""


@dataclass(frozen=True, slots=True)
class HoldingsAsk:
    """What do you hold of this job, and what were you told of it? ``reader``, who is no rank, wants it: keep the newest that
    you were told to be complete, until you hear what he has chosen."""

    transfer: str
    reader: str


@dataclass(frozen=True, slots=True)
class HoldingsTold:
    """certified: (snapshot, level, durable). record: of the newest epoch that the holder knows."""

    transfer: str
    holdings: tuple[HoldingFact, ...] = ()
    certified: tuple[tuple[SnapshotId, int, bool], ...] = ()
    record: EpochRecord | None = None


@dataclass(frozen=True, slots=True)
class ReadBy:
    """This reader reads these snapshots of the job, for a while; said again as long as he does, and none when he has ended."""

    reader: str
    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class StatusAsk:
    request: str


@dataclass(frozen=True, slots=True)
class StatusReply:
    request: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """`ckptd drain NODE`, passed on: "on", "off" or "look". Holders of the cluster key are one trust domain."""

    request: str
    want: str


@dataclass(frozen=True, slots=True)
class DrainReply:
    request: str
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ForgetOrder:
    """`ckptd forget`, passed on to the job's other nodes. look: only say what speaks against it."""

    request: str
    epoch: int
    look: bool


@dataclass(frozen=True, slots=True)
class ForgetReply:
    request: str
    reason: str  # why not; "": nothing does, or it is done
    wait_s: float = 0.0  # for so long, or until its ranks are stopped (0)


@dataclass(frozen=True, slots=True)
class StorageToken:
    """What the sender placed on its storage under its node id: whoever cannot read it there has another storage."""

    token: str


PEER_MESSAGES = (
    ReplicaOffer, ReplicaTicket, ReplicaDone, FetchAsk, FetchDone, FetchBad, CardAsk, Card, MapAsk, MapPart, ReadAsk, ReadTold,
    HoldingsAsk, HoldingsTold, ReadBy, StatusAsk, StatusReply, DrainOrder, DrainReply, ForgetOrder, ForgetReply, StorageToken,
)  # fmt: skip
