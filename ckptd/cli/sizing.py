"""The memory that a job needs (`core/redundancy/sizing.py`), as people read it."""

from __future__ import annotations

from ckptd.core.policy import Policy
from ckptd.core.redundancy.policies import Parity
from ckptd.core.redundancy.sizing import Sizing
from ckptd.units import format_bytes


def sizing(
    policy: Policy,
    state_bytes: int,
    nodes: int,
    ranks_per_node: int,
    *,
    replicated: bool,
    frozen_bytes: int = 0,
    domains: tuple[str, ...] = (),
) -> Sizing:
    """domains: of each node; none: the nodes are failure domains of their own."""
    return Sizing(
        state_bytes,
        nodes,
        ranks_per_node,
        policy.redundancy,
        policy.own_slots,
        policy.peer_sets,
        replicated,
        frozen_bytes,
        domains,
    )


def formula(size: Sizing) -> str:
    """``needed_bytes``, term by term."""
    left = len(size.left)
    steady = size.steady_bytes(size.where)
    return (
        f"max(steady on {left} nodes {format_bytes(size.steady_bytes(size.left))}, "
        f"steady on {size.nodes} ({_per_node(size)}) {format_bytes(steady)} "
        f"+ one new set on {left} {format_bytes(size.new_set_bytes())})"
    )


def _per_node(size: Sizing) -> str:
    held = size.held(size.where)
    if size.replicated:
        text = f"{size.own_slots} own x {held + 1:g} captures"
    elif isinstance(size.redundancy, Parity):
        text = f"{size.own_slots} own + {held:.3g} of parity x {size.peer_sets} sets"
    else:
        text = f"{size.own_slots} own + {held:g} copies x {size.peer_sets} sets"
    return text + (f", frozen x {1 + held:.3g}" if size.frozen_bytes else "")
