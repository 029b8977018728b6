"""A tensor of a checkpoint that nobody has read yet, and how it is read: in order, a piece at a time, every byte verified."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from ckptd_client.dtypes import TORCH
from torch import Tensor

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.export.source import Source
from ckptd.persist.strided import slabs

PIECE_BYTES = 32 << 20  # of what is read at a time


@dataclass(frozen=True)
class Stored:
    """``dtype``: as it lies there; ``to``: as it is to be written. ``rank``: whose value, where it is each rank's own."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    to: str
    rank: int | None = None

    @property
    def nbytes(self) -> int:
        """Of what is written."""
        return math.prod(self.shape) * ITEMSIZE[self.to]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH[self.to]

    def boxes(self, bytes_max: int) -> list[Box]:
        """Contiguous in C order, and one after the other."""
        whole = Box.whole(self.shape)
        return list(slabs(whole, whole, ITEMSIZE[self.dtype], bytes_max)) if whole.volume else [whole]

    def read(self, checkpoint: Source, box: Box) -> Tensor:
        """Raises FileDamage, StorageError."""
        if not box.volume:
            return torch.empty(box.sizes, dtype=self.torch_dtype)
        data = bytearray(box.volume * ITEMSIZE[self.dtype])
        checkpoint.read(self.key, box, memoryview(data), self.rank)
        return torch.frombuffer(data, dtype=TORCH[self.dtype]).view(box.sizes).to(self.torch_dtype)

    def pieces(self, checkpoint: Source) -> Iterator[memoryview]:
        """All of its bytes."""
        for box in self.boxes(PIECE_BYTES):
            if box.volume:
                yield bytes_of(self.read(checkpoint, box))


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a tensor on the CPU, in C order."""
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)
