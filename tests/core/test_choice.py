"""``auto``: copies where they fit, else parity in the smallest group that does, else fewer losses, and always why (P8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.redundancy.choice import choose
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from ckptd.core.redundancy.sizing import Sizing
from tests.core.worlds import quick

GIB = 1 << 30


def asked(**changes: Any) -> Sizing:
    base: dict[str, Any] = {
        "state_bytes": 96 * GIB,
        "nodes": 8,
        "ranks_per_node": 8,
        "redundancy": Replicas(0),
    }
    return Sizing(**{**base, "own_slots": 3, "peer_sets": 2, **changes})


@pytest.mark.parametrize(
    ("budget_gib", "tolerate", "chosen"),
    [
        (88, 1, Replicas(1)),
        (87, 1, Parity(3, 1)),  # xor(3) would leave groups of two
        (65, 1, Parity(3, 1)),
        (64, 1, Parity(6, 1)),
        (59, 1, Parity(7, 1)),
        (50, 1, Replicas(0)),
        (300, 2, Replicas(2)),
        (90, 2, Parity(4, 2)),
        (58, 2, Parity(7, 1)),
        (300, 0, Replicas(0)),
    ],
)
def test_the_example_of_the_manual(budget_gib: int, tolerate: int, chosen: Redundancy) -> None:
    """8 nodes, FSDP, 96 GiB."""
    choice = choose(asked(), budget_gib * GIB, tolerate)
    assert choice.redundancy == chosen
    assert choice.fits
    assert choice.needed_bytes <= budget_gib * GIB
    assert all(rejected.needed_bytes > budget_gib * GIB for rejected in choice.rejected)


def test_reasons_are_given() -> None:
    choice = choose(asked(), 65 * GIB)
    assert choice.reasons[0].startswith("copies do not fit; xor(4) is the smallest group")
    assert [rejected.redundancy for rejected in choice.rejected] == [Replicas(1), Parity(2, 1)]
    assert choice.rejected[0].why == "needs 87.4 GiB of 65 GiB per node"
    assert "nothing that survives 1 fits" in choose(asked(), 50 * GIB).reasons
    assert "with own_slots=2 xor(4) would fit (52.6 GiB)" in choose(asked(), 53 * GIB).reasons
    few = choose(asked(nodes=2), 1000 * GIB, 3)
    assert few.redundancy == Replicas(1)
    assert "there are only 2" in few.reasons[0]


def test_nothing_fits() -> None:
    choice = choose(asked(), GIB)
    assert (choice.redundancy, choice.fits) == (Replicas(0), False)
    assert "not even" in choice.reasons[-1]


def test_what_ddp_replicates_needs_no_parity() -> None:
    assert choose(asked(replicated=True), 1000 * GIB, 2).redundancy == Replicas(2)
    assert "nothing is sent" in choose(asked(replicated=True), 1000 * GIB).reasons[0]
    assert choose(asked(replicated=True), 60 * GIB, 2).redundancy == Replicas(0)


def test_racks_bound_what_can_be_lost() -> None:
    racks = tuple(f"rack{i // 4}" for i in range(8))
    assert choose(asked(domains=racks), 1000 * GIB, 2).redundancy == Replicas(1)


@quick
@given(
    st.integers(1, 24),
    st.integers(0, 3),
    st.integers(1, 400),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_the_first_that_fits_is_chosen(
    nodes: int, tolerate: int, budget_gib: int, domains: int, in_racks: bool, replicated: bool
) -> None:
    where = tuple(f"d{i % domains}" for i in range(nodes)) if in_racks else ()
    size = asked(nodes=nodes, domains=where, replicated=replicated)
    choice = choose(size, budget_gib * GIB, tolerate)
    chosen = replace(size, redundancy=choice.redundancy)
    assert chosen.needed_bytes == choice.needed_bytes
    assert choice.fits == (choice.needed_bytes <= budget_gib * GIB)
    assert choice.redundancy.tolerates <= tolerate
    assert choice.reasons
    if not choice.fits:
        assert choice.redundancy == Replicas(0)
    if isinstance(choice.redundancy, Parity):
        copies = replace(size, redundancy=Replicas(choice.redundancy.parity))
        assert copies.needed_bytes > budget_gib * GIB
