"""Reading a world that a rank tells: any user of the machine may (D20). Nothing is built but what fits its type and number."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.ids import NodeInfo
from ckptd.wire.world import RANKS_MAX

NAME_CHARACTERS_MAX = 256  # of a node's id; the config allows less


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
    return tuple(found.ranks), tuple(found.nodes)
