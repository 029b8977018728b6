"""Reading a world that a rank tells: any user of the machine may (D20). Nothing is built but what fits its type and number."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.ids import NodeInfo
from ckptd.wire.world import RANKS_MAX

NAME_CHARACTERS_MAX = 256  # of a node's id; the config allows less
_NAMES = re.compile(r"[!-{}~]{1,256}\|[!-{}~]{0,256}\|[!-{}~]{0,256}\|[^\x00-\x1f\x7f-\x9f]{0,256}")  # '|' is in no name


class World(msgspec.Struct, forbid_unknown_fields=True):
    ranks: Annotated[list[Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]], Meta(max_length=RANKS_MAX)]
    nodes: Annotated[list[NodeInfo], Meta(max_length=RANKS_MAX)]


_DECODER = msgspec.msgpack.Decoder(World)


def unpack_world(data: bytes) -> tuple[tuple[str, ...], tuple[NodeInfo, ...]]:
    """(ranks, nodes). Raises ValueError for anything else."""
    try:
        found = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"world: {error}") from error
    if not all(_NAMES.fullmatch(f"{node.node}|{node.control}|{node.bulk}|{node.domain}") for node in found.nodes):
        raise ValueError("world: a node's id, address or domain is no short text of one line")
    return tuple(found.ranks), tuple(found.nodes)
