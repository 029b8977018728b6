"""The decisions' knobs, as plain numbers with their unit (the daemon's configuration fills them in)."""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.pacing.slowdown import DEADLINE_S
from ckptd.core.redundancy.policies import Redundancy, Replicas

ONE_COPY = Replicas(1)


@dataclass(frozen=True, slots=True)
class Policy:
    """``replicas`` is the short form of ``redundancy``: Policy(replicas=2) has Replicas(2), and Policy(redundancy=xor(4)) has
    replicas 1, the losses that it survives. Raises ValueError when both are given, neither as by default, and differ."""

    replicas: int = 1  # copies in other failure domains; of parity the failure domains it may lose
    own_slots: int = 3  # per rank: 2 captures after protection, 3 also during it, 4 never waits
    peer_sets: int = 2  # generations a peer keeps per rank it protects
    flush_every_steps: int = 0  # 0: only on request, keep=True, breakpoint
    flush_every_s: float = 0.0  # 0: off; whichever comes first
    grant_margin_max_steps: int = 64
    inventory_timeout_s: float = 5.0
    join_timeout_s: float = 300.0  # all ranks of an attempt must join within this
    restore_timeout_s: float = 600.0
    breakpoint_grace_s: float = 10.0  # ranks dead, nobody back: flush what memory holds
    job_linger_s: float = 600.0  # a finished job's memory, and what is known of a job with nothing in memory
    orphan_linger_s: float = 86_400.0  # no rank lives; without a steward it is assumed so after this
    orphan_drop: bool = False  # then also of the last complete snapshot, where memory is short
    steward_timeout_s: float = 10.0  # steward unreachable: the successor speaks
    replicate_retry_s: float = 1.0
    pacing_deadline_s: float = DEADLINE_S  # a copy is made within this
    write_timeout_s: float = 600.0
    keep_last: int = 3  # durable checkpoints
    keep_every_steps: int = 0  # and every multiple of this, 0: none
    durable: bool = True  # a storage root is configured
    redundancy: Redundancy = ONE_COPY

    def __post_init__(self) -> None:
        if self.replicas == self.redundancy.tolerates:
            return
        if self.redundancy == ONE_COPY:
            object.__setattr__(self, "redundancy", Replicas(self.replicas))
        elif self.replicas == ONE_COPY.copies:
            object.__setattr__(self, "replicas", self.redundancy.tolerates)
        else:
            raise ValueError(
                f"replicas={self.replicas} and redundancy={self.redundancy.text} contradict each other"
            )

    @property
    def tolerates(self) -> int:
        """The level that is wanted: failure domains that may be lost at once."""
        return self.redundancy.tolerates
