"""Where training stands in an epoch's data, and going on there, for loaders that do not know it themselves.

    loader = followed(DataLoader(...))          # with a DistributedSampler or without
    client.register(model=model, optimizer=optimizer, data=loader)

Of map-style data samples are counted over all ranks, and an epoch that goes on leaves out its first samples before they are cut
into batches: each is seen once whatever the number of ranks and the batch size become. The order is the one that the epoch began
with, also where another kind of sampler makes it now: frameworks take torch's RandomSampler for one rank and its DistributedSampler
for several. Of a stream, and of a batch sampler that is not torch's own, batches of this rank are counted, and read once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, cast

from torch import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from ckptd.core.errors import CkptdError
from ckptd_client import rng, tree

SAMPLES, BATCHES = "samples", "batches"
SEEDS = ("seed", "initial_seed", "epoch", "shuffle")  # of samplers, where they have them


class Place:
    """One loader's. Whoever owns it iterates over ``batches()`` instead of the loader."""

    def __init__(self) -> None:
        self._owner: Any = None  # torch's batch sampler, which asks a sampler; None: batches are counted
        self._drawn_from: Any = None  # the sampler, also where batches are counted
        self._each, self._ahead = 0, 0
        self.resumes = False  # a restore has said where; the next iteration begins there
        self._base, self._delivered, self._exhausted = 0, 0, True
        self._generators, self._order = rng.capture(), b""  # when the epoch's order was drawn; of the sampler's own generator
        self._made_by: dict[str, Any] = {}  # the sampler, as it was then
        self._other_generator: list[Any] = []  # the sampler's own, while it draws an order that had been drawn without it
        self._newest: object = None
        self._active = False  # a loop over it has begun, and has not asked for its end
        self._stays = False  # its workers do, from one epoch to the next: they are seeded once
        self._stays_seeded = False  # a restore has come to between two such epochs
        self._seeded: dict[str, Any] | None = None  # generators before workers are seeded anew, for which nobody would have drawn

    def follow(self, loader: Any, each: int, ahead: int) -> None:
        """each: samples of one batch, of all ranks together. ahead: batches that whoever asks for them holds back."""
        stream = isinstance(loader.dataset, IterableDataset)
        owner = None if stream else _innermost(loader.batch_sampler)
        self._drawn_from = None if stream else getattr(owner, "sampler", getattr(loader, "sampler", None))
        self._owner = owner if type(owner) is BatchSampler else None
        self._stays = bool(getattr(loader, "persistent_workers", False))
        self._each, self._ahead = 1 if self._owner is None else each, ahead

    @property
    def sampler(self) -> Any:
        """None: a stream's."""
        return self._drawn_from if self._owner is None else _whole(self._owner.sampler)

    @property
    def size(self) -> int | None:
        """Samples in an epoch, of all ranks together; None: batches are counted."""
        return None if self._owner is None else _size(self.sampler)

    @property
    def done(self) -> int:
        """Samples, or batches of this rank, of this epoch that training has had."""
        held_back = 0 if self._exhausted else min(self._ahead, self._delivered)
        done = self._base + (self._delivered - held_back) * self._each
        return done if self.size is None else min(done, self.size)

    def state_dict(self) -> dict[str, Any]:
        counts, done = BATCHES if self._owner is None else SAMPLES, self.done
        state: dict[str, Any] = {"counts": counts, "done": done, "begun": self._active or done > 0}
        state["iterated"] = self._newest is not None
        if not state["begun"]:
            return state | {"generators": {}, "order": self._now_drawn(), "sampler": _made_by(self.sampler)}
        return state | {"generators": self._generators, "order": self._order, "sampler": self._made_by or _made_by(self.sampler)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CkptdError: samples were counted, and batches are now, or the other way round."""
        counts = BATCHES if self._owner is None else SAMPLES
        if state["counts"] != counts:
            raise CkptdError(f"the data was counted in {state['counts']}, and is in {counts} now")
        self._generators, self._order, self._made_by = state["generators"], state["order"], state["sampler"]
        if type(self.sampler).__name__ == self._made_by.get("kind"):
            for name in SEEDS:
                if name in self._made_by:
                    setattr(self.sampler, name, self._made_by[name])
        if state["begun"]:
            self._goes_on(state["done"])
        else:
            self._base, self._delivered, self._exhausted, self.resumes = 0, 0, True, False
            self._draw_from(self._order)
            self._stays_seeded = self._stays and state["iterated"]

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Raises CkptdError where batches are counted: nobody can cut their rest anew."""
        if states[0]["counts"] == BATCHES:
            what = "a stream of data, or batches of a batch sampler of one's own, cannot go on in another number of ranks"
            raise CkptdError(what, hint="as many ranks as saved it; or a map-style dataset and torch's own BatchSampler")
        return states[0]

    def skip(self, batches: int) -> None:
        """The next iteration begins behind so many, as of an epoch that begins now."""
        self._generators, self._order, self._made_by = rng.capture(), self._now_drawn(), _made_by(self.sampler)
        self._goes_on(batches * self._each)

    def _goes_on(self, done: int) -> None:
        self._base, self._delivered, self._exhausted, self.resumes = done, 0, False, True

    def batches_left(self, loader: Any) -> int:
        """How many of today's batches the epoch still has for this rank."""
        self._put_before()
        left = len(loader)
        self._take_away()
        return left

    def batches_done(self, loader: Any, whole: int) -> int:
        """How many of ``whole`` that makes: an epoch's today, or fewer where somebody limits them."""
        return max(self._base // self._each, whole - self.batches_left(loader))

    def _put_before(self) -> None:
        """What says, while the epoch is iterated over, in which order and from where on its samples come."""
        if self._owner is not None and not isinstance(self._owner.sampler, _From):
            first = self._base if self.resumes else 0
            self._owner.sampler = _From(self._owner.sampler, first, self._made_by if self.resumes else {}, self.draws)

    def _take_away(self) -> None:
        if self._owner is not None:
            self._owner.sampler = self.sampler

    def nothing_left(self) -> bool:
        return self.resumes and self.size is not None and self._base >= self.size

    def over(self) -> None:
        """What goes on is another epoch, and has all samples."""
        self.resumes = self._active = False
        self._take_away()
        if self._other_generator:
            self.sampler.generator = self._other_generator.pop()

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What ``iterate()`` gives, from this place on. When the first batch is there, generators are what they were at the
        snapshot."""
        this = self._newest = object()
        later = rng.capture() if self.resumes else None
        self._delivered, self._exhausted, self._active = 0, False, True
        if not self.resumes:
            self._base = 0
        read = 0 if self._owner is not None else self._base
        self._put_before()
        if self._owner is None:
            self.draws()
        self._seeded = rng.capture() if self._stays_seeded else None
        self._stays_seeded = False
        try:
            for batch in iterate():
                if read:
                    read -= 1
                    continue
                self._delivered += 1
                if later is not None and self._delivered > self._ahead:
                    rng.restore(later)
                    later = None
                yield batch
            self._exhausted = True
            if not self._ahead:
                self._base = self._delivered = 0
        except GeneratorExit:  # left before its end: what comes next is another epoch
            if self._newest is this:
                self._base, self._delivered, self._exhausted = 0, 0, True
            raise
        finally:
            if later is not None:
                rng.restore(later)
            if self._newest is this:
                self.over()

    def draws(self) -> None:
        """A sampler is about to draw an epoch's order, or the one of the epoch that goes on once more. Whether the loader has
        drawn from the same generators before is its own affair, and differs where it keeps its workers."""
        if not self.resumes:
            if self._seeded is not None:
                rng.restore(self._seeded)
                self._seeded = None
            self._generators, self._order, self._made_by = rng.capture(), self._now_drawn(), _made_by(self.sampler)
            return
        rng.restore(self._generators)
        generator = getattr(self.sampler, "generator", None)
        if self._order:
            self._draw_from(self._order)
        elif generator is not None and "initial_seed" not in self._made_by:
            self._other_generator.append(generator)
            self.sampler.generator = None

    def _now_drawn(self) -> bytes:
        """Where the sampler's own generator stands; b"": it has none."""
        generator = getattr(self.sampler, "generator", None)
        return b"" if generator is None else tree.tensor_bytes(generator.get_state())

    def _draw_from(self, order: bytes) -> None:
        if order and hasattr(self.sampler, "generator"):
            self.sampler.generator = self.sampler.generator or Generator()
            self.sampler.generator.set_state(tree.tensor_from_bytes("U8", [len(order)], order))


class Inside:
    """A loader as another one, which holds it, sees it."""

    def __init__(self, loader: Any, place: Place) -> None:
        self._loader, self._place = loader, place

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What asks isinstance() is told the truth about what it will get."""
        return self._loader.__class__

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._place.batches(lambda: iter(self._loader))


class FollowedLoader(Place):
    """A DataLoader that knows where it stands: state_dict() and load_state_dict(). All else is the loader's."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__()
        self.loader = loader
        self.follow(loader, samples_of_a_batch(loader), ahead=0)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self.batches(lambda: iter(self.loader))

    def begins(self, epoch: int) -> None:
        """Its sampler draws the order of this epoch."""
        set_epoch(self.sampler, epoch)


def followed(loader: DataLoader[Any]) -> FollowedLoader:
    """To be iterated over instead of ``loader``, and registered: what is left of an epoch comes after a restore. The first loop
    over it is that epoch's, and empty where nothing was left."""
    return FollowedLoader(loader)


def samples_of_a_batch(loader: Any) -> int:
    """Of all ranks together; 0: nobody knows."""
    sampler = getattr(_innermost(loader.batch_sampler), "sampler", None)
    return int((loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)) * getattr(sampler, "num_replicas", 1))


def set_epoch(sampler: Any, epoch: int) -> None:
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


class _From(Sampler[int]):
    """All but the first samples of another one: of all ranks' where it shares them among ranks."""

    def __init__(self, whole: Any, first: int, made_by: dict[str, Any], draws: Callable[[], None]) -> None:
        self.whole, self._first, self._made_by, self._draws = whole, first, made_by, draws

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __iter__(self) -> Iterator[int]:
        self._draws()
        if not self._first and not self._made_by:
            return iter(self.whole)
        left = islice(iter(self._every()), self._first, None)
        if not isinstance(self.whole, DistributedSampler):
            return left
        found = list(left)  # the last ranks go round to the first samples, as torch's has it
        filled = islice(chain(found, cycle(found)), len(self) * self.whole.num_replicas)
        return islice(filled, self.whole.rank, None, self.whole.num_replicas)

    def _every(self) -> Sampler[int]:
        """All samples in the order that the epoch began with."""
        size, made_by = _size(self.whole), self._made_by
        if made_by.get("kind") == "RandomSampler" and type(self.whole) is DistributedSampler:
            return RandomSampler(range(size))
        if made_by.get("kind") == "DistributedSampler" and not isinstance(self.whole, DistributedSampler):
            whole: Any = range(size)
            every: Any = DistributedSampler(whole, 1, 0, made_by["shuffle"], made_by["seed"])
            every.set_epoch(made_by["epoch"])
            return cast("Sampler[int]", every)
        if isinstance(self.whole, DistributedSampler):
            every = copy.copy(self.whole)
            every.num_replicas, every.rank, every.drop_last = 1, 0, False
            every.num_samples = every.total_size = size
            return cast("Sampler[int]", every)
        found: Sampler[int] = self.whole
        return found

    def __len__(self) -> int:
        if not self._first:
            return len(self.whole)
        left = max(0, _size(self.whole) - self._first)
        ranks = self.whole.num_replicas if isinstance(self.whole, DistributedSampler) else 1
        return left // ranks if ranks > 1 and self.whole.drop_last else -(-left // ranks)

    def set_epoch(self, epoch: int) -> None:
        set_epoch(self.whole, epoch)


def _made_by(sampler: Any) -> dict[str, Any]:
    plain = {name: getattr(sampler, name, None) for name in SEEDS}
    return {"kind": type(sampler).__name__} | {name: value for name, value in plain.items() if isinstance(value, int)}


def _size(sampler: Any) -> int:
    shared: Any = sampler.dataset if isinstance(sampler, DistributedSampler) else sampler
    return len(shared)


def _whole(sampler: Any) -> Any:
    return sampler.whole if isinstance(sampler, _From) else sampler


def _innermost(sampler: Any) -> Any:
    """The one that asks a sampler for samples, behind those that share its batches among ranks."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


__all__ = ["FollowedLoader", "followed"]
