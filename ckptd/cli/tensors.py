"""`ckptd ls --tensors PATTERN PATH`: the logical tensors of one checkpoint, from its manifest and index alone."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import msgpack
import numpy as np

from ckptd.core.state_map.catalogue import META
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.index import Tensor
from ckptd.persist.opening import open_at
from ckptd.persist.reader import Checkpoint


def rows_of(path: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """By key. Raises CkptdError when there is no checkpoint."""
    with open_at(path) as checkpoint:
        index, aliases = checkpoint.index, checkpoint.manifest.aliases
        shapes = {tensor.key: tensor.shape for tensor in index.tensors() if tensor.role == "param"}
        chunks, tied, rules = np.diff(index.first).tolist(), dict[str, list[str]](), _rules(checkpoint)
        for alias, key in aliases.items():
            tied.setdefault(key, []).append(alias)
        return [
            {
                "key": tensor.key, "dtype": tensor.dtype, "shape": list(tensor.shape),
                "bytes": int(np.prod(tensor.shape, dtype=object)) * ITEMSIZE[tensor.dtype], "chunks": count, "role": tensor.role,
                "rank": tensor.rank, "aliases": sorted(tied.get(tensor.key, [])),
                "rule": _rule_of(tensor, rules, shapes),
            }
            for tensor, count in zip(index.tensors(), chunks, strict=True)
            if any(map(wanted, (tensor.key, *tied.get(tensor.key, []))))
        ]  # fmt: skip


def _rules(checkpoint: Checkpoint) -> dict[str, str]:
    """Pattern -> what it says, as the ranks were told them: of several that were told otherwise all."""
    found: dict[str, str] = {}
    for ref in checkpoint.manifest.objects:
        if ref.name == META:
            said = msgpack.unpackb(checkpoint.files.blob(ref), strict_map_key=False)
            found |= said.get("rules", {}) if isinstance(said, dict) else {}
    return found


def _rule_of(tensor: Tensor, rules: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> str | None:
    """A state of its parameter's shape has that one's."""
    key = tensor.key
    if tensor.role == "optim":
        key = key.partition(".")[2].rpartition(".")[0]
        if shapes.get(key) != tensor.shape:
            return None
    return next((rule for pattern, rule in rules.items() if fnmatchcase(key, pattern)), None)


def table_of(rows: list[dict[str, Any]]) -> object:
    from ckptd.cli.show import size, table

    cells = [
        [row["key"].replace("\n", "?"), row["dtype"], row["shape"], size(row["bytes"]), row["chunks"], row["role"],
         "all" if row["rank"] is None else row["rank"], ", ".join(row["aliases"]), row["rule"] or ""]
        for row in rows
    ]  # fmt: skip
    shown = 9 if any(row["rule"] for row in rows) else 8
    names = ("key", "dtype", "shape", ">size", ">chunks", "role", ">rank", "tied", "rule")
    return table("", names[:shown], [row[:shown] for row in cells])
