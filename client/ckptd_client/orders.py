"""The order of an epoch's samples: how it was drawn, and drawing it once more, whatever samples now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from typing import Any, cast

from torch import Generator
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from ckptd_client import rng, tree

SEEDS = ("seed", "initial_seed", "epoch", "shuffle")  # of samplers, where they have them


@dataclass
class Order:
    """generators: the process's. own: the sampler's generator, b"" where it has none. made_by: kind and seeds of the sampler."""

    generators: dict[str, Any]
    own: bytes
    made_by: dict[str, Any]

    @classmethod
    def now(cls, sampler: Any) -> Order:
        """As ``sampler`` would draw it."""
        generator = getattr(sampler, "generator", None)
        own = b"" if generator is None else tree.tensor_bytes(generator.get_state())
        plain = {name: getattr(sampler, name, None) for name in SEEDS}
        kind = {"kind": type(sampler).__name__}
        return cls(rng.capture(), own, kind | {name: value for name, value in plain.items() if isinstance(value, int)})

    def saved(self) -> dict[str, Any]:
        return asdict(self)

    def give(self, sampler: Any) -> None:
        """What a sampler of this kind has of it."""
        if type(sampler).__name__ == self.made_by["kind"]:
            for name in SEEDS:
                if name in self.made_by:
                    setattr(sampler, name, self.made_by[name])
        if self.own and hasattr(sampler, "generator"):
            sampler.generator = sampler.generator or Generator()
            sampler.generator.set_state(tree.tensor_from_bytes("U8", [len(self.own)], self.own))

    def draw_again(self, sampler: Any) -> Callable[[], None]:
        """``sampler`` draws it next. Returns what is to be called when the epoch is over."""
        rng.restore(self.generators)
        self.give(sampler)
        generator = getattr(sampler, "generator", None)
        if self.own or generator is None or "initial_seed" in self.made_by:
            return lambda: None
        sampler.generator = None  # it was drawn from the process's generators
        return lambda: setattr(sampler, "generator", generator)


class Rest(Sampler[int]):
    """In the place of a sampler while an epoch is iterated over: its samples without the first ones, which are counted over all
    ranks where it shares them among ranks. drawn: called when they are asked for; order: of the epoch that goes on."""

    def __init__(self, whole: Any, first: int, order: Order | None, drawn: Callable[[], None]) -> None:
        self.whole, self._first, self._order, self._drawn = whole, first, order, drawn

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __iter__(self) -> Iterator[int]:
        self._drawn()
        if self._order is None:
            return iter(self.whole)
        left = islice(iter(self._every(self._order.made_by)), self._first, None)
        if not isinstance(self.whole, DistributedSampler):
            return left
        found = list(left)  # the last ranks go round to the first samples, as torch's has it
        filled = islice(chain(found, cycle(found)), len(self) * self.whole.num_replicas)
        return islice(filled, self.whole.rank, None, self.whole.num_replicas)

    def _every(self, made_by: dict[str, Any]) -> Sampler[int]:
        """All samples, of all ranks, in the order that the epoch began with."""
        size, kind = samples_of(self.whole), made_by["kind"]
        numbers: Any = range(size)
        if kind == "RandomSampler" and type(self.whole) is DistributedSampler:
            return RandomSampler(numbers)
        if kind == "DistributedSampler" and not isinstance(self.whole, DistributedSampler):
            every: Any = DistributedSampler(numbers, 1, 0, made_by["shuffle"], made_by["seed"])
            every.set_epoch(made_by["epoch"])
        elif isinstance(self.whole, DistributedSampler):
            every = copy.copy(self.whole)
            every.num_replicas, every.rank, every.drop_last = 1, 0, False
            every.num_samples = every.total_size = size
        else:
            every = self.whole
        return cast("Sampler[int]", every)

    def __len__(self) -> int:
        if not self._first:
            return len(self.whole)
        left = max(0, samples_of(self.whole) - self._first)
        ranks = self.whole.num_replicas if isinstance(self.whole, DistributedSampler) else 1
        return left // ranks if ranks > 1 and self.whole.drop_last else -(-left // ranks)


def samples_of(sampler: Any) -> int:
    """Of all ranks together."""
    shared: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
    return len(shared)


def whole(sampler: Any) -> Any:
    return sampler.whole if isinstance(sampler, Rest) else sampler


def set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
