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
    memory: MemoryReport  # where the peer answered the status question


class RankReport(TypedDict, total=False):
    rank: int
    node: str
    step: int  # newest step for which snapshot() was called
    free_slots: int
    up: bool  # its process is connected


class JobReport(TypedDict, total=False):
    job: str  # "{uid}/{name}"
    epoch: int
    phase: str
    steward: str
    world: int
    nodes: list[PeerReport]
    ranks: list[RankReport]
    newest: dict[str, int]  # level name ("sealed", "protected", "durable") -> newest step that holds it
    lag: dict[str, int]  # level name -> steps behind training
    wanted: int  # copies in other failure domains the policy asks for
    level: int  # what the newest protected snapshot really has
    degraded: bool


class StatusReport(TypedDict, total=False):
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
    where: list[str]  # "memory", "storage"
    world: int
    bytes: int
    per_rank: list[str]  # names that differed between ranks: the same world only


class ListReport(TypedDict, total=False):
    rows: list[SnapshotReport]
    errors: list[str]  # a storage that did not answer, a manifest that could not be read
