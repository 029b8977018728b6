"""`ckptd plan --published`: recovery probabilities from the literature beside what this program computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ckptd.core.ids import NodeInfo
from ckptd.core.redundancy.policies import Replicas
from ckptd.core.redundancy.probability import recovery
from ckptd.core.redundancy.scheme import ring, scheme

TOLERANCE = 5e-5  # four decimals are published
EXACT, BOUND = "exact", "bound"


@dataclass(frozen=True, slots=True)
class Row:
    """``holders``: m, the node's own memory included; ``losses``: k nodes at once."""

    placement: str
    nodes: int
    holders: int
    losses: int
    kind: str
    published: float
    computed: float = 0.0

    @property
    def ok(self) -> bool:
        return abs(self.computed - self.published) <= TOLERANCE

    def report(self) -> dict[str, object]:
        return {**asdict(self), "ok": self.ok}


# GEMINI (SOSP '23, figure 9, corollary 1, section 4.2). Its curve of the ring is the union bound: at N=16, k=3 that is 0.6,
# while 352 of the 560 triples on a ring of 16 hold no two neighbours. "mixed" is the group placement where m does not divide N.
PUBLISHED = (
    Row("group", 16, 2, 2, EXACT, 0.9333),
    Row("group", 16, 2, 3, EXACT, 0.8000),
    Row("group", 32, 2, 2, EXACT, 0.9677),
    Row("group", 32, 2, 3, EXACT, 0.9032),
    Row("group", 64, 2, 2, EXACT, 0.9841),
    Row("group", 64, 2, 3, EXACT, 0.9524),
    Row("group", 16, 2, 4, BOUND, 0.6000),
    Row("group", 16, 2, 4, EXACT, 0.6154),
    Row("group", 12, 3, 3, EXACT, 0.9818),
    Row("group", 12, 3, 6, EXACT, 0.6429),
    Row("mixed", 9, 2, 2, EXACT, 0.8333),
    Row("ring", 9, 2, 2, EXACT, 0.7500),
    Row("ring", 16, 2, 2, EXACT, 0.8667),
    Row("ring", 16, 2, 3, BOUND, 0.6000),
    Row("ring", 16, 2, 3, EXACT, 0.6286),
    Row("ring", 12, 3, 3, EXACT, 0.9455),
    Row("ring", 12, 3, 6, EXACT, 0.3052),
)


def rows() -> Iterator[Row]:
    """Each published value, and the computed one."""
    for row in PUBLISHED:
        yield replace(row, computed=_computed(row))


def _computed(row: Row) -> float:
    names = [f"n{number}" for number in range(row.nodes)]
    nodes = [NodeInfo(name, "", "", name) for name in names]
    copies = row.holders - 1
    made = ring(nodes, copies) if row.placement == "ring" else scheme(nodes, Replicas(copies))
    chance = recovery(made.fatal_sets(), dict(zip(names, names, strict=True)), row.losses, _never)[-1]
    return chance.bound if row.kind == BOUND else chance.value


def _never(count: int, k: int) -> list[int]:
    raise AssertionError("these are small enough to be counted")
