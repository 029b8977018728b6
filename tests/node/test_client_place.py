"""Each sample once in each epoch, whatever dies and whatever the world becomes: loaders that are followed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ckptd_client import tree
from ckptd_client.place import FollowedLoader, followed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from ckptd.core.errors import CkptdError

pytestmark = pytest.mark.on_host("no tensor of a model")


class World:
    """Loaders of all ranks of one start, in one process: their generators are what each rank had, set before each of its turns."""

    def __init__(self, samples: int, ranks: int, batch: int, shuffle: bool, seed: int = 0) -> None:
        self.loaders: list[FollowedLoader] = []
        self.samplers: list[Any] = []
        self.states: list[torch.Tensor] = []
        self.drawn: list[float] = []  # behind each batch, as dropout does
        for rank in range(ranks):
            torch.manual_seed(seed)
            data = list(range(samples))
            if ranks > 1:
                sampler: Any = DistributedSampler(data, ranks, rank, shuffle, seed)
            else:
                sampler = RandomSampler(data) if shuffle else None
            self.samplers.append(sampler)
            self.loaders.append(followed(DataLoader(data, batch, sampler=sampler)))
            self.states.append(torch.get_rng_state())

    def epoch(self, number: int, steps: int | None = None) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
        """(of each step what each rank saw; what each rank's snapshot says). steps: it dies behind so many."""
        loops: list[Iterator[Any]] = []
        for rank, loader in enumerate(self.loaders):
            if hasattr(self.samplers[rank], "set_epoch"):
                self.samplers[rank].set_epoch(number)
            loops.append(iter(loader))
        seen: list[list[list[int]]] = []
        while steps is None or len(seen) < steps:
            now = [self._turn(rank, loop) for rank, loop in enumerate(loops)]
            if None in now:
                assert now == [None] * len(now), "some ranks have a batch more"
                break
            seen.append([batch.tolist() for batch in now])
        states = [loader.state_dict() for loader in self.loaders]
        return seen, [tree.decode(tree.encode(state, "data", lambda *_: ""), lambda *_: None) for state in states]

    def restored(self, states: list[dict[str, Any]]) -> World:
        for rank, loader in enumerate(self.loaders):
            same = len(states) == len(self.loaders)
            loader.load_state_dict(states[rank] if same else loader.reshard(states, rank, len(self.loaders)))
        return self

    def _turn(self, rank: int, loop: Iterator[Any]) -> Any:
        torch.set_rng_state(self.states[rank])
        batch = next(loop, None)
        if batch is not None:
            self.drawn.append(torch.rand(()).item())
        self.states[rank] = torch.get_rng_state()
        return batch


def samples_of(seen: list[list[list[int]]]) -> list[int]:
    return [sample for step in seen for batch in step for sample in batch]


@pytest.mark.parametrize("seed", range(60))
def test_each_sample_is_seen_once_whatever_the_world_becomes(seed: int) -> None:
    """The last batches of torch's DistributedSampler have some samples twice; without those, none."""
    chance = random.Random(seed)
    samples, shuffle = chance.randint(1, 60), chance.random() < 0.8
    found: Counter[int] = Counter()
    twice, states, epoch = 0, None, 3
    while True:
        ranks, batch = chance.randint(1, 4), chance.randint(1, 5)
        world = World(samples, ranks, batch, shuffle, seed=chance.randint(0, 9))
        if states is not None:
            world.restored(states)
        left = samples - sum(found.values())
        steps = chance.randint(0, -(-left // (ranks * batch)))
        seen, states = world.epoch(epoch, steps if chance.random() < 0.7 and steps else None)
        found.update(samples_of(seen))
        if sum(found.values()) >= samples:
            twice = sum(found.values()) - samples
            break
        assert max(found.values(), default=0) <= 1
    assert sorted(found) == list(range(samples)) and twice < 4


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_epochs_behind_it_are_those_of_an_unbroken_run(ranks: int) -> None:
    def world() -> World:
        return World(24, ranks, 2, True)

    whole = world()
    expected = [whole.epoch(number)[0] for number in range(4)]
    first = world()
    assert first.epoch(0)[0] == expected[0]
    before, states = first.epoch(1, 2)
    second = world().restored(states)
    second.states = first.states
    assert before + second.epoch(1)[0] == expected[1]
    assert [second.epoch(number)[0] for number in (2, 3)] == expected[2:]
    assert first.drawn + second.drawn == whole.drawn


class Grouped(BatchSampler):
    """Even and odd samples apart, as some sort them by length."""

    def __iter__(self) -> Iterator[list[int]]:
        found: dict[int, list[int]] = {0: [], 1: []}
        for sample in self.sampler:
            found[sample % 2].append(sample)
            if len(found[sample % 2]) == self.batch_size:
                yield found[sample % 2]
                found[sample % 2] = []


def shuffled(**how: Any) -> DataLoader[Any]:
    return DataLoader(list(range(40)), 4, shuffle=True, **how)


def subset() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(list(range(40)), 4, sampler=SubsetRandomSampler(range(0, 40, 2), generator=generator))


def grouped() -> DataLoader[Any]:
    data = list(range(40))
    return DataLoader(data, batch_sampler=Grouped(RandomSampler(data), 4, False))


MAKERS = {
    "shuffled": shuffled,
    "of its own generator": lambda: shuffled(generator=torch.Generator().manual_seed(3)),
    "workers that stay": lambda: shuffled(num_workers=1, persistent_workers=True),
    "subset": subset,
    "grouped": grouped,
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [2, None])
def test_what_comes_behind_a_restore_is_what_would_have_come(name: str, steps: int | None) -> None:
    """Of an unbroken run: amid an epoch, and between two."""

    def run(loader: FollowedLoader, epochs: int) -> list[list[int]]:
        return [batch.tolist() for _ in range(epochs) for batch in loader]

    torch.manual_seed(1)
    loader = followed(MAKERS[name]())
    run(loader, 1)
    loop = iter(loader)
    for _ in range(steps or 1000):
        if next(loop, None) is None:
            break
    state, generators = loader.state_dict(), torch.get_rng_state()
    expected = [batch.tolist() for batch in loop] + run(loader, 2)
    torch.manual_seed(99)
    again = followed(MAKERS[name]())
    again.load_state_dict(state)
    torch.set_rng_state(generators)  # as a restore does
    assert run(again, 3 if steps else 2) == expected


def test_an_epoch_that_was_left_early_and_one_that_has_ended_are_over() -> None:
    (loader,) = World(12, 1, 3, False).loaders
    for _ in loader:
        break
    assert loader.state_dict()["done"] == 0
    assert len(list(loader)) == 4 and loader.state_dict()["done"] == 0
    assert len(loader) == 4 and loader.batch_size == 3, "all else is the loader's"


def test_a_stream_is_read_once_more_and_refused_in_another_world() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    loader = followed(DataLoader(Stream(), 2))
    loop = iter(loader)
    assert [next(loop).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = loader.state_dict()
    again = followed(DataLoader(Stream(), 2))
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(CkptdError, match="cannot go on in another number of ranks"):
        again.reshard([state, state], 0, 1)
    with pytest.raises(CkptdError, match="was counted in batches, and is in samples now"):
        World(4, 1, 1, False).loaders[0].load_state_dict(state)
