"""One file that torch.load(weights_only=True) opens: torch writes it without the tensors' bytes, which then go where it left room
for them (torch.serialization.skip_data; a record's place is what torch's own reader says)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptd.export.contents import GROUPS, MODEL, Contents, PerRank, leaves
from ckptd.export.optimizer import OptimizerState, state_of
from ckptd.export.source import Source
from ckptd.export.staging import Staging
from ckptd.export.stored import Stored, bytes_of

OPTIMIZER, EXTRA, STEP = "optimizer", "extra", "step"


def tree_of(contents: Contents) -> dict[str, Any]:
    """A module and an optimizer that are alone of their kind are called model and optimizer, whatever they were registered as."""
    modules, states = contents.modules, {owner: state_of(contents, owner) for owner in contents.optimizers}
    at = _order_of(contents, states.values())
    tree: dict[str, Any] = {}
    for owner, entries in modules.items():
        names = sorted(entries, key=lambda name: at.get((owner, name), len(at)))
        tree[MODEL if len(modules) == 1 else owner] = {name: entries[name] for name in names}
    for owner, state in states.items():
        if f"{owner}.{GROUPS}" in contents.objects and isinstance(contents.object(f"{owner}.{GROUPS}"), PerRank):
            contents.notes.append(f"{owner}: numbered rank by rank, as each had groups of its own; the file's model has that order")
        tree[OPTIMIZER if len(states) == 1 else owner] = state.by_position()
    return {**tree, EXTRA: contents.extras(), STEP: contents.checkpoint.step}


def _order_of(contents: Contents, states: Iterable[OptimizerState]) -> dict[tuple[str, str], int]:
    """Place of a parameter, by (owner, name): that of its number in the optimizers. A checkpoint has none but by the names, and
    whoever looks up what is numbered (``ckptd import --param-names model``) takes the model's order for it."""
    keys = [key for state in states for _, members in state.groups for key in members]
    names = ((owner, contents.selection.prefixes.rename(name)) for owner, name in map(contents.name_of, keys))
    return {place: number for number, place in enumerate(names)}


class TorchFile:
    """What is to be written, before anything is read."""

    def __init__(self, contents: Contents) -> None:
        self._checkpoint, self._tree = contents.checkpoint, tree_of(contents)
        found = dict.fromkeys(leaves(self._tree))
        self.tensors, self.nbytes = len(found), sum(stored.nbytes for stored in found)

    def write(self, staging: Staging) -> None:
        put(staging, "", self._tree, self._checkpoint)


def put(staging: Staging, name: str, tree: Any, checkpoint: Source) -> None:
    """One such file, whose tree may hold what is stored. ``name``: below the destination, "": itself."""
    skeleton = _Skeleton()
    with FakeTensorMode():
        without = skeleton.of(tree)

    def make(path: Path) -> None:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(without, path)

    path = staging.file(name, make)
    reader: Any = torch._C.PyTorchFileReader(str(staging.frame(path)))
    places = [reader.get_record_offset(f"data/{number}") for number in range(len(skeleton.sources))]
    assert not reader.has_record(f"data/{len(places)}")
    del reader
    for at, source in zip(places, skeleton.sources, strict=True):
        staging.region(path, name, at, source.nbytes, partial(_pieces, source, checkpoint))


def _pieces(source: Stored | Tensor, checkpoint: Source) -> Iterator[memoryview]:
    if isinstance(source, Stored):
        yield from source.pieces(checkpoint)
    elif source.nbytes:
        yield bytes_of(source)


class _Skeleton:
    """The same tree of tensors without memory. ``sources``: where their bytes come from, in the order in which torch numbers them:
    as it meets them, each once, so that what was tied stays tied."""

    def __init__(self) -> None:
        self.sources: list[Stored | Tensor] = []
        self._made: dict[Stored, Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, Stored):
            if value not in self._made:
                self._made[value] = self._add(value, value.shape, value.torch_dtype)
            return self._made[value]
        if isinstance(value, Tensor):
            return self._add(value, tuple(value.shape), value.dtype)
        if isinstance(value, dict):
            kind = type(value) if type(value).__module__ == "collections" else dict
            return kind((name, self.of(item)) for name, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        return value

    def _add(self, source: Stored | Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.sources.append(source)
        return torch.empty(shape, dtype=dtype)
