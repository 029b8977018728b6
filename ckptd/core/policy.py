"""The decisions' knobs, as plain numbers with their unit (the daemon's configuration fills them in)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    replicas: int = 1  # copies in other failure domains
    own_slots: int = 3  # per rank: 2 waits for protection, 3 only for a pinned flush, 4 never
    peer_sets: int = 2  # generations a peer keeps per rank it protects
    flush_every_steps: int = 0  # 0: only on request, keep=True, breakpoint
    flush_every_s: float = 0.0  # 0: off; whichever comes first
    grant_margin_max_steps: int = 64
    inventory_timeout_s: float = 5.0
    join_timeout_s: float = 300.0  # all ranks of an attempt must join within this
    restore_timeout_s: float = 600.0
    breakpoint_grace_s: float = 10.0  # ranks dead, nobody back: flush what memory holds
    steward_timeout_s: float = 10.0  # steward unreachable: the successor speaks
    replicate_retry_s: float = 1.0
    write_timeout_s: float = 600.0
    keep_last: int = 3  # durable checkpoints
    keep_every_steps: int = 0  # and every multiple of this, 0: none
    durable: bool = True  # a storage root is configured
