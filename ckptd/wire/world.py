"""Who is in the job, as ranks tell it in a Join: an object beside the frame, which holds a few hundred nodes at most (D2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

RANKS_MAX = 1 << 16  # of one world
WORLD_BYTES_MAX = 32 * 1024 * 1024  # RANKS_MAX nodes of one rank each take about 16 MiB


def pack_world(ranks: Iterable[str], nodes: Iterable[Mapping[str, Any]]) -> bytes:
    """``ranks[i]`` is the node id of rank i; ``nodes`` are NodeInfo dicts in rank order without repeats."""
    packed: bytes = msgpack.packb({"ranks": list(ranks), "nodes": [dict(node) for node in nodes]})
    return packed
