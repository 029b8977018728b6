"""What the demo claims, each with its evidence. Pure functions of what was observed, so that a test can feed them lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SOURCES = ("own", "peer", "parity", "durable")
LOSS_RELATIVE_MAX = 1e-5  # against the unbroken run of another world size
NAMES_SHOWN_MAX = 3
NOTHING_DIED = "nothing"


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    ok: bool
    evidence: str


@dataclass
class Chapter:
    """One event: what died, what it cost, where the bytes came from, and what is claimed about it."""

    number: int
    title: str
    died: str = ""
    at: float = 0.0  # unix time of the kill
    back: float = 0.0  # unix time of the first step after it
    trained_step: int = 0  # newest step any rank had finished at the kill
    restored_step: int | None = None
    world: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.claims) and all(claim.ok for claim in self.claims)

    @property
    def steps_lost(self) -> int | None:
        return None if self.restored_step is None else max(0, self.trained_step - self.restored_step)

    def check(self, claim: Claim) -> bool:
        self.claims.append(claim)
        return claim.ok

    def claim(self, name: str, ok: bool, evidence: str) -> bool:
        return self.check(Claim(name, bool(ok), evidence))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "steps_lost": self.steps_lost}


def digests_equal(recorded: Mapping[str, str] | None, restored: Mapping[str, str] | None) -> Claim:
    """Every name of the trainer's record, with the same bytes, and no other name."""
    name = "restored state equals the trainer's own record, byte for byte"
    if not recorded or not restored:
        return Claim(name, False, f"record has {len(recorded or {})} digests, restored state {len(restored or {})}")
    wrong = sorted(n for n in {*recorded, *restored} if recorded.get(n) != restored.get(n))
    shown = ", ".join(wrong[:NAMES_SHOWN_MAX])
    return Claim(name, not wrong, f"{len(wrong)} differ: {shown}" if wrong else f"{len(recorded)} digests equal")


def losses_bit_equal(
    name: str, ours: Mapping[int, float], reference: Mapping[int, float], steps: Sequence[int]
) -> Claim:
    """The very same float64 at every one of ``steps``; a step that either run lacks is a failure."""
    missing = [s for s in steps if s not in ours or s not in reference]
    if missing or not steps:
        return Claim(name, False, f"{len(missing)} of {len(steps)} steps were not run by both")
    wrong = [s for s in steps if ours[s] != reference[s]]
    if wrong:
        return Claim(name, False, f"first difference at step {wrong[0]}: {ours[wrong[0]]!r}, {reference[wrong[0]]!r}")
    return Claim(name, True, f"{len(steps)} steps ({steps[0]} to {steps[-1]}), all bit-equal")


def losses_close(
    name: str, ours: Mapping[int, float], unbroken: Mapping[int, float], steps: Sequence[int]
) -> Claim:
    """|difference| <= LOSS_RELATIVE_MAX x |unbroken loss| at every one of ``steps``."""
    missing = [s for s in steps if s not in ours or s not in unbroken]
    if missing or not steps:
        return Claim(name, False, f"{len(missing)} of {len(steps)} steps were not run by both")
    apart = {s: abs(ours[s] - unbroken[s]) / abs(unbroken[s]) for s in steps}
    worst = max(apart, key=lambda s: apart[s])
    text = f"largest of {len(steps)} steps ({steps[0]} to {steps[-1]}): {apart[worst]:.1e} relative at step {worst}"
    return Claim(name, apart[worst] <= LOSS_RELATIVE_MAX, text)


def only_from(allowed: Iterable[str], moved: Mapping[str, int]) -> Claim:
    """All restored bytes came from these sources, and there were some."""
    allowed = tuple(allowed)
    other = sum(count for source, count in moved.items() if source not in allowed)
    some = sum(moved.get(source, 0) for source in allowed)
    text = ", ".join(f"{source} {moved.get(source, 0)}" for source in SOURCES)
    return Claim(f"restored from {' and '.join(allowed)} alone", other == 0 and some > 0, f"bytes: {text}")


def no_holder(inodes: Iterable[object], holders: Mapping[int, str], unreadable: int) -> Claim:
    """No living process holds any of these memfds; there must have been some to lose."""
    count = len(list(inodes))
    text = f"{count} memfds recorded before the kill, living holders now: {len(holders)}"
    if holders:
        text += " (" + ", ".join(f"{pid} {what}" for pid, what in sorted(holders.items())[:NAMES_SHOWN_MAX]) + ")"
    if unreadable:
        text += f"; {unreadable} processes, none of ours, cannot be looked into"
    return Claim("no living process holds a memfd of the dead", count > 0 and not holders, text)


def one_step(restored: Mapping[int, int], world: int) -> Claim:
    """All ranks came back at one step. restored: rank -> step."""
    steps = sorted(set(restored.values()))
    ok = len(restored) == world and len(steps) == 1 and steps[0] > 0
    return Claim("all ranks are back at one step", ok, f"{len(restored)} of {world} ranks, at {steps}")
