"""What the ranks of a trial train: parts of uneven sizes and several dtypes, whose bytes say which start made them at which step.

Each part is one logical tensor that one rank owns; in a world of another size another rank owns it. Three more are on every rank:
one that is declared a copy, one that only its sums show to be, and plain values. The digests are the harness's own: ckptd's sums
are not asked.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import xxhash

PARTS = 18
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.float64, torch.int16)
SMALL = (1, 3, 17, 4099)  # elements of the first ones: alignment is where packing goes wrong
LARGE = 20_000  # elements, or what CHAOS_LARGE says; a rank of six has about half a megabyte
COMMON = {"declared": (torch.bfloat16, 4096), "alike": (torch.float32, 777)}


def shape_of(part: int, large: int) -> tuple[int, ...]:
    if part < len(SMALL):
        return (SMALL[part],)
    rows = 16 + part
    return (rows, large * (1 + part % 5) // rows)


class Clock:
    """Plain Python values that every rank has: which start (generation) made this state, and at which step."""

    def __init__(self) -> None:
        self.generation, self.step = -1, -1

    def state_dict(self) -> dict[str, Any]:
        return {"generation": self.generation, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generation, self.step = int(state["generation"]), int(state["step"])


class Parts:
    """The state of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        large = int(os.environ.get("CHAOS_LARGE", LARGE))
        self.owned = {
            f"p{part}": torch.zeros(shape_of(part, large), dtype=DTYPES[part % len(DTYPES)])
            for part in range(rank, PARTS, world)
        }
        self.common = {name: torch.zeros(size, dtype=dtype) for name, (dtype, size) in COMMON.items()}
        self.clock = Clock()

    def make(self, generation: int, step: int) -> None:
        """The state of this step: nothing of it can be had from another step or start."""
        self.clock.generation, self.clock.step = generation, step
        for name, tensor in self._named():
            seed = xxhash.xxh3_64_intdigest(f"{generation}/{step}/{name}".encode())
            raw = _bytes_of(tensor)
            raw[:] = np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(raw.size), np.uint8)

    def digests(self) -> dict[str, str]:
        """Of this rank's own memory."""
        return {name: xxhash.xxh3_128_hexdigest(_bytes_of(tensor)) for name, tensor in self._named()}

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.owned.items(), *self.common.items()]


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Its memory itself, no copy."""
    return tensor.view(-1).view(torch.uint8).numpy()


EVERYTHING = frozenset({*(f"p{part}" for part in range(PARTS)), *COMMON})
