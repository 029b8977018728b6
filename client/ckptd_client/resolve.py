"""From what is registered to what is there now: every tensor by its key, looked up anew each time (design D6, D7)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.catalogue import META
from ckptd_client import apart, beside, naming, optim, placing, rng, supported, tree, watch
from ckptd_client.entries import Entry, Extra, Mode, Owner, State
from ckptd_client.garbage import searched_later
from ckptd_client.quiet import NoCollectives
from ckptd_client.registry import Registry
from ckptd_client.rules import text_of

RULES_TOLD_MAX = 1000
GROUPS = "groups"  # object "<optimizer>.groups"
BESIDE = "more"  # object "<optimizer>.more": what its own state_dict() has beside state and groups
ODD = "state"  # object "<optimizer>.state": optimizer state that is not a tensor


@searched_later()
def tensors(registry: Registry, *, loading: bool = False) -> State:
    """Entries and aliases; ``loading``: of what a restore fills. Raises CkptdError naming what cannot be saved."""
    registry.look_again(loading=loading)
    for owner in registry.of_kind("module"):
        naming.reshard(owner.value)
    return _Resolver(registry).state


def objects(registry: Registry, state: State, step: int, meta: dict[str, Any]) -> None:
    """Encode everything that is not a tensor into ``state.objects``; tensors in it too large to inline become entries.

    Raises tree.ForeignType naming the path of a value that cannot be encoded.
    """
    first = len(state.entries)
    for owner in registry.owners.values():
        for name, value in _trees(owner, state):
            state.objects[name] = _encode(name, value, owner, state)
    if not registry.bare:
        state.objects[rng.NAME] = tree.encode(rng.capture(), rng.NAME)
    tensors = [(entry.key, entry.tensor) for entry in state.entries[first:]]
    tensors += [(owner.rename(owner.name), owner.value) for owner in registry.of_kind("tensor")]
    on_device = [key for key, tensor in tensors if tensor.device.type != "cpu"]
    told = {"step": step, "meta": meta, "contents": registry.contents(), "on_device": on_device}
    rules = {pattern: rule for owner in registry.owners.values() for pattern, rule in owner.rules.items()}
    if rules:
        told["rules"] = {pattern: text_of(rule) for pattern, rule in sorted(rules.items())[:RULES_TOLD_MAX]}
    state.objects[META] = tree.encode(told, META)


def whole(registry: Registry, state: State) -> State:
    """The same with its objects, as a capture would find it; ``state`` stays as it is. For predictions of size."""
    full = replace(state, entries=list(state.entries), objects={})
    objects(registry, full, 0, {})
    return full


def object_names(owner: Owner, state: State) -> list[str]:
    """The objects that a capture of this owner makes whatever its state (restore asks for these)."""
    if owner.kind == "optimizer":
        return [f"{owner.name}.{GROUPS}"]
    if owner.kind == "boxes":
        return [blob.key for blob in owner.value.blobs]
    return [owner.name] if owner.kind in ("stateful", "value") else [*state.extras.get(owner.name, {})]


def optional_names(owner: Owner) -> list[str]:
    """Objects that an optimizer has once it has something to put there."""
    return [f"{owner.name}.{ODD}", f"{owner.name}.{BESIDE}"] if owner.kind == "optimizer" else []


def reshards(owner: Owner | None) -> bool:
    """Has it a word in how its state is divided among another number of ranks? FSDP2's modules have a method of that name for
    something else."""
    return owner is not None and (owner.kind == "boxes" or (owner.kind == "stateful" and hasattr(owner.value, "reshard")))


def _trees(owner: Owner, state: State) -> Iterable[tuple[str, Any]]:
    for name, extra in state.extras.get(owner.name, {}).items():
        yield name, extra.get()
    if owner.kind == "optimizer":
        yield f"{owner.name}.{GROUPS}", optim.groups_tree(owner, state.groups[owner.name])
        if state.odd.get(owner.name):
            yield f"{owner.name}.{ODD}", state.odd[owner.name]
        if owner.name in state.beside:
            yield f"{owner.name}.{BESIDE}", state.beside[owner.name]
    elif owner.kind == "stateful":
        yield owner.name, saved(owner)
    elif owner.kind == "value":
        yield owner.name, owner.value
    elif owner.kind == "boxes":
        yield from ((blob.key, b"" if owner.value.loading else blob.get()) for blob in owner.value.blobs)


def saved(owner: Owner) -> Any:
    """Raises CkptdError that names it."""
    try:
        with NoCollectives(owner.name):
            return owner.value.state_dict()
    except CkptdError:
        raise
    except Exception as error:
        raise CkptdError(f"its state_dict() raised {type(error).__name__}: {error}", where=owner.name) from error


def _encode(name: str, value: Any, owner: Owner, state: State) -> bytes:
    def take(path: str, tensor: Tensor) -> str:
        state.entries.append(Entry(path, tensor.detach(), "extra", owner, Mode.SYNC))
        return path

    return tree.encode(value, name, take)


class _Resolver:
    def __init__(self, registry: Registry) -> None:
        self.state = State()
        self._seen: dict[int, Entry] = {}
        self._names: set[str] = set()
        self._bare = registry.bare
        self._optimizers = registry.of_kind("optimizer")
        self._stepped = {
            id(parameter)
            for owner in self._optimizers
            if not owner.unfenced
            for parameter in optim.parameters(owner)
        }
        for owner in registry.of_kind("module"):
            self._module(owner)
        for owner in registry.of_kind("tensor"):
            key = owner.rename(owner.name)
            placed = placing.of(key, owner, owner.value, None)
            entry = Entry(key, owner.value, "extra", owner, self._tensor_mode(owner), placed=placed)
            self.state.params.setdefault(id(owner.value), entry)
            self._add(entry)
            if apart.is_apart(owner.value):
                name = f"{owner.name}.{apart.FORMS}"
                self.state.extras[owner.name] = {name: apart.Forms(name, {entry.key: owner.value})}
        for owner in registry.of_kind("boxes"):
            self._boxes(owner)
        self.state.beside = beside.of_all(registry)
        for owner in self._optimizers:
            self.state.groups[owner.name] = optim.group_of_each(owner, self.state.params)
            entries, self.state.odd[owner.name] = optim.state_entries(owner, self.state.params)
            for entry in entries:
                self._add(entry)

    def _module(self, owner: Owner) -> None:
        spots, extras = naming.walk(owner.value)
        own: dict[str, Extra] = {**naming.named(owner, extras)}
        taken: dict[str, Tensor] = {}
        trained = any(id(spot.tensor) in self._stepped for spot in spots)
        for spot in spots:
            key = owner.rename(f"{owner.name}.{spot.name}")
            supported.check_made(key, spot.tensor)
            placed = placing.of(key, owner, spot.tensor, spot.copies) if owner.rules else None
            entry = Entry(key, spot.tensor, spot.role, owner, self._mode(owner, spot, key, trained), spot.copies, placed)
            if spot.role == "param":
                self.state.params.setdefault(id(spot.tensor), entry)
            if owner.takes(key):
                supported.check_stand_in(key, spot.tensor)
                self._add(entry)
                if apart.is_apart(spot.tensor):
                    taken[key] = spot.tensor
        if taken:
            name = f"{owner.name}.{apart.FORMS}"
            own[name] = apart.Forms(name, taken)
        self.state.extras[owner.name] = own

    def _mode(self, owner: Owner, spot: naming.Spot, key: str, trained: bool) -> Mode:
        if spot.role == "buffer" or owner.escapes(key) or naming.uncounted(spot.tensor):
            return Mode.SYNC
        if owner.fenced or id(spot.tensor) in self._stepped or _averaged(owner.value):
            return Mode.FENCED
        frozen = trained and not spot.tensor.requires_grad and not owner.thawed
        return Mode.STATIC if frozen else Mode.SYNC

    def _boxes(self, owner: Owner) -> None:
        """In the background only what an optimizer steps that the hook sees: anything else may be written at any time. What
        saving() is handed no fence waits for."""
        fenced = set() if self._bare else watch.storages()
        names: set[str] = set()
        for box, placed in owner.value.boxes:
            late = box.tensor.untyped_storage().data_ptr() in fenced and not owner.escapes(box.name)
            mode = Mode.FENCED if late and not naming.uncounted(box.tensor) else Mode.SYNC
            entry = Entry(box.name, box.tensor, box.kind, owner, mode, placed=placed)
            if box.name in self._names and box.name not in names:
                raise CkptdError("two tensors of one name", where=box.name, hint="a Box and something registered otherwise")
            names.add(box.name)
            self._names.add(box.name)
            self.state.entries.append(entry)

    def _tensor_mode(self, owner: Owner) -> Mode:
        if owner.escapes(owner.rename(owner.name)) or naming.uncounted(owner.value):
            return Mode.SYNC
        return Mode.FENCED if owner.fenced or id(owner.value) in self._stepped else Mode.SYNC

    def _add(self, entry: Entry) -> None:
        if apart.is_apart(entry.tensor):
            for name, part in apart.inner(entry.tensor):
                self._add(entry._replace(key=f"{entry.key}.{name}", tensor=part))
            return
        first = self._seen.setdefault(id(entry.tensor), entry)
        if first is not entry:
            self.state.aliases.append((entry.key, first.key))
            return
        if entry.key in self._names:
            raise CkptdError("two tensors of one name", where=entry.key, hint="rename one with key_map=")
        self._names.add(entry.key)
        self.state.entries.append(entry)


def _averaged(module: Any) -> bool:
    """AveragedModel.update_parameters is made to fence (fence.py); what a subclass has in its place is not."""
    averaged = torch.optim.swa_utils.AveragedModel
    return isinstance(module, averaged) and getattr(module.update_parameters, "__func__", None) is averaged.update_parameters
