"""What the steward knows of one snapshot, and the phase that the snapshot is in (design D9, P2, P3).

Each field says what it means in which phase. A transition is a method named after where it leads; TRANSITIONS has all of
them with their guards (below and in guards.py), and one that it lacks is a mistake of ours. docs/ARCHITECTURE.md shows it
as a table, which ``python -m tests.states --write`` makes from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.messages import Certificate
from ckptd.core.redundancy.parity_sets import ParitySet
from ckptd.core.redundancy.protection import Classes
from ckptd.core.state_map.agreement import Agreement


class Phase(Enum):
    """The value says what it means, as the table in docs/ARCHITECTURE.md has it."""

    GATHERING = "nodes hold parts of it; this steward has certified nothing yet"
    WHOLE = "certified at a level of 0 or more, which is less than is wanted"
    PROTECTED = "certified at the level that is wanted"
    FALLEN = "it was certified once, and memory lacks a part of it now; storage may have it"
    VOID = "never to be used: whoever holds a part of it is told so until nobody does"
    RELEASED = "its memory is not needed any more: only its name is kept, for nodes that missed the word"
    GONE = "nobody holds anything of it, and nobody was told of it"


CERTIFIED = (Phase.WHOLE, Phase.PROTECTED)
NO_USE = ("nowhere", "not_whole", "left_behind")
VOIDED_BY = ("differs", "grant_void", *NO_USE)
LET_GO_BY = ("outdone", "spent", "returned_in_part")

# (from, to) -> the guards, each of which is enough
TRANSITIONS: dict[tuple[Phase, Phase], tuple[str, ...]] = {
    (Phase.GATHERING, Phase.WHOLE): ("survives",),
    (Phase.GATHERING, Phase.PROTECTED): ("survives_as_wanted",),
    (Phase.GATHERING, Phase.FALLEN): ("known_to_have_fallen",),
    (Phase.WHOLE, Phase.PROTECTED): ("survives_as_wanted",),
    (Phase.WHOLE, Phase.FALLEN): ("lacks_a_part",),
    (Phase.PROTECTED, Phase.WHOLE): ("survives",),
    (Phase.PROTECTED, Phase.FALLEN): ("lacks_a_part",),
    (Phase.FALLEN, Phase.WHOLE): ("survives",),
    (Phase.FALLEN, Phase.PROTECTED): ("survives_as_wanted",),
    (Phase.GATHERING, Phase.VOID): VOIDED_BY,
    (Phase.WHOLE, Phase.VOID): NO_USE,
    (Phase.PROTECTED, Phase.VOID): NO_USE,
    (Phase.FALLEN, Phase.VOID): VOIDED_BY,
    (Phase.GATHERING, Phase.RELEASED): LET_GO_BY,
    (Phase.WHOLE, Phase.RELEASED): (*LET_GO_BY, "written_out"),
    (Phase.PROTECTED, Phase.RELEASED): (*LET_GO_BY, "written_out"),
    (Phase.FALLEN, Phase.RELEASED): LET_GO_BY,
    (Phase.GATHERING, Phase.GONE): ("held_nowhere",),
    (Phase.VOID, Phase.GONE): ("held_nowhere",),
}


@dataclass
class SnapshotState:
    """In every phase: who said what in its current session. What is weighed (level, classes, agreement) is as of the last look.

    Invariants: WHOLE has 0 <= certificate.level < certificate.wanted, PROTECTED certificate.level == certificate.wanted, FALLEN
    certificate.level == -1, GATHERING no certificate; VOID alone has a reason, and a certificate only if it had one before, or
    nodes remember one, whose level is -1 then.
    """

    snapshot: SnapshotId
    phase: Phase = Phase.GATHERING
    holders: dict[int, dict[str, int]] = field(default_factory=dict)  # rank -> node -> tier
    layout_ids: dict[int, str] = field(default_factory=dict)
    digests: dict[int, tuple[tuple[str, bytes], ...]] = field(default_factory=dict)
    shards: dict[ParitySet, dict[int, set[str]]] = field(default_factory=dict)  # parity set -> position -> nodes with its parity
    positions: dict[ParitySet, tuple[str, ...]] = field(default_factory=dict)  # parity set -> who is to hold it, by position
    tolerated: dict[ParitySet, int] = field(default_factory=dict)  # parity set -> losses it survives now, where that was looked at
    moved: dict[tuple[ParitySet, int], str] = field(default_factory=dict)  # (parity set, position) -> where it was asked for last
    keep: bool = False
    durable: bool = False
    failures: int = 0  # of flushes
    lacks_since: float | None = None  # a flush waits since then for what only parity can bring
    void: str = ""  # VOID: why. Invariant: it is there in this phase alone
    agreement: Agreement | None = None  # once every rank's layout is known and nothing is missing
    classes: Classes | None = None  # once every rank's layout is known
    level: int = -1  # now, also of what is void; not bounded by what the policy wants
    certificate: Certificate | None = None  # the last that was said; its level follows ``level`` with each look
    leans_since: float | None = None  # WHOLE, PROTECTED: below its level without nodes that are about to go
    again: bool = False  # released once: somebody who missed that may still hold copies nobody told of

    def nodes(self) -> set[str]:
        """Who holds something of it."""
        found = {node for nodes in self.holders.values() for node in nodes}
        return found.union(*(nodes for held in self.shards.values() for nodes in held.values()))

    def vouching(self, ranks: Iterable[int]) -> dict[int, list[str]]:
        """rank -> nodes that know its layout: holders of its slot, and of parity of its parity set."""
        found = {rank: [*self.holders.get(rank, ())] for rank in ranks}
        for parity_set, held in self.shards.items() if found else ():
            nodes = sorted({node for nodes in held.values() for node in nodes})
            for rank in found.keys() & parity_set.ranks():
                found[rank] += nodes
        return found

    @property
    def certified(self) -> bool:
        """Whole, and said so."""
        return self.phase in CERTIFIED

    # --- guards: what was said of it last -----------------------------------------------------------------------
    def survives(self) -> bool:
        """All of it is in memory, but fewer domains may be lost than is wanted."""
        return self.certificate is not None and 0 <= self.certificate.level < self.certificate.wanted

    def survives_as_wanted(self) -> bool:
        """As many domains may be lost as is wanted."""
        return self.certificate is not None and self.certificate.level >= self.certificate.wanted

    def lacks_a_part(self) -> bool:
        """Nobody who is in session holds some part of it."""
        return self.certificate is not None and self.certificate.level < 0

    def known_to_have_fallen(self) -> bool:
        """It lacks a part, and nodes remember a level that an earlier steward certified; else nothing is said of it."""
        return self.phase is Phase.GATHERING and self.lacks_a_part()

    # --- transitions, by the guard that lets them ---------------------------------------------------------------
    def certify(self, certificate: Certificate) -> None:
        """What is said of it from now on. A new word in the same phase is no transition, and a void one stays void."""
        self.certificate = certificate
        if self.phase is Phase.VOID:
            assert self.lacks_a_part(), "what is void has no level"
        elif self.survives_as_wanted():
            self.become_protected("survives_as_wanted")
        elif self.survives():
            self.become_whole("survives")
        else:
            self.become_fallen("known_to_have_fallen" if self.known_to_have_fallen() else "lacks_a_part")

    def become_whole(self, by: str) -> None:
        self._become(Phase.WHOLE, by)

    def become_protected(self, by: str) -> None:
        self._become(Phase.PROTECTED, by)

    def become_fallen(self, by: str) -> None:
        self._become(Phase.FALLEN, by)

    def become_void(self, by: str, reason: str) -> None:
        self._become(Phase.VOID, by)
        self.void = reason

    def become_released(self, by: str) -> None:
        self._become(Phase.RELEASED, by)

    def become_gone(self, by: str) -> None:
        self._become(Phase.GONE, by)

    def _become(self, to: Phase, by: str) -> None:
        if to is not self.phase:
            guards = TRANSITIONS.get((self.phase, to), ())
            assert by in guards, f"{self.phase.name} does not become {to.name} by {by}"
            self.phase = to
