"""A tensor that is written past the fence on one rank voids the snapshot, and is copied at once on all from then on (P1, D6)."""

from __future__ import annotations

import pytest

from tests.cluster.nodes import Cluster, Trainer, together
from tests.waiting import until

JOB = "written"
KEY = "model.0.weight"


def snapshot(world: list[Trainer], ranks: list[int], *, whole: bool = False) -> tuple[list[str], str]:
    """One step and its snapshot, during which these ranks write a weight by hand; what each rank is told of it, and the digest of
    what it saw."""
    together(world, "train", steps=1, snapshot=False)
    digest = str(together(world, "digest")[0])
    together(world, "snapshot", must=True)
    together(world, "write", ranks=ranks, whole=whole)
    together(world, "train", steps=1, snapshot=False)
    return [str(said) for said in together(world, "wait", level="sealed")], digest


@pytest.mark.chaos
@pytest.mark.parametrize(("ranks", "whole"), [([1], False), ([0, 1], True)])
def test_one_rank_finds_it_and_all_ranks_copy_it_at_once(nodes: Cluster, ranks: list[int], whole: bool) -> None:
    """Rank 1 writes the same tensor afterwards, or both the DTensor around it: nothing is void for it any more."""
    made = nodes.several(2)
    world = nodes.world(made, JOB, kind="wide_fsdp")
    together(world, "restore")
    together(world, "arm", failpoints="capture.tensor:sleep=0.05")
    said, _ = snapshot(world, [0])
    assert all(answer.startswith("void") for answer in said) and KEY in said[0], said
    digest = until(lambda: sealed(world, ranks, whole=whole), 60, "a snapshot")
    world = nodes.again(world)
    together(world, "restore")
    assert together(world, "digest") == [digest, digest]


def sealed(world: list[Trainer], ranks: list[int], *, whole: bool) -> str:
    """The digest of what was sealed; "" when this snapshot was void, not for what was written."""
    said, digest = snapshot(world, ranks, whole=whole)
    assert not any("written" in answer for answer in said), said
    return "" if any(answer.startswith("void") for answer in said) else digest
