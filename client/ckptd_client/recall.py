"""What the previous snapshot looked up, used again as long as a quick look says that nothing was replaced.

Looking up a few thousand tensors by name costs as many times 10 µs. The quick look compares the identity of every module,
parameter, buffer, parameter group and piece of optimizer state, and the names under which they hang, in C. No tensor is held, not
even weakly: that would keep torch from swapping it. Where it hung is known, and what hangs there is looked at anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ckptd_client import _switches, apart, beside, complete, hyper, modules, naming, nested, optim, watch
from ckptd_client.entries import State
from ckptd_client.plan import Plan, signature_of
from ckptd_client.registry import Registry

_kind = attrgetter("__class__", "dtype", "shape", "device")  # what a tensor is to a plan
_trained = attrgetter("requires_grad")  # makes a parameter static or not
NUMBERS = frozenset({int, float, bool, str, type(None)})  # in optimizer state: another object with each step


class Recall:
    """Made from a full look-up. ``found``: so many entries hang in modules, optimizers or owners themselves; the others lie
    inside of user objects (a scaler's scale, a loader's order), which are asked each time."""

    def __init__(self, registry: Registry, state: State, plan: Plan, found: int) -> None:
        self.plan = plan
        self.aliases = state.aliases
        self.groups = state.groups
        self.extras = state.extras
        self._registry = registry
        self._registered = complete.registered(registry)
        self._version = registry.version
        self._modules = [owner.value for owner in registry.of_kind("module")]
        self._parts = [part for module in self._modules for part in module.modules()]
        self._numbers = any(state.odd.values())
        self._keys = {owner.name: optim.state_keys(owner, state.params) for owner in registry.of_kind("optimizer") if self._numbers}
        hanging = self._hanging()
        places = {id(value): at for at, value in enumerate(hanging)}
        tensors = [entry.tensor for entry in state.entries[:found]]
        self._count = len(hanging)
        self._places = [places.get(id(tensor), -1) for tensor in tensors]
        self._sharded = [at for at, tensor in enumerate(tensors) if naming.is_dtensor(tensor)]
        self._params = [at for at, entry in enumerate(state.entries[:found]) if entry.role == "param"]
        self._kinds = self._kinds_of(tensors)
        self._seen = self._ids(hanging)
        self._named = self._names()
        self._elsewhere = dict(self._optimizers())

    @staticmethod
    def can_hold(state: State) -> bool:
        """State that is neither a tensor nor a number is looked up each time; so are the tensors inside of subclasses, which may be
        replaced behind our back."""
        forms = any(isinstance(extra, apart.Forms) for extras in state.extras.values() for extra in extras.values())
        odd = ((key, values) for keys in state.odd.values() for key, values in keys.items())
        alone = any(optim.of_no_parameter(key) or not NUMBERS.issuperset(map(type, values.values())) for key, values in odd)
        return not forms and not alone

    def odd(self) -> dict[str, dict[str, Any]]:
        """As ``State`` has it: the numbers of each optimizer's state."""
        return {
            owner.name: optim.numbers(owner, self._keys[owner.name]) if self._numbers else {}
            for owner in self._registry.of_kind("optimizer")
        }

    @property
    def beside(self) -> dict[str, Any]:
        """As ``State`` has it; asked anew, as it may appear with any step."""
        return beside.of_all(self._registry)

    def with_inside(self, tensors: list[Tensor], state: State) -> list[Tensor] | None:
        """``tensors`` and, after them, those that were found inside of objects just now; None when these are others than the
        plan knows. ``state``: with its objects."""
        if signature_of(state)[1:] != self.plan.signature[1 + len(tensors) :]:
            return None
        return tensors + [entry.tensor for entry in state.entries]

    def there(self) -> list[Any] | None:
        """What hangs in their places, whether or not it was replaced; None when these are not known any more."""
        hanging = self._hanging()
        if self._registry.version != self._version or len(hanging) != self._count or -1 in self._places:
            return None
        found = [hanging[at] for at in self._places]
        return found if all(isinstance(tensor, Tensor) for tensor in found) else None

    def tensors(self) -> list[Tensor] | None:
        """In the order of the plan's first entries; None when anything was replaced, added or changed its form."""
        if self._registry.version != self._version:
            return None
        modules.prepare(self._parts)
        hanging = self._hanging()
        if self._ids(hanging) != self._seen:  # FSDP2 after an eval pass: the shards may be one hook away
            for module in self._modules:
                naming.reshard(module)
            hanging = self._hanging()
            if self._ids(hanging) != self._seen:
                return None
        if self._names() != self._named or not self._optimizers() <= self._elsewhere.items():
            return None
        found = [hanging[at] for at in self._places]
        if -1 in self._places or self._kinds_of(found) != self._kinds:
            return None
        return found

    def _kinds_of(self, tensors: list[Tensor]) -> list[Any]:
        """What a layout depends on, and ``.data =`` or a swap can change."""
        specs = [tensors[at]._spec for at in self._sharded if naming.is_dtensor(tensors[at])]  # type: ignore[attr-defined]
        trained = list(map(_trained, (tensors[at] for at in self._params)))
        return [list(map(_kind, tensors)), trained, [(id(spec.mesh), spec.placements) for spec in specs]]

    def _hanging(self) -> list[Any]:
        """The same ones in the same order, as long as nothing is replaced."""
        given = [owner.value for owner in self._registry.of_kind("tensor")]
        given += [box.tensor for owner in self._registry.of_kind("boxes") for box, _ in owner.value.boxes]
        return [*self._in_modules(), *self._in_optimizers(), *self._gradients(), *given]

    def _ids(self, hanging: list[Any]) -> list[int]:
        flags = [
            4 * len(owner.written) + 2 * owner.unfenced + owner.thawed for owner in self._registry.owners.values()
        ]
        return [
            *flags,
            int(_switches.SYNC_COPIES),
            *map(id, map(_still, hanging) if self._numbers else hanging),
        ]

    def _names(self) -> list[Any]:
        """Under which all of it hangs, holder by holder, and what says that a module's are left out or saved otherwise: the same
        tensors may be saved under another name by now, or be another parameter's."""
        return [*map(_names_in, self._parts), *(tuple(state) for one in self._each_optimizer() for state in _states(one))]

    def _optimizers(self) -> set[tuple[int, tuple[int, bool]]]:
        """All of the process: what would be missed if nobody registered one (complete.py). One that has gone since, whenever the
        garbage is collected, is no news, and one that lies in its place is another."""
        return {(watch.first(optimizer), self._has(optimizer)) for optimizer in watch.stepped()}

    def _has(self, optimizer: Optimizer) -> tuple[int, bool]:
        changed = id(optimizer) not in self._registered and bool(hyper.changed(optimizer))
        return len(optimizer.state), changed

    def _in_modules(self) -> Iterator[object]:
        return chain.from_iterable(
            values.values()
            for part in self._parts
            for values in (part._parameters, part._buffers, part._modules)
        )

    def _gradients(self) -> Iterator[object]:
        for owner in self._registry.of_kind("module"):
            if owner.gradients:
                yield from (parameter.grad for parameter in owner.value.parameters())

    def _in_optimizers(self) -> Iterator[object]:
        for optimizer in self._each_optimizer():
            yield optimizer
            yield from chain.from_iterable((group, *group["params"]) for group in optimizer.param_groups)
            yield from optimizer.state
            yield from chain.from_iterable(state.values() for state in _states(optimizer))

    def _each_optimizer(self) -> Iterator[Optimizer]:
        return chain.from_iterable(nested.optimizers(owner.value) for owner in self._registry.of_kind("optimizer"))


def _names_in(part: nn.Module) -> tuple[Any, ...]:
    left_out = part._non_persistent_buffers_set
    hanging = (tuple(part._parameters.keys()), tuple(part._buffers.keys()), tuple(part._modules.keys()))
    hooks = len(part._state_dict_hooks), len(part._state_dict_pre_hooks)
    return (part.__class__, hooks, frozenset(left_out) if left_out else None, *hanging)


def _states(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """What it keeps under names of its own may be anything."""
    return (state for state in optimizer.state.values() if isinstance(state, dict))


def _still(value: Any) -> Any:
    """What stays the same object as long as nothing but its number changes."""
    return type(value) if type(value) in NUMBERS else value

