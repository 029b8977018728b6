"""A steward and what it has certified and released."""

from __future__ import annotations

from typing import Any

from ckptd.core.ids import EpochRecord
from ckptd.core.policy import Policy
from tests.core.machines import EPOCH, Steward, fact, layout, record_of

OLD = EPOCH - 1


def steward(record: EpochRecord | None = None, *, running: bool = True, **policy: Any) -> Steward:
    return Steward(
        record or record_of(), Policy(**{"replicas": 1, "durable": False, **policy}), running=running
    )


BOTH = [layout(0), layout(1)]
BOTH_HELD = [fact(7, 0), fact(7, 1)]
OLD_ONES = [fact(4, rank, epoch=OLD) for rank in (0, 1)], [fact(5, rank, epoch=OLD) for rank in (0, 1)]


def released(node: Steward) -> set[int]:
    return released_since(node, 0)


def released_since(node: Steward, mark: int) -> set[int]:
    return {snapshot.step for certificate in node.certificates("b", mark) for snapshot in certificate.releases}
