"""From what is registered and what a snapshot holds to what this rank wants back (design D7, D11).

Every mismatch is collected and named before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgpack
import torch
from torch import Tensor

from ckptd.core.protocol.machine.waiting import shown
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.catalogue import META
from ckptd_client import (
    apart,
    dtypes,
    gradients,
    modules,
    nested,
    optim,
    pooled,
    reshaping,
    resolve,
    rng,
    tree,
)
from ckptd_client.catalogue import Catalogue
from ckptd_client.claims import family_of
from ckptd_client.entries import Entry, Mode, Owner, State
from ckptd_client.naming import local_of
from ckptd_client.nested import Holder
from ckptd_client.pooled import Pooled
from ckptd_client.registry import FILLED, Registry
from ckptd_client.rules import Own
from ckptd_client.slices import Slice, slices_of, whole_of
from ckptd_client.world import World

ALWAYS = frozenset({rng.NAME, META})
UNREGISTERED = "in the snapshot, but nobody registered it"
FORGOTTEN = "in the snapshot, saved by this rank, but not registered on it now"
OF_MODULES = (modules.EXTRA, modules.SAVED, apart.FORMS)  # last parts of the names of their objects


class Target(NamedTuple):
    """A box wanted back, and where it goes. ``check``: it must equal this other tensor (two values for a tied one). ``rank``: whose
    value it is; None: everybody's, or this rank's own."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    dest: Tensor
    check: Tensor | None = None
    rank: int | None = None


@dataclass
class NewState:
    """What an optimizer will hold for one parameter: tensors by path, in place or newly made."""

    owner: Owner
    holder: Holder
    parameter: Tensor
    key: str  # the parameter's
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Wanted:
    targets: list[Target] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    states: list[NewState] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # of parameters
    inside: dict[str, Tensor] = field(default_factory=dict)  # tensors inside of objects, by key
    reshaped: list[reshaping.Reshaped] = field(default_factory=list)  # tensors of modules that take another shape
    born: dict[str, str] = field(default_factory=dict)  # what came into a registered dict or list later, and its name
    gone: list[Owner] = field(default_factory=list)  # what is there now, came into such a one later, and was not saved
    closed: list[str] = field(default_factory=list)  # dicts and lists that held no object elsewhere: nothing may be in them
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # problems that strict=False passes over, or only=
    partial: bool = False  # nobody asked for all of the snapshot
    strict: bool = True
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # of what was restored, and may not be what the program takes it for
    filled: set[str] = field(default_factory=set)  # names of owners some of whose tensors are wanted
    padding: list[Tensor] = field(default_factory=list)  # behind logical tensors: zero
    pooled: list[Pooled] = field(default_factory=list)  # each rank's own values, of which one is made
    first: int = 0  # so many targets are no registered tensors: compared with others, or inside of objects

    def encode(self) -> bytes:
        rows = [(key, dtype, shape, *box) for key, dtype, shape, box, *_ in self.targets]
        ranks = {at: target.rank for at, target in enumerate(self.targets) if target.rank is not None}
        body = {"tensors": rows, "objects": self.objects, "first": self.first} | ({"ranks": ranks} if ranks else {})
        packed: bytes = msgpack.packb(body)
        return packed

    def order(self) -> None:
        """The targets that are no registered tensors before all others."""
        inside = {id(tensor) for tensor in self.inside.values()}
        inside.update(id(value) for one in self.pooled for value in one.values)
        aside = [t for t in self.targets if t.check is not None or id(t.dest) in inside]
        if aside:
            self.targets = aside + [t for t in self.targets if t.check is None and id(t.dest) not in inside]
        self.first = len(aside)


def wanted(
    registry: Registry,
    state: State,
    catalogue: Catalogue,
    world: World,
    only: Callable[[str], bool] | None,
    strict: bool,
    rules: Mapping[str, Own],
) -> Wanted:
    """``only``: which keys and objects to restore; None: all, and then nothing in the snapshot may be left over. ``rules``: what
    becomes of values that each rank had for itself."""
    return _Matcher(registry, state, catalogue, world, only, strict, rules).result


class _Matcher:
    def __init__(
        self, registry: Registry, state: State, catalogue: Catalogue, world: World, only: Callable[[str], bool] | None,
        strict: bool, rules: Mapping[str, Own],
    ) -> None:  # fmt: skip
        self._registry, self._state, self._catalogue, self._world = registry, state, catalogue, world
        self._rules = rules
        self._only = only or (lambda key: True)
        self._containers = registry.containers()
        self.result = Wanted(partial=only is not None or not strict, strict=strict)
        self._known = {id(entry.tensor): parts for entry, parts in zip(state.entries, state.slices, strict=False)}
        self._references: dict[str, list[str]] = {}  # tensors inside of objects, by the object
        for key in catalogue.tensors:
            if tree.REF_MARK in key:
                self._references.setdefault(key.rpartition(tree.REF_MARK)[0], []).append(key)
        self._claimed: set[str] = set()
        # Optimizer state that is born here: by its key in the snapshot, device, and parameter where each has its own.
        self._made: dict[tuple[str, torch.device, str], Tensor] = {}
        self._untied: set[str] = set()  # parameters that were saved under the name of another one
        self._tensors()
        self._tied()
        self._gradients()
        self._optimizers()
        self._objects()
        self._born()
        if only is None:
            self._leftover()
        self.result.order()
        if not strict:
            self.result.left_out, self.result.problems = self.result.problems, []

    # --- tensors ------------------------------------------------------------------------------------------------
    def _tensors(self) -> None:
        for entry in self._state.entries:
            if entry.is_born and self._only(entry.key):
                source = self._source(entry.key)
                if source is None:
                    self._missing(entry.owner, entry.key)
                elif not self._reshape(entry, source):
                    self._fill(entry, source)

    def _missing(self, owner: Owner | None, name: str) -> None:
        """What came into a registered dict or list since goes again: the process has gone on from the snapshot."""
        if owner is None or not owner.late or not owner.replaceable or owner.kind not in FILLED:
            self._problem(f"{name}: not in the snapshot")
        elif owner not in self.result.gone:
            self.result.gone.append(owner)

    def _reshape(self, entry: Entry, source: str) -> bool:
        """Of another shape than here, in a module that takes that."""
        dtype, shape, _ = self._catalogue.tensors[source]
        if shape == entry.tensor.shape or entry.owner.kind != "module" or entry.placed is not None:
            return False
        saved = torch.empty(shape, dtype=dtypes.TORCH[dtype], device="cpu")
        place = reshaping.place(entry.owner.value, entry.tensor, saved)
        if place is None:
            return False
        self._inside(source, dtype, shape)
        if source in self.result.inside:
            self.result.reshaped.append(reshaping.Reshaped(entry.key, *place, self.result.inside[source]))
        return True

    def _gradients(self) -> None:
        """Those that were not saved are dropped."""
        for entry in gradients.parameters(self._state):
            if not self._only(entry.key):
                continue
            key = gradients.key_of(entry)
            tensor = None
            if key in self._catalogue.tensors:
                dtype = dtypes.TORCH[self._catalogue.tensors[key][0]]
                tensor = torch.empty_like(entry.tensor.detach(), dtype=dtype)
                self._fill(Entry(key, tensor, "extra", entry.owner, Mode.SYNC, placed=entry.placed), key)
            self.result.gradients.append((entry.tensor, tensor))

    def _source(self, key: str) -> str | None:
        """Also under the names that this tensor has here because it is tied."""
        found = self._catalogue.source_of(key)
        if found is not None:
            return found
        tied = (alias for alias, canonical in self._state.aliases if canonical == key)
        return next((source for alias in tied if (source := self._catalogue.source_of(alias))), None)

    def _fill(self, entry: Entry, source: str) -> bool:
        self._claimed.add(source)
        self.result.filled.add(entry.owner.name)
        parts = self._slices(entry)
        local = local_of(entry.tensor)
        dtype, shape, _ = self._catalogue.tensors[source]
        if parts:
            mine = parts[0].dtype, parts[0].shape
        else:
            mine = dtypes.name_of(entry.tensor.dtype, entry.key), tuple(entry.tensor.shape)
        if mine != (dtype, shape):
            self._problem(f"{entry.key}: {mine[0]}{list(mine[1])} here, {dtype}{list(shape)} in the snapshot")
            return False
        if local.is_meta:
            self._problem(f"{entry.key}: still on the meta device; materialise it first (to_empty)")
            return False
        if self._other_world("t", source):
            return self._pool(entry, source, parts, local)
        self.result.targets += [
            Target(source, dtype, shape, part.box, part.view(local)) for part in parts if 0 not in part.box.sizes
        ]
        if entry.placed is not None:
            self.result.padding += [local.narrow(*where) for where in entry.placed.padding]
        return True

    def _pool(self, entry: Entry, source: str, parts: Sequence[Slice], local: Tensor) -> bool:
        """All ranks' own values, of which a rule makes one."""
        dtype, shape, _ = self._catalogue.tensors[source]
        rule, whole = pooled.rule_for((entry.key, source), entry.owner, self._rules), Box.whole(shape)
        if rule is None:
            self._problem(f"{entry.key}: {self._per_rank_text()}, or say what becomes of them: {pooled.REMEDY}")
            return False
        here = len(parts) == 1 and parts[0].box == whole
        alike = not self._world.of_others(family_of(entry.key))
        why = pooled.cannot(rule.how, entry.tensor.dtype, self._catalogue, source, here=here, alike=alike)
        if why:
            self._problem(f"{entry.key}: {why}")
            return False
        owners, like = self._catalogue.owners_of(source), torch.empty(shape, dtype=dtypes.TORCH[dtype], device="cpu")
        self.result.pooled.append(made := Pooled.of(entry.key, rule.how, owners, like, parts[0].view(local)))
        for rank, value in zip(owners if whole.volume else (), made.values, strict=False):
            self.result.targets.append(Target(source, dtype, shape, whole, value, rank=rank))
        return True

    def _fits_as_made(self, owner: Owner, source: str, tensor: Tensor) -> bool:
        """A plain tensor that was made for this source, like a parameter that was looked at: there is nothing to be found out."""
        if tensor.is_meta or self._other_world("t", source):
            return False
        self._claimed.add(source)
        self.result.filled.add(owner.name)
        dtype, shape, _ = self._catalogue.tensors[source]
        if 0 not in shape:
            self.result.targets.append(Target(source, dtype, shape, whole_of(shape)[1], tensor))
        return True

    def _slices(self, entry: Entry) -> list[Slice]:
        """Known to the prediction, but of what is born here."""
        found = self._known.get(id(entry.tensor)) if entry.placed is None else None
        return slices_of(entry, self._world) if found is None else found

    def _tied(self) -> None:
        """Two different saved tensors for one tied here: allowed only if they hold the same values."""
        entries = {entry.key: entry for entry in self._state.entries if self._state.aliases}
        for alias, canonical in self._state.aliases:
            entry, second = entries.get(canonical), self._catalogue.source_of(alias)
            if entry is None or second is None or not self._only(alias):
                continue
            self._claimed.add(second)
            if second == self._source(canonical) or self._catalogue.tensors[second][:2] != (
                dtypes.NAME[entry.tensor.dtype], tuple(entry.tensor.shape)
            ):  # fmt: skip
                continue
            local = local_of(entry.tensor)
            for part in self._slices(entry):
                if part.box.volume:
                    self._compare(part, part.view(local), [self._source(canonical), second])

    def _compare(self, part: Slice, tensor: Tensor, sources: list[str | None]) -> None:
        for source in sources:
            if source is not None:
                aside = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
                self.result.targets.append(Target(source, part.dtype, part.shape, part.box, aside, tensor))

    # --- optimizers ---------------------------------------------------------------------------------------------
    def _optimizers(self) -> None:
        owners = self._registry.of_kind("optimizer")
        here = {entry.key: entry.key for entry in self._state.params.values()}
        here.update({alias: canonical for alias, canonical in self._state.aliases if canonical in here})
        by_owner = self._saved_by({owner.name for owner in owners})
        for owner in owners:
            saved, held = self._saved_state(owner, by_owner[owner.name], here), nested.holders(owner.value)
            for parameter in optim.parameters(owner):
                key = optim.key_of(owner, parameter, self._state.params)
                if not self._only(f"{owner.name}.{key}."):
                    continue
                holders = held.pop(id(parameter), ())
                labels = [holder.label for holder in holders]
                for holder in holders:
                    own = optim.of_label(saved.get(key, {}), holder.label, labels)
                    self._state_of(owner, holder, parameter, key, own)

    def _saved_by(self, names: set[str]) -> dict[str, list[tuple[str, str]]]:
        """What each of these optimizers has saved: names, and the keys in the snapshot."""
        found: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
        tensors, longest = self._catalogue.tensors, max(map(len, names), default=0)
        own = ((key, key) for key, (_, _, role) in tensors.items() if role == "optim")
        shared = ((key, source) for key, source in self._catalogue.aliases.items() if source in tensors)
        for key, source in chain(own, shared):
            end = key.find(".")
            while 0 < end <= longest:
                if key[:end] in found:
                    found[key[:end]].append((key, source))
                end = key.find(".", end + 1)
        return found

    def _saved_state(
        self, owner: Owner, saved: list[tuple[str, str]], here: dict[str, str]
    ) -> dict[str, dict[str, str]]:
        """parameter key (as it is called here) -> {path: key in the snapshot}. What parameters share (a quantiser's table) was
        saved once, under the name of the first. ``saved``: the owner's, as ``_saved_by`` has it. ``here``: the keys of all
        parameters, by all of their names."""
        heads: dict[str, dict[str, str]] = {}  # the same by its name when it was saved
        start = len(owner.name) + 1
        for key, source in saved:
            end = key.rfind(".")
            while end > start:
                head = key[start:end]
                if head in here:
                    heads.setdefault(head, {})[key[end + 1 :]] = source
                    break
                end = key.rfind(".", start, end)
        return self._of_tied(owner, heads, here)

    def _of_tied(self, owner: Owner, heads: dict[str, dict[str, str]], here: dict[str, str]) -> dict[str, dict[str, str]]:
        """What was saved for one parameter is of all that are untied here; of those that are tied here one may have state."""
        found: dict[str, dict[str, str]] = {}
        for head in sorted(heads, key=lambda head: head != here[head]):
            key = here[head]
            if key not in found:
                found[key] = heads[head]
                continue
            self._claimed.update(heads[head].values())
            self._problem(f"{owner.name}: {key} is tied to {head} here, and each was saved with a state of its own")
        for key, other in self._catalogue.aliases.items():
            if here.get(key) == key and key not in found and other in found:
                found[key] = found[other]
                self._untied.add(key)
        return found

    def _state_of(self, owner: Owner, holder: Holder, parameter: Tensor, key: str, saved: Mapping[str, str]) -> None:
        new, like = NewState(owner, holder, parameter, key), self._state.params[id(parameter)]
        existing = holder.optimizer.state.get(parameter) or {}
        present = {
            path: leaf
            for name, value in existing.items()
            for path, leaf in optim.tensor_leaves(str(name), value)
            if isinstance(value, Tensor) or self._is_like(leaf, saved.get(path))  # lists are made anew, as long as they were
        }
        for path in present if saved else ():
            if path not in saved:
                self._problem(f"{owner.name}.{key}.{path}: not in the snapshot")
        for path, source in saved.items():
            tensor = present.get(path)
            if tensor is None:
                made = (source, parameter.device, key if key in self._untied else "")
                if made in self._made:
                    new.tensors[path] = self._made[made]  # shared with another parameter, as it was
                    continue
                dtype, shape, _ = self._catalogue.tensors[source]
                here = parameter.shape if like.placed is not None and shape == like.placed.shape else shape
                tensor = self._made[made] = optim.empty_state(path, parameter, holder.group, here, dtypes.TORCH[dtype])
                known = type(tensor) is Tensor and id(parameter) in self._known and like.placed is None
                if known and self._fits_as_made(owner, source, tensor):
                    new.tensors[path] = tensor
                    continue
            copies = None if type(tensor) is not type(parameter) and tensor.ndim else like.copies
            entry = Entry(f"{owner.name}.{key}.{path}", tensor, "optim", owner, Mode.FENCED, copies, like.placed_like(tensor))
            if self._fill(entry, source):
                new.tensors[path] = tensor
        self.result.states.append(new)

    def _is_like(self, tensor: Tensor, source: str | None) -> bool:
        return source is not None and self._catalogue.tensors[source][:2] == (dtypes.NAME.get(tensor.dtype), tuple(tensor.shape))

    # --- everything else ----------------------------------------------------------------------------------------
    def _objects(self) -> None:
        for owner in self._registry.owners.values():
            for name in resolve.object_names(owner, self._state):
                if self._only(name):
                    self._object(owner, name)
            for name in resolve.optional_names(owner):
                if name in self._catalogue.objects and self._only(name):
                    self._object(owner, name)
        for name in ALWAYS & self._catalogue.objects.keys():
            if name == META or (self._only(name) and not self._registry.bare):
                self.result.objects.append(name)

    def _object(self, owner: Owner | None, name: str) -> None:
        """``owner`` None: what came into its container later."""
        if name not in self._catalogue.objects:
            if name not in self._containers or not self._below(name):  # it held live objects when it was saved
                self._missing(owner, name)
            return
        self._claimed.add(name)
        mergeable = owner is not None and owner.kind == "optimizer" and not name.endswith(f".{resolve.BESIDE}")
        if not mergeable and self._other_world("o", name) and not resolve.reshards(owner):
            self._problem(f"{name}: {self._per_rank_text()}, or give it reshard(states, rank, world)")
            return
        self.result.objects.append(name)
        for key in self._references.get(name, ()):
            dtype, shape, _ = self._catalogue.tensors[key]
            self._inside(key, dtype, shape)

    def _inside(self, key: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._claimed.add(key)
        if self._other_world("t", key):
            self._problem(f"{key}: {self._per_rank_text()}")
            return
        tensor = self.result.inside[key] = torch.empty(shape, dtype=dtypes.TORCH[dtype], device="cpu")
        if tensor.numel():
            self.result.targets.append(Target(key, dtype, shape, Box.whole(shape), tensor))

    def _below(self, name: str) -> bool:
        """Was it opened when it was saved?"""
        return any(key.startswith(f"{name}.") for key in (*self._catalogue.tensors, *self._catalogue.objects))

    def _born(self) -> None:
        """Of what is left over: whatever lies in a container that is registered here, and is no other rank's as far as we know (its
        tensors would be fetched to no end)."""
        for name in filter(self._only, self._left_over()):
            above = [container for container in self._containers if name.startswith(f"{container}.")]
            dtype, shape, role = self._catalogue.tensors.get(name, ("", (), "extra"))
            if not above or role != "extra" or tree.REF_MARK in name or self._world.of_others(family_of(name)):
                continue
            if name in self._catalogue.tensors:
                self._inside(name, dtype, shape)
            else:
                self._object(None, name)
            self.result.born[name] = max(above, key=len)
        if self.result.born and META not in self.result.objects:
            self.result.objects.append(META)

    def _leftover(self) -> None:
        """What another rank registered and this one did not (another stage, an average on rank 0) is for that one to miss, unless
        this rank is known to have saved it."""
        others = []
        for name in self._left_over():
            if name in self._containers and self._below(name) and not self._catalogue.is_per_rank("o", name):
                self.result.closed.append(name)
                self.result.objects.append(name)
            elif not self._world.of_others(family_of(name)):
                self._problem(f"{name}: {UNREGISTERED}")
            elif self._had(name):
                self._problem(f"{name}: {FORGOTTEN}")
            else:
                others.append(name)
        if others:
            self.result.notes.append(f"{shown(others)}: in the snapshot, not registered on this rank, left to others")

    def _had(self, name: str) -> bool:
        """Objects have ranks, and each optimizer has one, its groups. What belongs to modules may have moved to another stage."""
        if name.rpartition(".")[2] in OF_MODULES:
            return False
        rank = self._world.rank if self._catalogue.world == self._world.size else None
        owners = (name.partition(tree.REF_MARK)[0], *(f"{above}.{resolve.GROUPS}" for above in _above(name)))
        return any(owner not in self._claimed and self._catalogue.saved_by(owner, rank) for owner in owners)

    def _left_over(self) -> list[str]:
        saved = [*self._catalogue.tensors, *(self._catalogue.objects.keys() - ALWAYS)]
        excluded = [owner for owner in self._registry.owners.values() if owner.include or owner.exclude]
        return sorted(
            name
            for name in saved
            if name not in self._claimed
            and not any(name.startswith(owner.name + ".") and not owner.takes(name) for owner in excluded)
        )

    def _other_world(self, kind: str, name: str) -> bool:
        return self._catalogue.world != self._world.size and self._catalogue.is_per_rank(kind, name)

    def _per_rank_text(self) -> str:
        return f"its value was each rank's own; restore it into {self._catalogue.world} ranks"

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)


def _above(name: str) -> list[str]:
    """All that a name begins with, up to a dot."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
