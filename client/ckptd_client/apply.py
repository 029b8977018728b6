"""Non-tensor state back into the registered objects (design D11): decoded and checked first, set after the tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.grouped import grouped
from ckptd.core.state_map.catalogue import META
from ckptd_client import beside, nested, optim, pooled, reshaping, resolve, rng, tree, values
from ckptd_client.accelerator import of_all
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import Owner, State
from ckptd_client.load import Memory
from ckptd_client.registry import Registry
from ckptd_client.wants import UNREGISTERED, Wanted
from ckptd_client.world import World


@dataclass
class Restored:
    """What came back beside the registered objects: the snapshot's ``meta``, plain values as saved, and remarks."""

    meta: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Objects:
    """The decoded trees of one load plan. Raises CkptdError naming each object that cannot be used."""

    def __init__(
        self, registry: Registry, state: State, world: World, catalogue: Catalogue, wanted: Wanted,
        plan: Mapping[str, Any], memory: Memory,
    ) -> None:  # fmt: skip
        self._registry, self._state, self._world, self._catalogue = registry, state, world, catalogue
        self._wanted, self._plan, self._memory = wanted, plan, memory
        self.same_world = catalogue.world == world.size
        self.trees: dict[str, Any] = {}
        self._accelerator = of_all({entry.tensor.device for entry in state.entries})
        problems: list[str] = []
        for name, owner in self._named():
            try:
                self.trees[name] = self._untied(name, owner, self._decode(name, owner))
            except (ValueError, KeyError, TypeError, CkptdError) as error:
                problems.append(f"{name}: {error}")
        problems += self._check_groups() + self._check_values()
        filled = [f"{name}: another rank saved it whole, with values in it" for name in self._wanted.closed if self.trees.get(name)]
        (self._wanted.left_out if self._wanted.partial else problems).extend(filled)
        self._born = self._find_born(problems)
        if problems:
            raise CkptdError(
                "state cannot be restored: " + grouped(problems),
                hint="register and group them as they were when the snapshot was taken, or use only= or strict=False",
            )

    def _named(self) -> Iterator[tuple[str, Owner | None]]:
        """The one that tells of the others comes first."""
        wanted = set(self._wanted.objects)
        yield from ((name, None) for name in (META, rng.NAME) if name in wanted)
        for owner in self._registry.owners.values():
            own = [*resolve.object_names(owner, self._state), *resolve.optional_names(owner)]
            yield from ((name, owner) for name in own if name in wanted)
        yield from ((name, None) for name in (*self._wanted.born, *self._wanted.closed) if name in wanted)

    def _decode(self, name: str, owner: Owner | None) -> Any:
        """This rank's own value, the one of all ranks, or what the owner makes of all ranks' values."""
        everyone = self._plan.get("objects_all", {}).get(name)
        if everyone and self._catalogue.is_per_rank("o", name):
            own = self._world.rank if self.same_world else -1  # its own comes first, and counts
            ranks = sorted(everyone, key=lambda rank: (rank != own, rank))
            states = [tree.decode(self._memory.blob(everyone[rank]), self._find) for rank in ranks]
            if name.endswith("." + resolve.GROUPS) and owner is not None and owner.kind == "optimizer":
                return optim.merge_groups(states, own_first=self.same_world)
            if name.endswith("." + resolve.ODD) and owner is not None and owner.kind == "optimizer":
                return optim.merge_odd(states, own_first=self.same_world)
            if name == rng.NAME and not self.same_world:
                return {"seed": states[0]["seed"], "alike": rng.alike(states)}
            if not self.same_world:
                return self._divided(owner, name, dict(zip(ranks, states, strict=True))) if owner is not None else states[0]
        place = self._plan.get("objects", {}).get(name)
        if place is None:
            raise CkptdError("the daemon did not bring it", where=name)
        blob = self._memory.blob(place)
        if not self.same_world and owner is not None and resolve.reshards(owner):  # all had the same: nothing was brought twice
            return self._divided(owner, name, {rank: tree.decode(blob, self._find) for rank in self._catalogue.ranks_of(name)})
        return tree.decode(blob, self._find)

    def _divided(self, owner: Owner, name: str, states: dict[int, Any]) -> Any:
        """``states``: by the ranks that saved them."""
        if owner.kind == "boxes":
            return states if owner.value.is_per_rank(name) else next(iter(states.values()))
        return owner.value.reshard(list(states.values()), self._world.rank, self._world.size)

    def _untied(self, name: str, owner: Owner | None, tree_: Any) -> Any:
        """What was saved for a parameter counts for all that were tied to it then."""
        if owner is None or owner.kind != "optimizer" or name.endswith("." + resolve.BESIDE):
            return tree_
        of = tree_["of"] if name.endswith("." + resolve.GROUPS) else tree_
        of |= {alias: of[key] for alias, key in self._catalogue.aliases.items() if key in of and alias not in of}
        return tree_

    def _find(self, key: str) -> Tensor:
        """What lay on a device is brought to that of this rank's tensors."""
        found = self._wanted.inside[key]
        if self._accelerator is not None and key in self._told().get("on_device", ()):
            found = self._wanted.inside[key] = found.to(self._accelerator.device)
        return found

    def _told(self) -> dict[str, Any]:
        found = self.trees.get(META)
        return found if isinstance(found, dict) else {}

    def _check_groups(self) -> list[str]:
        problems: list[str] = []
        others: list[str] = []
        for owner in self._registry.of_kind("optimizer"):
            groups = self.trees.get(f"{owner.name}.{resolve.GROUPS}")
            if groups is not None:
                here = optim.keys_of_groups(owner, self._state.params)
                problems += optim.check_groups(owner, here, groups)
                others += optim.other_kinds(owner, here, groups)
        if self._wanted.strict:
            return problems + [f"{text}; strict=False takes state and options as they are" for text in others]
        self._wanted.left_out += problems  # these groups keep what they have
        self._wanted.warnings += [f"{text}; state and options were taken as they are" for text in others]
        return []

    def _check_values(self) -> list[str]:
        found = ((owner, self.trees[owner.name]) for owner in self._registry.of_kind("value") if owner.name in self.trees)
        return [
            f"{owner.name}: a {type(saved).__name__} was saved, the registered {type(owner.value).__name__} cannot take it back"
            for owner, saved in found
            if not values.fits(owner, saved)
        ]

    def _find_born(self, problems: list[str]) -> list[tuple[str, Any, Any]]:
        """(name, container, key) of what the snapshot says that a restore can make. Objects with a state_dict() it cannot."""
        known = self._told().get("contents", {})
        containers = self._registry.containers()
        found: list[tuple[str, Any, Any]] = []
        for name, within in self._wanted.born.items():
            keys = [key for key in known.get(within, []) if f"{within}.{key}" == name]
            container = containers[within]
            if keys and (isinstance(container, dict) or keys[0] >= len(container)):
                found.append((name, container, keys[0]))
            else:
                (self._wanted.left_out if self._wanted.partial else problems).append(f"{name}: {UNREGISTERED}")
        return sorted(found, key=lambda item: (id(item[1]), item[2] if isinstance(item[1], list) else 0))

    # --- setting ------------------------------------------------------------------------------------------------
    def apply(self, step: int) -> Restored:
        """After the tensors are written."""
        result = Restored()
        pooled.give(self._wanted.pooled, self._world.rank)
        for behind in self._wanted.padding:
            behind.zero_()
        reshaping.give_back(self._wanted.reshaped)
        for owner in self._registry.of_kind("optimizer"):
            beside.give_back(owner.name, owner.value, self.trees.get(f"{owner.name}.{resolve.BESIDE}", {}))
        self._set_states()
        for parameter, gradient in self._wanted.gradients:
            parameter.grad = gradient
        self._drop_gradients()
        for owner in self._registry.owners.values():
            self._set_owner(owner, result)
        self._take_out(result)
        for name, container, key in self._born:
            made = self._find(name) if name in self._wanted.inside else self.trees[name]
            if isinstance(container, list):
                container.append(made)
            else:
                container[key] = made
            result.notes.append(f"{name}: was not there yet, put into the registered {type(container).__name__}")
        result.meta = self._told().get("meta", {})
        self._set_rng(step, result)
        return result

    def _set_states(self) -> None:
        strict = self._wanted.strict
        for new in self._wanted.states:
            odd = self.trees.get(f"{new.owner.name}.{resolve.ODD}", {}).get(optim.odd_key(new.holder.label, new.key), {})
            tensors = dict(new.tensors)
            state = {name: optim.flesh(bones, tensors, new.parameter) for name, bones in odd.items()} | tensors
            of_all = new.holder.optimizer.state
            if state:
                if strict and new.parameter in of_all:
                    of_all[new.parameter].clear()
                of_all[new.parameter].update(state)
            elif strict:
                of_all.pop(new.parameter, None)  # the snapshot is older than this state

    def _take_out(self, result: Restored) -> None:
        places = [(owner.name, *owner.place) for owner in self._wanted.gone if owner.place is not None]
        for name, container, key in sorted(places, key=lambda place: place[2] if isinstance(place[1], list) else 0, reverse=True):
            del container[key]
            result.notes.append(f"{name}: was not there yet, taken out of the registered {type(container).__name__}")

    def _drop_gradients(self) -> None:
        """Left by a step that was not made: no snapshot holds them, and the next backward pass would add to them. A device's are
        zeroed where they lie, for a graph may write there."""
        for entry in self._state.params.values():
            left = entry.tensor.grad if entry.tensor.is_leaf else None
            if left is None or entry.owner.gradients or entry.owner.name not in self._wanted.filled:
                continue
            if left.is_cpu:
                entry.tensor.grad = None
            else:
                left.zero_()

    def _set_owner(self, owner: Owner, result: Restored) -> None:
        for name, extra in self._state.extras.get(owner.name, {}).items():
            if name in self.trees:
                extra.set(self.trees[name])
        if owner.kind == "module" and owner.name in self._wanted.filled:
            reshaping.make_anew(owner.value)
        if owner.kind == "optimizer":
            groups = self.trees.get(f"{owner.name}.{resolve.GROUPS}")
            if groups is not None:
                optim.apply_groups(owner, self._state.params, groups, _write)
            odd = self.trees.get(f"{owner.name}.{resolve.ODD}", {})
            for label, optimizer in nested.names(owner.value):
                optimizer.state.update(odd.get(label and f":{label}", {}))
            optim.tie(owner, self._state.params, odd)
        elif owner.kind == "boxes":
            owner.value.give_back({blob.key: self.trees[blob.key] for blob in owner.value.blobs if blob.key in self.trees})
        elif owner.name in self.trees:
            self._set_value(owner, self.trees[owner.name], result)

    def _set_value(self, owner: Owner, value: Any, result: Restored) -> None:
        if owner.kind == "stateful":
            try:
                owner.value.load_state_dict(value)
            except Exception as error:
                text = f"its load_state_dict() raised {type(error).__name__}: {error}"
                raise CkptdError(text, where=owner.name) from error
            return
        result.values[owner.name] = value
        values.give_back(owner, value)

    def _set_rng(self, step: int, result: Restored) -> None:
        state = self.trees.get(rng.NAME)
        if state is None:
            return
        if self.same_world:
            rng.restore(state)
        else:
            rng.reseed(state["seed"], step, self._world.rank)
            alike = state["alike"] if "alike" in state else rng.alike([state] * min(self._catalogue.world, 2))
            rng.restore(alike)
            saved, but = self._catalogue.world, f", but {', '.join(sorted(alike))}, which were the same on all" if alike else ""
            result.notes.append(
                f"random generators were reseeded from (seed, step, rank){but}: {saved} ranks saved, {self._world.size} restore"
            )


def _write(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
