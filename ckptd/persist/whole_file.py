"""Safetensors files whose tensors are whole, as people and the Hub have them: which lie in which file, its head, their index."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.names import DATA

FILE_BYTES = 5_000_000_000  # of a file, as the Hub's are
HEADER_BYTES_MAX = 100_000_000  # what readers of the format accept
STEM = "model"
INDEX = "model.safetensors.index.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Whole(Generic[T]):
    """A tensor of such a file, and what it is made of."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    of: T

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def files_of(wholes: Sequence[Whole[T]], bytes_max: int, stem: str = STEM) -> dict[str, list[Whole[T]]]:
    """File -> its tensors, widest elements first, so that all are aligned. No tensor is cut."""
    files: list[list[Whole[T]]] = [[]]
    used = 0
    for whole in wholes:
        if files[-1] and used + whole.nbytes > bytes_max:
            files.append([])
            used = 0
        files[-1].append(whole)
        used += whole.nbytes
    for file in files:
        file.sort(key=lambda whole: (-ITEMSIZE[whole.dtype], whole.name))
    if len(files) == 1:
        return {f"{stem}{DATA}": files[0]}
    return {f"{stem}-{number:05d}-of-{len(files):05d}{DATA}": file for number, file in enumerate(files, 1)}


def header(wholes: Sequence[Whole[T]]) -> bytes:
    """In the order of their bytes, which follow without gaps. Raises CkptdError: too many."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for whole in wholes:
        rows[whole.name] = {"dtype": whole.dtype, "shape": whole.shape, "data_offsets": [at, at + whole.nbytes]}
        at += whole.nbytes
    text = json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise CkptdError(f"{len(wholes)} tensors in one file are more than readers take", hint="smaller files")
    return struct.pack("<Q", len(text)) + text


def index_of(files: Mapping[str, Sequence[Whole[T]]]) -> bytes:
    weights = {whole.name: file for file, wholes in files.items() for whole in wholes}
    total = sum(whole.nbytes for wholes in files.values() for whole in wholes)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()
