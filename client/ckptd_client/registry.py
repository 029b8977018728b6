"""What the user registered, under which names (design D7)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptd.core.errors import CkptdError
from ckptd_client import naming, nested, optim, placing, supported, tree, values, watch
from ckptd_client.boxes import Boxes
from ckptd_client.entries import KeyMap, Owner, check_fits
from ckptd_client.modules import SavedState
from ckptd_client.quiet import NoCollectives
from ckptd_client.rules import Rule
from ckptd_client.scaler import ScalerState

EXTRA = "extra"  # register(extra={...}): always a dict of objects, each under its own name
FILLED = ("tensor", "value")  # kinds that a restore can make
HELD = ("module", "optimizer", "tensor")  # kinds of which a known structure holds tensors (Recall)
KEYS = (str, int)  # types of a registered dict's keys, which become parts of names
Patterns = str | Sequence[str]


class _Found(NamedTuple):
    name: str
    value: Any
    kind: str
    place: tuple[Any, Any] | None


class _Box(NamedTuple):
    """A container that was opened, and what it held then: what is held cannot be mistaken for something new."""

    name: str
    value: Any
    held: list[Any]


@dataclass
class _Opened:
    """A registered dict or list of objects. ``inside``: it and the containers in it that were opened."""

    name: str
    value: Any
    own: Callable[[_Found], Owner]
    inside: list[_Box] = field(default_factory=list)

    def replaced_by(self, other: _Opened) -> bool:
        """``extra`` may be registered in parts."""
        return self.value is other.value or (self.name == other.name != EXTRA)

    def changed(self) -> bool:
        return any(list(map(id, _contents(box.value))) != list(map(id, box.held)) for box in self.inside)


class Registry:
    def __init__(self) -> None:
        self.owners: dict[str, Owner] = {}
        self._opened: list[_Opened] = []
        self.version = 0  # grows with every register()
        self.began = False  # a restore has filled it
        self.bare = False  # of a client that saves and loads exactly what it is handed
        self.without: tuple[str, ...] = ()  # parameters whose optimizer state is meant to be absent

    def register(
        self,
        objects: Mapping[str, Any],
        *,
        include: Patterns = (),
        exclude: Patterns = (),
        replicated: Patterns = (),
        fenced: bool = False,
        key_map: KeyMap | None = None,
        without: Patterns = (),
        gradients: bool = False,
        rules: Mapping[str, Rule] | None = None,
        mesh: Any = None,
    ) -> list[Owner]:
        """Raises TypeError naming the path of a value that cannot be saved; nothing is registered then."""

        def own(item: _Found) -> Owner:
            owner = Owner(
                item.name, item.kind, item.value, _tuple(include), _tuple(exclude), _tuple(replicated), fenced, key_map
            )
            owner.since, owner.gradients, owner.place = watch.now(), gradients, item.place
            owner.rules, owner.axes = dict(rules or {}), placing.Axes(mesh)
            _check(owner)
            return owner

        self._check_not_bare()
        found: list[Owner] = []
        opened: list[_Opened] = []
        for name, value in objects.items():
            root = _Opened(name, value, own)
            found += map(own, _looked_into(name, value, root.inside))
            if root.inside:
                opened.append(root)
        _check_names(item.name for item in found)
        _check_included(found, _tuple(include))
        placing.check(found)
        self.without += _tuple(without)
        self._let_go({owner.name for owner in found})
        self.owners.update({owner.name: owner for owner in found})
        self._opened = [old for old in self._opened if not any(map(old.replaced_by, opened))] + opened
        self.version += 1
        return found

    def be_bare(self) -> None:
        """Raises CkptdError where objects are registered."""
        if self.owners and not self.bare:
            hint = "give the save a name=, or use a client of its own"
            what = "saving() and open() are for a client that registers nothing"
            raise CkptdError(what, where=next(iter(self.owners)), hint=hint)
        self.bare = True

    def _check_not_bare(self) -> None:
        if self.bare:
            hint = "give saving() and open() a name=, or use another client"
            raise CkptdError("this client saves exactly what saving() is handed; it registers nothing", hint=hint)

    def register_boxes(self, boxes: Boxes) -> None:
        """Raises CkptdError naming what cannot be saved; nothing is registered then."""
        self._check_not_bare()
        _check_own(boxes.name)
        boxes.ask(loading=False)
        self._let_go({boxes.name})
        self.owners[boxes.name] = Owner(boxes.name, "boxes", boxes)
        self.version += 1

    def look_again(self, *, loading: bool = False) -> None:
        """Dicts and lists of objects are what they are now: a counter that was counted on, a tensor that another one took the
        place of, a new key; boxes are asked for anew where one lies elsewhere. Raises what ``register`` raises."""
        for owner in self.of_kind("boxes"):
            if loading or owner.value.changed():
                owner.value.ask(loading=loading)
                self.version += 1
        for root in self._opened:
            if root.changed():
                self._open_anew(root)

    def _open_anew(self, root: _Opened) -> None:
        inside: list[_Box] = []
        found = {item.name: item for item in _looked_into(root.name, root.value, inside)}
        before = {name for name, owner in self.owners.items() if _belongs(owner, root)}
        kept = {n for n in before & found.keys() if self.owners[n].kind == found[n].kind}
        others = self.owners.keys() - before  # of other roots, which have the name by now
        new = {name: root.own(item) for name, item in found.items() if name not in kept | others}
        for owner in new.values():
            owner.late = self.began
        for name in kept:
            owner, item = self.owners[name], found[name]
            if owner.kind in HELD and owner.value is not item.value:
                self.version += 1
            owner.value, owner.place = item.value, item.place
        if new or before - kept:
            self.version += 1
        self._let_go(before - kept)
        self.owners = {name: owner for name, owner in self.owners.items() if name not in before - kept} | new
        root.inside = inside

    def _let_go(self, names: set[str]) -> None:
        """Plans of snapshots before may name these owners for long: an optimizer that only they hold would count as a live one
        that nobody registered, and its memory would stay."""
        for name in self.owners.keys() & names:
            self.owners[name].value = None

    def were_written(self, written: Mapping[str, Collection[str]], grant: int) -> None:
        """Past the fence, on whatever rank: {name of an owner: keys; none: all of it}."""
        for name, keys in written.items():
            if name in self.owners:
                self.owners[name].was_written(keys, grant)

    def containers(self) -> dict[str, Any]:
        """Registered dicts and lists by name, also those that hold plain values only."""
        opened = {box.name: box.value for root in self._opened for box in root.inside}
        return {name: owner.value for name, owner in self.owners.items() if isinstance(owner.value, dict | list)} | opened

    def contents(self) -> dict[str, list[Any]]:
        """Of those that were opened: the keys of tensors and plain values, which a restore can put there by itself."""
        found: dict[str, list[Any]] = {}
        for box in (box for root in self._opened for box in root.inside if isinstance(box.value, dict | list)):
            keys = box.value if isinstance(box.value, dict) else range(len(box.value))
            owners = ((key, self.owners.get(f"{box.name}.{key}")) for key in keys if type(key) in (str, int))
            found[box.name] = [key for key, owner in owners if owner is not None and owner.kind in FILLED]
        return found

    def of_kind(self, *kinds: str) -> list[Owner]:
        return [owner for owner in self.owners.values() if owner.kind in kinds]


def _tuple(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _contents(box: Any) -> list[Any]:
    return [*box.keys(), *box.values()] if isinstance(box, Mapping) else list(box)


def _belongs(owner: Owner, root: _Opened) -> bool:
    return owner.place is not None and any(owner.place[0] is box.value for box in root.inside)


def _looked_into(name: str, value: Any, inside: list[_Box]) -> list[_Found]:
    try:
        found = list(_objects(name, value, inside))
    except RecursionError:
        raise tree.ForeignType(f"{name}: contains itself, or is nested too deep; {tree.REMEDY}") from None
    _check_names(item.name for item in found)
    return found


def _check_names(names: Iterable[str]) -> None:
    """Raises CkptdError: of two objects of one name only one would be saved."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            hint = "keys of dicts are joined by dots, and 1 is written as '1' is"
            raise CkptdError("two of what is registered have this name", where=name, hint=hint)
        seen.add(name)


def _objects(
    name: str, value: Any, inside: list[_Box], place: tuple[Any, Any] | None = None
) -> Iterator[_Found]:
    """Dicts and lists of objects are opened, and noted ``inside``; plain nested values stay whole."""
    _check_own(name)
    kind = _kind(value)
    if kind == "nest" or (name == EXTRA and type(value) is dict):
        inside.append(_Box(name, value, _contents(value)))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            if type(key) not in KEYS:
                text = f"{name}: a key of type {type(key).__name__} is no name that a restore finds again; key it by strings"
                raise tree.ForeignType(text)
            yield from _objects(f"{name}.{key}", item, inside, (value, key))
    elif kind == "scaler":
        yield _Found(name, ScalerState(value), "stateful", place)
    else:
        yield _Found(name, value, kind, place)


def _check_own(name: str) -> None:
    """Raises CkptdError for a name that nobody may register."""
    if not name or name.startswith("$") or name == "rng":
        raise CkptdError("this name is ckptd's own", where=name, hint="register it under another name")
    if not tree.is_text(name):
        raise CkptdError(f"a name {tree.NO_TEXT}", where=tree.printable(name))


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "module"
    supported.check_optimizer(value)
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, torch.amp.GradScaler):
        return "scaler"
    if isinstance(value, Tensor):
        return "tensor"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "stateful"
    if isinstance(value, dict) and any(_live(item) for item in value.values()):
        return "nest"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Optimizer) for item in value):
        return "optimizer"  # one for all: no position in the list is part of a name
    if isinstance(value, list | tuple) and any(_live(item) for item in value):
        return "nest"
    return "value"


def _live(value: Any) -> bool:
    """Holds state of its own that is looked up anew each time."""
    return _kind(value) != "value" or isinstance(value, torch.Generator)


def _check(owner: Owner) -> None:
    """A type that cannot be saved is found here, where the user can do something about it."""
    if owner.kind == "stateful":
        with NoCollectives(owner.name):
            saved = owner.value.state_dict()
        tree.encode(saved, owner.name, _any_tensor)
    elif owner.kind == "module":
        _check_module(owner)
    elif owner.kind == "value":
        tree.encode(owner.value, owner.name, _any_tensor)
        values.check(owner)
    elif owner.kind == "tensor":
        supported.check_tensor(owner.rename(owner.name), owner.value)
    elif owner.kind == "optimizer":
        for optimizer in nested.optimizers(owner.value):
            supported.check_optimizer(optimizer)
        hyper = [optim.hyperparameters(group) for _, group in nested.groups(owner.value)]
        tree.encode(hyper, f"{owner.name}.param_groups", _any_tensor)


def _check_module(owner: Owner) -> None:
    """What hangs there now; a module may be sharded or quantised later, which its snapshots look at."""
    spots, extras = naming.walk(owner.value)
    for spot in spots:
        key = owner.rename(f"{owner.name}.{spot.name}")
        if owner.takes(key):
            supported.check_tensor(key, spot.tensor)
    for name, extra in naming.named(owner, extras).items():
        if isinstance(extra, SavedState):
            tree.encode(extra.get(), name, _any_tensor)


def _check_included(owners: list[Owner], patterns: tuple[str, ...]) -> None:
    """Raises CkptdError for a pattern that fits nothing: what it was to name would be missing from every snapshot. What an
    optimizer will hold has no names yet."""
    modules = [owner for owner in owners if owner.kind == "module"]
    optimizers = [owner.name for owner in owners if owner.kind == "optimizer"]
    keys = {owner.rename(f"{owner.name}.{spot.name}") for owner in modules for spot in naming.walk(owner.value)[0]}
    now = [pattern for pattern in patterns if not any(pattern.startswith((name, "*", "?", "[")) for name in optimizers)]
    if modules or optimizers:
        check_fits("include", now, keys)


def _any_tensor(path: str, _: Tensor) -> str:
    return path
