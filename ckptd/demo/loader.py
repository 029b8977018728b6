"""A resumable loader: which windows a step sees depends on (seed, position) alone, never on the world size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Loader:
    """Walks a permutation of the text's windows, a new one each pass; every rank takes its part of the global batch.

    ``tokens``: uint8 [characters]. ``batch`` must divide by ``world``. The state is the same on every rank and
    fits any world: ``{"seed", "lap", "position"}``, position in windows.
    """

    def __init__(self, tokens: Tensor, *, context: int, batch: int, seed: int, rank: int, world: int) -> None:
        if batch % world:
            raise ValueError(f"a global batch of {batch} does not divide over {world} ranks")
        self._tokens, self._context, self._batch = tokens, context, batch
        self._seed, self._rank, self._world = seed, rank, world
        self._windows = (len(tokens) - 1) // context
        if self._windows < batch:
            raise ValueError(f"the text has {self._windows} windows, one batch needs {batch}")
        self._lap = self._position = 0
        self._order = self._permutation()

    def _permutation(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._lap)
        return torch.randperm(self._windows, generator=generator)

    def next_windows(self) -> Tensor:
        """The global batch's window numbers, [batch]; moves on."""
        if self._position + self._batch > self._windows:
            self._lap, self._position = self._lap + 1, 0
            self._order = self._permutation()
        chosen = self._order[self._position : self._position + self._batch]
        self._position += self._batch
        return chosen

    def next(self) -> tuple[Tensor, Tensor]:
        """This rank's (tokens, targets), each int64 [batch / world, context]."""
        share = self._batch // self._world
        mine = self.next_windows()[self._rank * share : (self._rank + 1) * share]
        at = mine[:, None] * self._context + torch.arange(self._context + 1)
        window = self._tokens[at].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "lap": self._lap, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._lap, self._position = state["seed"], state["lap"], state["position"]
        self._order = self._permutation()
