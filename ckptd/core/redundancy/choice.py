"""``redundancy = auto``: which policy fits the budget, and why (D8, P8).

Copies come first: a lost slice is restored by one read, at no CPU. Parity takes less memory for the same losses, but every
rebuilt byte is read from as many nodes as the group has data, and computed; so it is chosen where copies do not fit, with
the smallest group that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from ckptd.core.redundancy.sizing import OWN_SLOTS_MIN, Sizing

DATA_MIN = 2  # one data and one parity is a copy
DATA_MAX = (
    30  # data nodes of a group: beyond it parity saves next to nothing more, and a rebuild asks everybody
)


@dataclass(frozen=True, slots=True)
class Rejected:
    redundancy: Redundancy
    needed_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``fits``: within the budget. ``reasons`` and ``rejected`` in the order in which they were found."""

    redundancy: Redundancy
    needed_bytes: int
    fits: bool
    reasons: tuple[str, ...]
    rejected: tuple[Rejected, ...]


def choose(asked: Sizing, budget_bytes: int, tolerate: int = 1) -> Choice:
    """The policy for ``asked`` (its own ``redundancy`` does not count) that survives the loss of ``tolerate`` failure domains
    within ``budget_bytes`` per node; of fewer where that cannot be, down to none."""
    domains = len(set(asked.where))
    target = min(tolerate, domains - 1)
    reasons: list[str] = []
    if target < tolerate:
        reasons.append(f"{tolerate} lost failure domains were asked for, but there are only {domains}")
    rejected: list[Rejected] = []
    for losses in range(target, -1, -1):
        if losses < target:
            reasons.append(f"nothing that survives {losses + 1} fits")
        for redundancy in _candidates(asked, losses):
            needed = replace(asked, redundancy=redundancy).needed_bytes
            if needed <= budget_bytes:
                reasons += _reasons(asked, redundancy, needed, budget_bytes)
                reasons += _with_fewer_slots(asked, budget_bytes, losses, target)
                return Choice(redundancy, needed, True, tuple(reasons), tuple(rejected))
            rejected.append(
                Rejected(redundancy, needed, f"needs {_gib(needed)} of {_gib(budget_bytes)} per node")
            )
    reasons.append("not even this node's own generations fit")
    return Choice(Replicas(0), rejected[-1].needed_bytes, False, tuple(reasons), tuple(rejected))


def _with_fewer_slots(asked: Sizing, budget: int, found: int, target: int) -> list[str]:
    """What two own generations would make room for."""
    if found >= target or asked.own_slots <= OWN_SLOTS_MIN:
        return []
    less = choose(replace(asked, own_slots=OWN_SLOTS_MIN), budget, target)
    if not less.fits or less.redundancy.tolerates <= found:
        return []
    return [f"with own_slots={OWN_SLOTS_MIN} {less.redundancy.text} would fit ({_gib(less.needed_bytes)})"]


def _candidates(asked: Sizing, losses: int) -> Iterator[Redundancy]:
    """All that survive so many losses, the best first."""
    yield Replicas(losses)
    if losses == 0 or asked.replicated:
        return
    for data in range(DATA_MIN, min(DATA_MAX, asked.nodes - losses) + 1):
        yield Parity(data, losses)


def _reasons(asked: Sizing, redundancy: Redundancy, needed: int, budget: int) -> Iterator[str]:
    fits = f"needs {_gib(needed)} of {_gib(budget)} per node"
    if redundancy == Replicas(0):
        yield f"local only {fits}; what a node holds is lost with it"
    elif asked.replicated:
        yield f"ranks hold the same state: {redundancy.tolerates + 1} of them capture each part, nothing is sent; {fits}"
    elif isinstance(redundancy, Replicas):
        yield f"copies fit ({fits}): a restore is one read of a peer's memory, and no CPU is spent on parity"
    else:
        yield f"copies do not fit; {redundancy.text} is the smallest group with parity that does ({fits})"
        yield f"a rebuild reads from {redundancy.data} nodes for each that was lost"


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.3g} GiB" if count < 1000 * (1 << 30) else f"{count / (1 << 30):.0f} GiB"
