"""Messages between a training rank and its daemon (design D2), over a unix SOCK_SEQPACKET socket.

A frame is one msgpack array ``[class name, {field: value}]`` of at most FRAME_BYTES_MAX, with file descriptors beside it
(SCM_RIGHTS). Whatever may be larger travels in a sealed memfd named in ``fds`` comments below. Fields are plain
msgpack types only, so that the trainer needs no schema library: ``cls(**fields)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# 2: the world of a Join lies beside the frame; 3: frozen parameters have slots of their own; 4: record_bytes, and what was
# written; 5: levels and waits name the grant, and a Join the newest one; 6: the pieces of a LoadPlan are columns
PROTOCOL_VERSION = 6
FRAME_BYTES_MAX = 64 * 1024
FDS_PER_FRAME_MAX = 64
LOAD_SEGMENTS_MAX = FDS_PER_FRAME_MAX - 1  # of one LoadPlan; the plan itself is the first descriptor
MEMFD_OBJECT_BYTES_MAX = 256 * 1024 * 1024  # catalogue, wants, load plan, layout
GRANT_MAX = (1 << 53) - 1
TIMES_MAX = 64  # rows of step times in one Called

Pair = list[int]  # [epoch, step]


# --- rank -> daemon ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Hello:
    """First frame. The job is (peer uid, name); ``pid`` must be the peer's own (checked against SO_PEERCRED)."""

    version: int
    job: str
    pid: int


@dataclass(frozen=True)
class Offer:
    """After a reconnect: memfds this process still maps, so that a daemon that lost them can take them back.
    fds: one per name. Answered by Mapped/Retire per slot."""

    segments: list[str]


@dataclass(frozen=True)
class Join:
    """At restore() or the first snapshot(): the world is fixed now. fds: [world], see wire/world.py.

    ``attempt`` is one random string for all ranks. ``ask`` is None or a RestoreAsk dict.
    state_bytes: predicted live part of one snapshot; frozen_bytes: of its frozen part; record_bytes: of core.state_map.record_size.
    After a reconnect (the daemon restarted, training went on) the client sends Hello, Offer and the *same* Join again:
    the attempt is the nonce of the running epoch, so the daemon answers Mapped* and Ready, and opens nothing.
    ``trains``: it had been told Ready. A daemon that lost what it knew asks the others of this world for that epoch.
    ``grant``: the newest that it was given.
    """

    attempt: str
    rank: int
    state_bytes: int
    ask: dict[str, Any] | None
    frozen_bytes: int = 0
    trains: bool = False
    record_bytes: int = 0
    grant: int = 0


@dataclass(frozen=True)
class Look:
    """Of a process that is no rank: the newest step that can be had, or this one; the job hears nothing of it. nodes: NodeInfo
    of some on which it runs, where this daemon has no part in it. Answered by Opened, or Failed; then Wants, LoadPlan and Loaded
    under the same number bring parts of it, as often as is liked, without votes: each Wants comes behind the Loaded of the one
    before, and the last LoadPlan of each is answered so."""

    round: int
    step: int | None = None
    source: str | None = None  # "memory" | "durable"
    nodes: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Wants:
    """fds: [wants] msgpack {"tensors": [[key, dtype, shape, offsets, sizes], ...], "objects": [name, ...], "first": n,
     "ranks": {row: rank}}. The slices this rank wants, in the order that LoadPlan refers to. The first n (none without it) come in
    parts before all others: the rank checks them before it writes any of its tensors. ranks: whose value, of what was each rank's
    own; for rows that want another than this rank's, and only where Opened says "own"."""

    round: int


@dataclass(frozen=True)
class WantsRefused:
    """The snapshot does not fit the registered objects (all mismatches named); final for this restore()."""

    round: int
    code: str
    reason: str


@dataclass(frozen=True)
class LoadedPart:
    """This part of the load plan, which is not the last, is copied: its memory may be used for the next one."""

    round: int
    part: int


@dataclass(frozen=True)
class Loaded:
    """After the last part, or the first that failed."""

    round: int
    ok: bool
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Called:
    """snapshot(step) was called, or was the newest call when this report was due. asks: must=True waits for a grant of exactly
    this step.

    times: at most TIMES_MAX rows [begin, end, steps between them, what we did beside them: UNDISTURBED, CAPTURED or WAITED of
    core/pacing/traffic.py], seconds of CLOCK_MONOTONIC.
    spans: [begin, end] of each communication in the newest row, in seconds from its begin. Both only to a daemon whose Welcome
    asks for them (policy "pacing"), so older ones never see them."""

    step: int
    asks: bool = False
    times: list[list[float]] | None = None
    spans: list[list[float]] | None = None


@dataclass(frozen=True)
class SealedSlot:
    """Capture into the slot is complete. fds: [layout] when this layout_id is new to the connection.
    objects_bytes: real length of the msgpack map {name: bin} in the objects region (the rest of it is zero).
    frozen: the slot that has the layout's frozen part. With the first snapshot that names it, it is written no more.
    came_at: newest step called when the grant came (None: not known), by which the next ones are granted ahead."""

    slot: int
    grant: int
    step: int
    layout_id: str
    objects_bytes: int
    keep: bool = False
    capture_s: float = 0.0
    blocked_s: float = 0.0
    came_at: int | None = None
    frozen: int = -1


@dataclass(frozen=True)
class GaveUp:
    """This grant will not be delivered by this rank ("late", "fence timeout", "no memory", "taken back", "type", ...)."""

    grant: int
    step: int
    reason: str
    written: dict[str, list[str]] = field(default_factory=dict)  # past the fence, as ckptd.core.protocol.written bounds it


NOTHING_FROZEN = -1


@dataclass(frozen=True)
class Resize:
    """The layout's live part needs this many bytes per slot now. frozen_bytes > 0: the rank needs a slot of this size to
    capture its frozen part into, anew. NOTHING_FROZEN: it has no frozen part any more. record_bytes: as of a Join."""

    state_bytes: int
    frozen_bytes: int = 0
    record_bytes: int = 0


@dataclass(frozen=True)
class Skipped:
    """A snapshot() that returned skipped without any grant, for health and metrics."""

    step: int
    reason: str


@dataclass(frozen=True)
class WaitFor:
    """The rank waits until what it captured of this step, under this grant, reaches a level; "durable" schedules a flush. Said
    every two seconds while it waits."""

    step: int
    grant: int
    level: str  # "sealed" | "protected" | "durable"


@dataclass(frozen=True)
class ListSteps:
    request: int


@dataclass(frozen=True)
class AskHealth:
    request: int


@dataclass(frozen=True)
class Release:
    """This step need not be kept any more, whoever asked for that. epoch: in which this rank itself captured it with ``keep``; or
    0. Only to a daemon whose Welcome offers it (policy "release"), so older ones never see it."""

    request: int
    step: int
    epoch: int = 0


@dataclass(frozen=True)
class DrainAsk:
    """`ckptd drain`, without a Hello. want: "on", "off", or "look" for news. node: another one of the cluster; "": this daemon's.
    Only root and the daemon's own user may (SO_PEERCRED)."""

    want: str
    node: str = ""


@dataclass(frozen=True)
class ForgetAsk:
    """`ckptd forget`, without a Hello. job: its name, or "uid/name". storage: its checkpoints as well. Only its owner, root and the
    daemon's own user may (SO_PEERCRED)."""

    job: str
    storage: bool = False


@dataclass(frozen=True)
class Goodbye:
    """The with block ended. finished: without an exception; the job's memory may go after job_linger, once durable."""

    finished: bool


# --- daemon -> rank ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Welcome:
    version: int
    node: dict[str, Any]  # NodeInfo
    policy: dict[str, Any]  # Policy fields the client needs: replicas, own_slots, audit_every, fence_timeout_s, ...


@dataclass(frozen=True)
class Refused:
    """The daemon will not serve this connection (version, rights, unknown job...): it is of no more use, but one that asks to
    drain may ask again."""

    what: str
    where: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Mapped:
    """A slot the rank may be granted; frozen: one for its frozen part, which replaces any it had. It may fill it at once,
    unless it ``holds`` a frozen part of that layout id, of an earlier life of the rank or the daemon: that is not written to, but
    snapshots may lean on it when it has the same bytes. fds: [segment] when this segment name is new to the connection."""

    slot: int
    segment: str
    segment_bytes: int
    offset: int  # of the payload in the segment
    capacity: int
    frozen: bool = False
    holds: str = ""


@dataclass(frozen=True)
class Retire:
    """Unmap this slot's segment once no slot of it is left."""

    slot: int


@dataclass(frozen=True)
class Opened:
    """The epoch is open. fds: [catalogue] when snapshot is not None: msgpack
    {"tensors": {key: [dtype, shape, role]}, "objects": {name: "all" | [ranks that have it]}, "per_rank": [...],
     "aliases": {alias: key}, "world": n, "own": {key of a per-rank tensor: "all" | [ranks that have one]}}. snapshot None: nothing
    to restore, Ready follows."""

    epoch: int
    round: int
    snapshot: Pair | None
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadPlan:
    """All ranks voted yes: copy, then Loaded. fds: [plan, segment, segment, ...]; plan is msgpack
    {"pieces": as core.state_map.pieces.Placed encodes them: want index, form, segment index and byte offset of each,
     "objects": {name: [segment index, byte offset, length]}, "objects_all": {name: {rank: [segment, offset, length]}},
     "bytes": {source: n}, "seconds": {...}, "mode": "verified" | "direct", "part": k, "last": bool}. A piece: the box
    of its form, of want i, lies inside the C-contiguous stored box of the form, which begins at that byte offset.
    What needs more segments than a frame holds, or more memory than there is ("direct"), comes in parts 0, 1, ...: each is
    answered with LoadedPart, the last with Loaded. Pieces, bytes: of this part. Objects: all of them, in each part."""

    round: int
    segment_bytes: list[int]


@dataclass(frozen=True)
class Failed:
    """restore() or the join failed on all ranks: raise."""

    code: str
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Ready:
    """All ranks loaded (or there was nothing to load): snapshots may begin."""

    epoch: int


@dataclass(frozen=True)
class GrantSlot:
    slot: int
    grant: int
    from_step: int


@dataclass(frozen=True)
class TakeBack:
    """The grant is void. Answer GaveUp("taken back") if it was not sealed yet."""

    grant: int
    reason: str


@dataclass(frozen=True)
class WrittenThere:
    """The snapshot under this grant is void, as these were written past the fence of some rank: {registered object: keys of its
    tensors; none: all of it}. Copy them before snapshot() returns from now on."""

    grant: int
    written: dict[str, list[str]]


@dataclass(frozen=True)
class Level:
    """Of what was captured of this step under this grant."""

    epoch: int
    step: int
    grant: int
    level: int  # -1 incomplete, 0 sealed, f protected(f)
    wanted: int
    durable: bool
    void: str = ""


@dataclass(frozen=True)
class Superseded:
    epoch: int


@dataclass(frozen=True)
class Steps:
    request: int
    rows: list[dict[str, Any]]  # {"epoch", "step", "level", "durable", "where"}


RELEASED, NOT_KEPT, NO_SUCH_STEP = "released", "not kept", "no such step"


@dataclass(frozen=True)
class Released:
    """Answer to Release. outcome: one of the three above, or "": it could not be done, as the others say."""

    request: int
    outcome: str
    what: str = ""
    where: str = ""
    hint: str = ""


NO_ANSWER = "no answer"  # Refused.what: of the node that a DrainAsk names, this time; another look may have one


@dataclass(frozen=True)
class DrainState:
    """Answer to DrainAsk. jobs: those that hold something, as ckptd.observe.report.DrainJob."""

    node: str
    draining: bool
    jobs: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Forgotten:
    """Answer to ForgetAsk. nodes: where it is forgotten now. silent: nodes that did not answer. deleted: checkpoints on storage."""

    node: str
    job: str
    epoch: int  # the highest that counts no more
    silent: list[str] = field(default_factory=list)
    deleted: int = 0
    nodes: list[str] = field(default_factory=list)


OWN_VALUES = "own"  # fact of a Health that is news: keys of tensors whose values turned out to be each rank's own


@dataclass(frozen=True)
class Health:
    """Answer to AskHealth (request > 0) or news (request 0). facts: who does not know one passes over it."""

    request: int
    ok: bool
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


TO_DAEMON = (
    Hello, Offer, Join, Look, Wants, WantsRefused, LoadedPart, Loaded, Called, SealedSlot, GaveUp, Resize, Skipped, WaitFor,
    ListSteps, AskHealth, Release, DrainAsk, ForgetAsk, Goodbye,
)  # fmt: skip
TO_RANK = (
    Welcome, Refused, Mapped, Retire, Opened, LoadPlan, Failed, Ready, GrantSlot, TakeBack, WrittenThere, Level, Superseded, Steps,
    Released, DrainState, Forgotten, Health,
)  # fmt: skip
