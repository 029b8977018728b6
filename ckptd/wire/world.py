"""Who is in the job, as ranks tell it in a Join: an object beside the frame, which holds a few hundred nodes at most (D2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

RANKS_MAX = 1 << 16  # of one world
WORLD_BYTES_MAX = 32 * 1024 * 1024  # RANKS_MAX nodes of one rank each take about 16 MiB
NODE_FIELDS_MAX = 16  # of one NodeInfo dict


def pack_world(ranks: Iterable[str], nodes: Iterable[Mapping[str, Any]]) -> bytes:
    """``ranks[i]`` is the node id of rank i; ``nodes`` are NodeInfo dicts in rank order without repeats."""
    packed: bytes = msgpack.packb({"ranks": list(ranks), "nodes": [dict(node) for node in nodes]})
    return packed


def _no_ext(code: int, data: bytes) -> object:
    raise ValueError(f"ext type {code}")


def unpack_world(data: bytes) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """(ranks, nodes); what is in a node is for the caller to check. Raises ValueError for anything else."""
    try:
        found = msgpack.unpackb(data, max_array_len=RANKS_MAX, max_map_len=NODE_FIELDS_MAX, max_ext_len=0, ext_hook=_no_ext)
    except Exception as error:  # msgpack raises ValueError, its own types and UnicodeDecodeError
        raise ValueError(f"world: not msgpack: {error}") from error
    if not isinstance(found, dict) or found.keys() != {"ranks", "nodes"}:
        raise ValueError("world: not a map of ranks and nodes")
    ranks, nodes = found["ranks"], found["nodes"]
    if not isinstance(ranks, list) or not all(type(rank) is str for rank in ranks):
        raise ValueError("world: ranks are no list of names")
    if not isinstance(nodes, list) or not all(type(node) is dict for node in nodes):
        raise ValueError("world: nodes are no list of maps")
    return tuple(ranks), nodes
