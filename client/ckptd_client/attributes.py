"""What optimizers, and what wraps one, keep in attributes that no ``state_dict()`` has: it is in no checkpoint, and told (P15).

Two snapshots' looks at the attributes are compared. A look finds numbers, tensors, arrays and generators, also within lists,
dicts, deques and modules. It does not look into other objects, whose inside is more likely a cache, a clock or a handle.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckptd_client import beside, nested, optim, watch
from ckptd_client.entries import Owner
from ckptd_client.hyper import SMALL_MAX
from ckptd_client.naming import is_dtensor, local_of
from ckptd_client.quiet import NoCollectives
from ckptd_client.registry import Registry
from ckptd_client.same import same
from ckptd_client.statics import mark_of

log = logging.getLogger("ckptd")
KEPT = (
    "ckptd job %s: %s (%s) changes its attributes %s, which its state_dict() has not: after a restore they are what the program "
    "makes them. If its steps depend on them, keep them in its state or a parameter group, or give it a state_dict() and a "
    "load_state_dict() that have them"
)
# What one attribute may cost: so many values are compared (5 us each), so many looked at, so deep, and so many bytes of an array.
# What lies behind that is not seen: slow weights are written together, so the first of them tell of all.
LEAVES_MAX, VISITS_MAX, DEPTH_MAX, ARRAY_BYTES_MAX = 64, 1024, 4, 1 << 16
# Torch's own: what an Optimizer has, what a scheduler notes in it, what GradScaler puts there.
_TORCHS = frozenset(("state", "param_groups", "defaults", "_opt_called", "_step_count", "grad_scale", "found_inf"))
Shapes = Callable[[], Collection[torch.Size]]


class Leaf(NamedTuple):
    """``of``: id of what may be known from elsewhere. ``in_place``: told by being written alone; a large tensor, or one of a
    parameter's shape, that takes the place of another is more likely scratch memory or a gradient."""

    mark: Any
    of: int = 0
    in_place: bool = False
    appended: bool = False  # in a list: a number that was not there is news. A dict that grows is more likely a cache


def leaves(values: Mapping[str, Any], shapes: Shapes = tuple) -> dict[str, dict[str, Leaf]]:
    """Of each attribute what tells that it is another, by its place within. ``shapes``: of the parameters, asked for where a
    tensor may be state of one."""
    found = {}
    for name, value in values.items():
        if name not in _TORCHS and not (name.startswith("_") and "hook" in name):
            one = _Walk(shapes).of(value)
            if one:
                found[name] = one
    return found


class _Walk:
    """Through one attribute."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes, self._visits, self._found = shapes, 0, dict[str, Leaf]()

    def of(self, value: Any) -> dict[str, Leaf]:
        self._visit("", value, 0, False)
        return self._found

    def _visit(self, place: str, value: Any, depth: int, appended: bool) -> None:
        self._visits += 1
        if isinstance(value, Optimizer):
            return  # looked at by itself
        leaf = self._leaf(value, depth)
        if leaf is not None:
            self._found[place] = leaf._replace(appended=appended)
        elif depth < DEPTH_MAX:
            for key, item in _items(value):
                if self._visits >= VISITS_MAX or len(self._found) >= LEAVES_MAX:
                    return
                self._visit(f"{place}.{key}", item, depth + 1, isinstance(value, list | deque))

    def _leaf(self, value: Any, depth: int) -> Leaf | None:
        if isinstance(value, Tensor):
            return self._tensor(value, depth)
        if isinstance(value, Number | str):
            return Leaf(value)
        if isinstance(value, torch.Generator):
            return Leaf(value.get_state(), id(value))
        if isinstance(value, random.Random):
            return None if type(value) is random.SystemRandom else Leaf(hash(value.getstate()), id(value))
        return _numpys(value)

    def _tensor(self, value: Tensor, depth: int) -> Leaf | None:
        """No device is waited for."""
        if type(value) not in (Tensor, nn.Parameter) and not is_dtensor(value):
            return None
        local = local_of(value)
        if type(local) not in (Tensor, nn.Parameter) or local.layout != torch.strided or local.is_inference() or local.is_meta:
            return None
        as_state = bool(depth) and value.shape in self._shapes()
        if value.numel() > SMALL_MAX and not as_state:
            return None
        return Leaf(mark_of(value, local), id(value), as_state)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, Mapping):
        for at, (key, item) in enumerate(value.items()):
            yield key if isinstance(key, str | int) else at, item
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)


def _numpys(value: Any) -> Leaf | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        if value.nbytes <= ARRAY_BYTES_MAX:
            return Leaf(hash(value.tobytes()), id(value))
        if value.flags.c_contiguous or value.flags.f_contiguous:  # then it need not be copied to be thinned out
            flat = value.reshape(-1, order="A")
            return Leaf(hash(flat[:: -(-value.nbytes // ARRAY_BYTES_MAX)].tobytes()), id(value))
        return None
    if isinstance(value, numpy.random.Generator):
        return Leaf(value.bit_generator.state, id(value))
    if isinstance(value, numpy.random.RandomState):
        return Leaf(value.get_state(), id(value))
    return None


def _changed(before: Mapping[str, Leaf], now: Mapping[str, Leaf]) -> list[Leaf]:
    """What of an attribute is another ``now``."""
    grown = [leaf for place, leaf in now.items() if place not in before and leaf.appended and not leaf.of]
    return grown + [leaf for place, leaf in now.items() if place in before and _differs(before[place], leaf)]


def _differs(before: Leaf, now: Leaf) -> bool:
    if before.in_place and now.in_place and before.mark[:2] != now.mark[:2]:
        return False
    return not same(before.mark, now.mark)


class Attributes:
    """Warns of those that change from one snapshot to the next, each once. Whoever saves more than state and groups has said what
    matters, and is not asked."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._seen: dict[tuple[str, int], tuple[int, dict[str, dict[str, Leaf]]]] = {}  # owner, place in it -> id, leaves
        self._told: set[tuple[str, str]] = set()
        self._elsewhere: set[int] = set()  # ids of what changed and was found to be saved elsewhere

    def look(self, registry: Registry, tensors: Sequence[Tensor]) -> None:
        """At a snapshot of these tensors. Never the snapshot's problem (P5)."""
        for owner in registry.of_kind("optimizer", "stateful"):
            for at, holder in enumerate(_holders(owner)):
                try:
                    self._compare(owner, at, holder, registry, tensors)
                except Exception:
                    log.debug("ckptd client: attributes of %s", owner.name, exc_info=True)

    def _compare(self, owner: Owner, at: int, holder: Any, registry: Registry, tensors: Sequence[Tensor]) -> None:
        now = leaves(vars(holder), cache(lambda: _shapes(holder)))
        which, before = self._seen.get((owner.name, at), (0, {}))
        self._seen[owner.name, at] = id(holder), now
        if which != id(holder):
            return
        new = {name: changed for name in sorted(now) if (changed := self._news(owner, name, before, now))}
        if not new or _saves_more(owner.name, holder):
            return
        known = _saved(registry, tensors)
        self._elsewhere |= known & {leaf.of for changed in new.values() for leaf in changed}
        names = [name for name in new if self._news(owner, name, before, now)]
        self._told.update((owner.name, name) for name in names)
        if names:
            log.warning(KEPT, self._job, owner.name, type(holder).__name__, ", ".join(names))

    def _news(
        self, owner: Owner, name: str, before: dict[str, dict[str, Leaf]], now: dict[str, dict[str, Leaf]]
    ) -> list[Leaf]:
        if name not in before or (owner.name, name) in self._told:
            return []
        return [leaf for leaf in _changed(before[name], now[name]) if leaf.of not in self._elsewhere]


def _holders(owner: Owner) -> list[Any]:
    """Optimizers, and what steps by one that it holds: schedulers do, and save all that they have."""
    if owner.kind == "optimizer":
        return list(nested.optimizers(owner.value))
    held = getattr(owner.value, "__dict__", {}).values()
    wraps = callable(getattr(owner.value, "step", None)) and any(isinstance(each, Optimizer) for each in held)
    return [*nested.inside(owner.value), owner.value] if wraps else []


def _shapes(holder: Any) -> set[torch.Size]:
    return {parameter.shape for _, group in nested.groups(_inside(holder)) for parameter in group["params"]}


def _inside(holder: Any) -> list[Optimizer]:
    if isinstance(holder, Optimizer):
        return [holder]
    return [each for each in vars(holder).values() if isinstance(each, Optimizer)]


def _saves_more(name: str, holder: Any) -> bool:
    """Has its own word in what is saved of it more than the optimizers' state and groups? One that runs a collective to say so,
    or has not stepped yet, is not asked."""
    if isinstance(holder, Optimizer) and not beside.overrides(holder):
        return False
    if not any(optimizer.state or watch.first(optimizer) for optimizer in nested.optimizers(_inside(holder))):
        return True
    try:
        with NoCollectives(name), torch.no_grad():
            saved = holder.state_dict()
    except Exception:
        return True
    return any(not beside.usual(key) and not _of_an_optimizer(value) for key, value in saved.items())


def _of_an_optimizer(saved: Any) -> bool:
    return isinstance(saved, Mapping) and "state" in saved and "param_groups" in saved


def _saved(registry: Registry, tensors: Sequence[Tensor]) -> set[int]:
    """ids of what is captured, of gradients, and of the random generators that every program has."""
    known = {id(tensor) for tensor in tensors} | {id(owner.value) for owner in registry.owners.values()}
    known |= {id(random._inst), id(torch.default_generator)}
    if "numpy" in sys.modules:
        known.add(id(sys.modules["numpy"].random.mtrand._rand))
    for owner in registry.of_kind("optimizer", "stateful"):
        inside = [each for holder in _holders(owner) for each in _inside(holder)]
        for _, group in nested.groups(inside):
            known |= {id(each) for parameter in group["params"] for each in (parameter, parameter.grad)}
        for optimizer in inside:
            known |= {id(leaf) for state in optimizer.state.values() for _, leaf in optim.tensor_leaves("", state)}
    return known
