"""Where training stands in an epoch's data, and going on there, for loaders that do not know it themselves.

    loader = followed(DataLoader(...))          # with a DistributedSampler or without
    client.register(model=model, optimizer=optimizer, data=loader)

Of map-style data samples are counted over all ranks, and an epoch that goes on leaves out its first samples before they are cut
into batches: each is seen once whatever the number of ranks and the batch size become. The order is the one that the epoch began
with, also where another kind of sampler makes it now: frameworks take torch's RandomSampler for one rank and its DistributedSampler
for several. Of other data batches of this rank are counted, and read once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, cast

from torch import Generator
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from ckptd.core.errors import CkptdError
from ckptd_client import rng, tree

SAMPLES, BATCHES = "samples", "batches"
SEEDS = ("seed", "initial_seed", "epoch", "shuffle")  # of samplers, where they have them


class Place:
    """One loader's. Whoever owns it iterates over ``batches()`` instead of the loader."""

    def __init__(self) -> None:
        self._owner: Any = None  # the batch sampler that asks a sampler; None: a stream
        self._each, self._ahead = 0, 0
        self.resumes = False  # a restore has said where; the next iteration begins there
        self._base, self._delivered, self._exhausted = 0, 0, True
        self._generators, self._order = rng.capture(), b""  # when the epoch began: samplers draw their order then
        self._made_by: dict[str, Any] = {}  # the sampler, as it was when the epoch began
        self._other_generator: list[Any] = []  # the sampler's own, while it draws an order that had been drawn without it
        self._newest: object = None

    def follow(self, loader: Any, each: int, ahead: int) -> None:
        """each: samples of one batch, of all ranks together. ahead: batches that whoever asks for them holds back."""
        owner = None if isinstance(loader.dataset, IterableDataset) else _innermost(loader.batch_sampler)
        self._owner = owner if hasattr(owner, "sampler") else None
        self._each, self._ahead = 1 if self._owner is None else each, ahead

    @property
    def sampler(self) -> Any:
        """None: a stream's."""
        return None if self._owner is None else _whole(self._owner.sampler)

    @property
    def size(self) -> int | None:
        """Samples in an epoch, of all ranks together; None: a stream's."""
        return None if self._owner is None else _size(self.sampler)

    @property
    def done(self) -> int:
        """Samples, or batches of a stream, of this epoch that training has had."""
        held_back = 0 if self._exhausted else min(self._ahead, self._delivered)
        done = self._base + (self._delivered - held_back) * self._each
        return done if self.size is None else min(done, self.size)

    def state_dict(self) -> dict[str, Any]:
        counts = BATCHES if self._owner is None else SAMPLES
        now = self._made_by or _made_by(self.sampler)
        return {"done": self.done, "counts": counts, "generators": self._generators, "order": self._order, "sampler": now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CkptdError: the data was map-style, and is a stream now, or the other way round."""
        counts = BATCHES if self._owner is None else SAMPLES
        if state["counts"] != counts:
            raise CkptdError(f"the data was counted in {state['counts']}, and is in {counts} now")
        self._generators, self._order, self._made_by = state["generators"], state["order"], state["sampler"]
        if type(self.sampler).__name__ == self._made_by.get("kind"):
            for name in SEEDS:
                if name in self._made_by:
                    setattr(self.sampler, name, self._made_by[name])
        self._goes_on(state["done"])

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Raises CkptdError for a stream: nobody can cut its rest anew."""
        if states[0]["counts"] == BATCHES:
            hint = "as many ranks as saved it, or a dataset with a length"
            raise CkptdError("a stream of data cannot go on in another number of ranks", hint=hint)
        return states[0]

    def skip(self, batches: int) -> None:
        """The next iteration begins behind so many, as of an epoch that begins now."""
        self._generators, self._order = rng.capture(), b""
        self._goes_on(batches * self._each)

    def _goes_on(self, done: int) -> None:
        self._base, self._delivered, self._exhausted, self.resumes = done, 0, False, True

    def batches_left(self, loader: Any) -> int:
        """How many of today's batches the epoch still has for this rank."""
        self._leave_out()
        left = len(loader)
        self._have_all()
        return left

    def batches_done(self, loader: Any, whole: int) -> int:
        """How many of ``whole`` that makes: an epoch's today, or fewer where somebody limits them."""
        return max(self._base // self._each, whole - self.batches_left(loader))

    def _leave_out(self) -> None:
        """Until the epoch that goes on has been iterated over."""
        if self.resumes and self._owner is not None and not isinstance(self._owner.sampler, _From):
            self._owner.sampler = _From(self._owner.sampler, self._base, self._made_by)

    def _have_all(self) -> None:
        if self._owner is not None:
            self._owner.sampler = self.sampler

    def nothing_left(self) -> bool:
        return self.resumes and self.size is not None and self._base >= self.size

    def over(self) -> None:
        """What goes on is another epoch, and has all samples."""
        self.resumes = False
        self._have_all()
        if self._other_generator:
            self.sampler.generator = self._other_generator.pop()

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What ``iterate()`` gives, from this place on. When the first batch is there, generators are what they were at the
        snapshot."""
        this = self._newest = object()
        later = self._began()
        read = 0 if self._owner is not None else self._base
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

    def _began(self) -> dict[str, Any] | None:
        """The generators for what comes behind the first batch."""
        sampler = self.sampler
        self._delivered, self._exhausted = 0, False
        if not self.resumes:
            self._base, self._generators, self._made_by = 0, rng.capture(), _made_by(sampler)
            generator = getattr(sampler, "generator", None)
            self._order = b"" if generator is None else tree.tensor_bytes(generator.get_state())
            return None
        self._leave_out()
        now = rng.capture()
        rng.restore(self._generators)
        if isinstance(sampler, RandomSampler):
            if self._order:
                sampler.generator = sampler.generator or Generator()
                sampler.generator.set_state(tree.tensor_from_bytes("U8", [len(self._order)], self._order))
            elif sampler.generator is not None and "initial_seed" not in self._made_by:
                self._other_generator.append(sampler.generator)
                sampler.generator = None
        return now


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

    def __init__(self, whole: Any, first: int, made_by: dict[str, Any]) -> None:
        self.whole, self._first, self._made_by = whole, first, made_by

    def __iter__(self) -> Iterator[int]:
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
