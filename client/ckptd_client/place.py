"""Where training stands in an epoch's data, and going on there, for loaders that do not know it themselves.

    loader = followed(DataLoader(...))          # with a DistributedSampler or without
    client.register(model=model, optimizer=optimizer, data=loader)

Of map-style data samples are counted over all ranks, and an epoch that goes on leaves out its first samples before they are cut
into batches: each is seen once whatever the number of ranks and the batch size become. The order is the one that the epoch began
with, also where another kind of sampler makes it now: frameworks take torch's RandomSampler for one rank and its DistributedSampler
for several. Of a stream, and of a batch sampler that is not torch's own, batches of this rank are counted, and read once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ckptd.core.errors import CkptdError
from ckptd_client import orders, rng
from ckptd_client.orders import Order, Rest

SAMPLES, BATCHES = "samples", "batches"


class Place:
    """One loader's. Whoever owns it iterates over ``batches()`` instead of the loader."""

    def __init__(self, loader: Any, ahead: int = 0, each: int | None = None) -> None:
        """ahead: batches that whoever asks for them holds back. each: samples of one batch, of all ranks together; None: as many
        as the loader itself and its sampler say."""
        owner = None if isinstance(loader.dataset, IterableDataset) else _innermost(loader.batch_sampler)
        self._owner: Any = owner if type(owner) is BatchSampler else None  # which asks the sampler; None: batches are counted
        self._sampler = None if owner is None else getattr(owner, "sampler", None)
        self._stays = bool(getattr(loader, "persistent_workers", False))  # workers are seeded once for all epochs
        self._ahead, self._each = ahead, 1
        if self._owner is not None:
            self._each = self._owner.batch_size * getattr(self.sampler, "num_replicas", 1) if each is None else each
        self.resumes = False  # a restore has said where; the next iteration begins there
        self._base, self._delivered, self._exhausted = 0, 0, True
        self._order: Order | None = None  # of the epoch that is iterated over, or goes on
        self._live = False  # a loop over it has drawn it, and has not asked for its end
        self._put_back: Callable[[], None] = lambda: None
        self._iterated = self._seeded = False  # at all; before the restore that came to between two epochs
        self._newest: object = None

    @property
    def sampler(self) -> Any:
        """None: a stream's."""
        return self._sampler if self._owner is None else orders.whole(self._owner.sampler)

    @property
    def size(self) -> int | None:
        """Samples in an epoch, of all ranks together; None: batches are counted."""
        return None if self._owner is None else orders.samples_of(self.sampler)

    @property
    def done(self) -> int:
        """Samples, or batches of this rank, of this epoch that training has had."""
        held_back = 0 if self._exhausted else min(self._ahead, self._delivered)
        done = self._base + (self._delivered - held_back) * self._each
        return done if self.size is None else min(done, self.size)

    @property
    def _counts(self) -> str:
        return BATCHES if self._owner is None else SAMPLES

    def state_dict(self) -> dict[str, Any]:
        done = self.done
        order = self._order if self._live or done else None
        saved = (order or Order.now(self.sampler)).saved()
        return {"counts": self._counts, "done": done, "begun": order is not None, "order": saved, "iterated": self._iterated}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CkptdError: samples were counted, and batches are now, or the other way round."""
        if state["counts"] != self._counts:
            raise CkptdError(f"the data was counted in {state['counts']}, and is in {self._counts} now")
        order = Order(**state["order"])
        order.give(self.sampler)
        if state["begun"]:
            self._goes_on(state["done"], order)
        else:
            self._base, self._delivered, self._exhausted, self.resumes = 0, 0, True, False
            self._seeded = self._stays and state["iterated"]

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Raises CkptdError where batches are counted: nobody can cut their rest anew."""
        if states[0]["counts"] == BATCHES:
            what = "a stream of data, or batches of a batch sampler of one's own, cannot go on in another number of ranks"
            raise CkptdError(what, hint="as many ranks as saved it; or a map-style dataset and torch's own BatchSampler")
        return states[0]

    def begins(self, epoch: int) -> None:
        """Its sampler draws the order of this epoch."""
        orders.set_epoch(self.sampler, epoch)

    def skip(self, batches: int) -> None:
        """The next iteration begins behind so many, as of an epoch that begins now."""
        self._goes_on(batches * self._each, Order.now(self.sampler))

    def _goes_on(self, done: int, order: Order) -> None:
        self._base, self._delivered, self._exhausted, self.resumes, self._order = done, 0, False, True, order

    def batches_left(self, loader: Any) -> int:
        """How many of today's batches the epoch still has for this rank."""
        self._replace(lambda: None)
        left = len(loader)
        self._have_all()
        return left

    def batches_done(self, loader: Any, whole: int) -> int:
        """How many of ``whole`` that makes: an epoch's today, or fewer where somebody limits them."""
        return max(self._base // self._each, whole - self.batches_left(loader))

    def nothing_left(self) -> bool:
        return self.resumes and self.size is not None and self._base >= self.size

    def over(self) -> None:
        """What goes on is another epoch, and has all samples."""
        self.resumes = self._live = False
        self._have_all()
        self._put_back()
        self._put_back = lambda: None

    def batches(self, iterate: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """What ``iterate()`` gives, from this place on. When the first batch is there, generators are what they were at the
        snapshot."""
        this = self._newest = object()
        before = rng.capture() if self.resumes or self._seeded else None
        later = before if self.resumes else None
        drawn = partial(self._drawn, before)
        self._delivered, self._exhausted = 0, False
        if not self.resumes:
            self._base = 0
        read = self._base if self._owner is None else 0
        if self._owner is None:
            drawn()
        else:
            self._replace(drawn)
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

    def _drawn(self, before: dict[str, Any] | None) -> None:
        """A sampler is about to draw an epoch's order, or the one of the epoch that goes on once more. Whether the loader has
        drawn from the same generators before is its own affair; workers that stay are seeded in their first epoch only."""
        self._live = True
        if self.resumes and self._order is not None:
            self._put_back = self._order.draw_again(self.sampler)
            return
        if self._seeded and before is not None:
            rng.restore(before)
        self._seeded, self._iterated = False, True
        self._order = Order.now(self.sampler)

    def _replace(self, drawn: Callable[[], None]) -> None:
        if self._owner is not None and not isinstance(self._owner.sampler, Rest):
            order = self._order if self.resumes else None
            self._owner.sampler = Rest(self._owner.sampler, self._base if self.resumes else 0, order, drawn)

    def _have_all(self) -> None:
        if self._owner is not None:
            self._owner.sampler = self.sampler


class Inside:
    """A loader whose place is known. All else is the loader's."""

    def __init__(self, loader: Any, place: Place) -> None:
        self._loader, self.place = loader, place

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
        return self.place.batches(lambda: iter(self._loader))


class FollowedLoader(Inside):
    """It says its place itself."""

    def state_dict(self) -> dict[str, Any]:
        return self.place.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place.load_state_dict(state)

    def reshard(self, states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        return self.place.reshard(states, rank, world)


def followed(loader: DataLoader[Any]) -> FollowedLoader:
    """To be iterated over instead of ``loader``, and registered: what is left of an epoch comes after a restore. The first loop
    over it is that epoch's, and empty where nothing was left."""
    return FollowedLoader(loader, Place(loader))


def _innermost(sampler: Any) -> Any:
    """The one that asks a sampler for samples, behind those that share its batches among ranks."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


__all__ = ["FollowedLoader", "followed"]
