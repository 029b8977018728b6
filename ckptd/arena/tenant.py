"""Whose memory: a segment belongs to one group of tenants for ever (design D1)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["own", "peer", "scratch"]
KINDS: tuple[Kind, ...] = ("own", "peer", "scratch")


@dataclass(frozen=True, slots=True)
class Tenant:
    """``own``: a local rank captures into it. ``peer``: replicas of other nodes' ranks. ``scratch``: a
    restore."""

    job: str  # "uid/name"
    uid: int
    kind: Kind
    rank: int = 0

    @property
    def group(self) -> Tenant:
        """Who may share a segment: own slots of one rank, or all of one job's replicas."""
        return self if self.kind == "own" else Tenant(self.job, self.uid, self.kind, 0)

    @property
    def tag(self) -> str:
        """The group as 16 hex digits. It is part of the segment's name, and names are kept where no trainer
        can write: a segment header that claims another tenant than its name is refused."""
        group = self.group
        text = f"{group.kind}|{group.rank}|{group.uid}|{group.job}".encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()
