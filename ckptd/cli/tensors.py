"""`ckptd ls --tensors PATTERN PATH`: the logical tensors of one checkpoint, from its manifest and index alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.opening import open_at


def rows_of(path: str, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """By key. Raises CkptdError when there is no checkpoint."""
    with open_at(path) as checkpoint:
        index, aliases = checkpoint.index, checkpoint.manifest.aliases
        chunks, tied = np.diff(index.first).tolist(), dict[str, list[str]]()
        for alias, key in aliases.items():
            tied.setdefault(key, []).append(alias)
        return [
            {
                "key": tensor.key, "dtype": tensor.dtype, "shape": list(tensor.shape),
                "bytes": int(np.prod(tensor.shape, dtype=object)) * ITEMSIZE[tensor.dtype], "chunks": count, "role": tensor.role,
                "rank": tensor.rank, "aliases": sorted(tied.get(tensor.key, [])),
            }
            for tensor, count in zip(index.tensors(), chunks, strict=True)
            if any(map(wanted, (tensor.key, *tied.get(tensor.key, []))))
        ]  # fmt: skip


def table_of(rows: list[dict[str, Any]]) -> object:
    from ckptd.cli.show import size, table

    cells = [
        [row["key"].replace("\n", "?"), row["dtype"], row["shape"], size(row["bytes"]), row["chunks"], row["role"],
         "all" if row["rank"] is None else row["rank"], ", ".join(row["aliases"])]
        for row in rows
    ]  # fmt: skip
    return table("", ("key", "dtype", "shape", ">size", ">chunks", "role", ">rank", "tied"), cells)
