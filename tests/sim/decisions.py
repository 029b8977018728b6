"""What the steward of a start had been told when it decided what to restore: followed from the messages that reached it.

Nothing is read from its machine. Attempts are kept by (node, life of its daemon, attempt), since a daemon that comes back knows
nothing of what was told to it before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.messages import (
    EpochOpen,
    Inventory,
    InventoryRequest,
    JoinReport,
    RestoreAsk,
    Stale,
    Vote,
)


@dataclass
class Told:
    """All that one steward was told for one attempt."""

    own: EpochRecord | None  # what its node knew
    ask: RestoreAsk | None = None
    turn: int = 0
    answers: dict[str, Inventory] = field(default_factory=dict)  # of this turn
    parts: dict[tuple[str, int], dict[int, Inventory]] = field(default_factory=dict)  # (sender, of how many) -> by number
    commits: frozenset[SnapshotId] | None = None  # None: storage did not answer the last time that it was asked anew
    read_turn: int = 0
    newest: EpochRecord | None = None  # that storage has a claim of
    reports: list[EpochRecord] = field(default_factory=list)
    meanwhile: list[EpochRecord] = field(default_factory=list)  # that others declared since it began
    failures: set[str] = field(default_factory=set)  # codes of the votes against what it had decided
    decided: Told | None = None  # what it had been told at its last decision

    def records(self) -> list[EpochRecord]:
        """Every epoch that it has heard of."""
        said = [r for answer in self.answers.values() for r in (answer.known, answer.ran)]
        return [r for r in (self.own, self.newest, *self.reports, *said) if r is not None]

    def may_have_run(self, record: EpochRecord) -> bool:
        """Nobody who answered could say that its restore was never completed."""
        held = any(fact.snapshot.epoch == record.number for a in self.answers.values() for fact in a.holdings)
        told = any(snapshot.epoch == record.number for a in self.answers.values() for snapshot, _, _ in a.certified)
        durable = any(commit.epoch == record.number for commit in self.commits or ())
        return held or told or durable or not any(
            knows_that_it_never_ran(self.answers[node], record) for node in record.ranks if node in self.answers
        )


def knows_that_it_never_ran(answer: Inventory, record: EpochRecord) -> bool:
    """A member with ranks that never entered it, or whose ranks did not load."""
    if answer.known is None:
        return False
    return answer.known.number < record.number or (answer.never and answer.known == record)


class Decisions:
    def __init__(self) -> None:
        self._told: dict[tuple[str, int, str], Told] = {}
        self._last: dict[tuple[str, int], str] = {}  # attempt that a daemon decides about

    def of(self, node: str, life: int, attempt: str) -> Told | None:
        return self._told.get((node, life, attempt))

    def heard(self, node: str, life: int, sender: str, message: object, record: EpochRecord | None) -> None:
        """record: the newest epoch that the node knows."""
        kind = type(message)
        if kind is Inventory:
            self._answered(node, life, sender, message)  # type: ignore[arg-type]
        elif kind is JoinReport:
            self._reported(node, life, message, record)  # type: ignore[arg-type]
        elif kind is Stale:
            self._outdated(node, life, message.known)  # type: ignore[attr-defined]
        elif kind is EpochOpen:
            self._outdated(node, life, message.record)  # type: ignore[attr-defined]
        elif kind is Vote and not message.ok:  # type: ignore[attr-defined]
            told = self._told.get((node, life, self._last.get((node, life), "")))
            if told is not None:
                told.failures.add(message.code)  # type: ignore[attr-defined]

    def _reported(self, node: str, life: int, message: JoinReport, record: EpochRecord | None) -> None:
        told = self._told.get((node, life, message.attempt))
        if told is None:
            told = self._told[node, life, message.attempt] = Told(record, message.ask)
        if message.known is not None and message.known not in told.reports:
            told.reports.append(message.known)

    def _outdated(self, node: str, life: int, record: EpochRecord) -> None:
        """Another start was declared while it gathers for its own."""
        for (who, when, attempt), told in self._told.items():
            if (who, when) == (node, life) and attempt != record.nonce and record not in told.meanwhile:
                told.meanwhile.append(record)

    def _answered(self, node: str, life: int, sender: str, message: Inventory) -> None:
        told = self._told.get((node, life, message.attempt))
        if told is None or message.turn != told.turn:
            return
        came = told.parts.setdefault((sender, message.parts), {})
        came[message.part] = message
        if len(came) == message.parts:  # without one of them it is none: it is asked for again
            told.answers[sender] = came[message.parts]

    def asked(self, node: str, life: int, message: InventoryRequest) -> None:
        told = self._told.get((node, life, message.attempt))
        if told is not None and message.turn != told.turn:
            told.turn, told.answers, told.parts = message.turn, {}, {}
        self._last[node, life] = message.attempt

    def reads(self, node: str, life: int, attempt: str, turn: int) -> None:
        """It asks storage, perhaps as it did before."""
        told = self._told.get((node, life, attempt))
        if told is not None and turn != told.read_turn:
            told.read_turn, told.commits = turn, None

    def read(
        self, node: str, life: int, attempt: str, turn: int, newest: EpochRecord | None, commits: Collection[SnapshotId] | None
    ) -> None:
        """commits None: storage did not answer."""
        told = self._told.get((node, life, attempt))
        if told is not None and turn == told.read_turn:
            told.newest = newest or told.newest
            told.commits = frozenset(commits) if commits is not None else None

    def decided(self, node: str, life: int, attempt: str) -> None:
        """It claims an epoch for what it has chosen; what it is told from now on comes too late."""
        told = self._told.get((node, life, attempt))
        if told is not None:
            told.decided = None
            told.decided = replace(
                told, answers=dict(told.answers), reports=list(told.reports), meanwhile=list(told.meanwhile),
                failures=set(told.failures),
            )  # fmt: skip
