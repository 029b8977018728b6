"""The JSON of ``GET /status`` and ``GET /ls``, which ``ckptd status`` and ``ckptd ls`` print.

All keys may be absent (an older daemon, a job that has not begun); readers use ``.get``. Sizes are bytes, times
are seconds, steps and epochs are numbers, -1 where there is none yet.
"""

from __future__ import annotations

from typing import TypedDict


class NodeReport(TypedDict, total=False):
    id: str
    version: str
    incarnation: str
    pid: int
    uptime_s: float
    domain: str
    control: str
    bulk: str
    socket: str


class MemoryReport(TypedDict, total=False):
    budget_bytes: int
    used_bytes: int
    own_bytes: int
    peer_bytes: int
    scratch_bytes: int


class StorageReport(TypedDict, total=False):
    root: str  # empty: nothing durable is configured
    ok: bool
    reason: str


class ProblemReport(TypedDict, total=False):
    kind: str
    text: str
    job: str
    first: float  # unix time
    last: float
    count: int
    serious: bool


class HealthReport(TypedDict, total=False):
    ok: bool
    problems: list[ProblemReport]
    facts: dict[str, object]


class PeerReport(TypedDict, total=False):
    node: str
    domain: str
    up: bool
    leaving: bool  # it is about to go (`ckptd drain`)
    memory: MemoryReport  # where the peer answered the status question


class RankReport(TypedDict, total=False):
    rank: int
    node: str
    step: int  # newest step for which snapshot() was called
    free_slots: int
    up: bool  # its process is connected
    silent: bool  # its node's daemon does not answer: nothing is known of it but where it was placed
    finished: bool  # it said goodbye without an exception
    state_bytes: int  # of one snapshot, what it says its state needs
    frozen_bytes: int  # beside state_bytes: parameters that do not train


class DrainJob(TypedDict, total=False):
    """What a job still needs of a node that is to go."""

    job: str
    leaving: bool
    known: bool  # its steward has looked; the rest means nothing before
    done: bool  # nothing is needed
    slots: int
    bytes: int
    stuck: int  # of slots: nobody can take them
    reasons: list[str]
    falls: list[dict[str, int]]  # epoch, step, level, without: its level if the node went now, -1: it is lost


class DrainReport(TypedDict, total=False):
    node: str
    draining: bool
    jobs: list[DrainJob]


class OutlookReport(TypedDict, total=False):
    """If a failure of this class happened now (core.redundancy.outlook)."""

    failure: str  # "process", "node", "domain", "all"
    victim: str  # the node or domain whose loss costs most; empty: they are alike
    exact: bool  # false: from certified levels alone, perhaps too pessimistic (not the steward's node)
    step: int  # a restore comes back to it; -1: to the beginning
    source: str  # slowest place that something comes from: "own", "peer", "parity", "durable"; empty: nothing is left
    lost_steps: int
    lost_steps_worst: int  # the most it was lately, just before a newer step took its place
    lost_s: float  # of training; absent: no two steps were seen yet
    lost_s_worst: float
    move_bytes: int  # from elsewhere, by all ranks together
    restore_s: float  # absent: see not_measured
    phases: dict[str, float]  # seconds: decide, transfer, load
    basis: list[str]  # what the seconds come from
    not_measured: list[str]


class JobReport(TypedDict, total=False):
    job: str  # "{uid}/{name}"
    epoch: int
    phase: str  # "idle", "joining", "restoring", "running"; when it is over, its life
    life: str  # core.protocol.life.Life: "running", "orphaned" (no rank lives), "finished" (all said goodbye)
    life_s: float  # for how long it has been over, by this node; 0.0: it is not
    steward: str
    steward_up: bool  # false: it is down, and what is said of levels is what it had said before
    world: int
    nodes: list[PeerReport]
    ranks: list[RankReport]
    newest: dict[str, int]  # level name ("sealed", "protected", "durable") -> newest step that holds it
    lag: dict[str, int]  # level name -> steps behind training
    redundancy: str  # in force: "replicas=1", "xor(4)", "rs(4,2)"
    waits: str  # why no snapshot is granted at the moment; empty: one is
    degradation: int  # 0: what the policy wants, more: lower for want of memory
    wanted: int  # failure domains whose loss the policy wants a snapshot to survive
    level: int  # what the newest protected snapshot really has
    degraded: bool
    outlook: list[OutlookReport]
    flushed_bytes: int  # of state that this node stored durably, in this life of its daemon
    written_bytes: int  # what it wrote for that: less where `dedup` found what had not changed
    unprotected_s: float  # since when nothing has the level that is wanted; 0.0: something has


class PacingReport(TypedDict, total=False):
    mode: str
    state: str  # core.pacing.slowdown.STATES
    rate_bytes_s: float | None  # None: no limit
    line_bytes_s: float  # the fastest that bytes went lately; 0: not known
    slowdown: float | None  # of the worst rank, by traffic and captures; None: not known
    captures: float  # the part of it that captures have
    step_s: float | None  # median step without traffic
    overhead_max: float
    throttled_s: dict[str, float]  # "protect", "flush" -> seconds waited
    sent_bytes: dict[str, int]  # the same, since the daemon's start


class StatusReport(TypedDict, total=False):
    pacing: PacingReport
    node: NodeReport
    memory: MemoryReport
    storage: StorageReport
    health: HealthReport
    peers: list[PeerReport]
    jobs: list[JobReport]


class SnapshotReport(TypedDict, total=False):
    job: str
    epoch: int
    step: int
    level: int  # -1 incomplete, 0 sealed, f protected(f); absent for what only storage holds
    wanted: int
    durable: bool
    keep: bool
    abandoned: bool  # beyond the step that the job went back to: not restored any more, and deleted by retention unless kept
    where: list[str]  # "memory", "storage"
    life: str  # of its job: see JobReport; absent where a storage root was listed
    world: int
    bytes: int
    of: list[str]  # older checkpoints that hold files of it, which stay for it: "step 10", of an earlier epoch "step 10 of epoch 1"
    needed_by: int  # so many newer checkpoints have files in it, and it stays for them
    whole: bool  # its parameters lie beside it as whole tensors, in consolidated/
    lossy: bool  # `ckptd export --quantize` made it: values are not those of the snapshot; the manifest names the tensors
    damaged: bool  # a read-back of what storage holds found that: a restore that meets it goes further back
    without: bool  # optimizer state of some parameters is left out on purpose; the manifest names them
    per_rank: list[str]  # names that differed between ranks: the same world only


class ListReport(TypedDict, total=False):
    rows: list[SnapshotReport]
    errors: list[str]  # a storage that did not answer, a manifest that could not be read
