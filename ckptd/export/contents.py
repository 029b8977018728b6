"""What a checkpoint holds, by owner: modules under the names of their own state_dict(), optimizers, everything else."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.catalogue import META
from ckptd.core.state_map.dtypes import FLOATS
from ckptd.export.selection import Selection
from ckptd.export.source import Source
from ckptd.export.stored import Stored
from ckptd.export.values import plain

MODEL = "model"
IN_AN_OBJECT = "#"  # in the key of a tensor that belongs to an object
OF_A_MODULE = ("param", "buffer")
# Objects beside tensors: what follows the last dot of their names (docs/FORMAT.md section 6).
EXTRA_STATE, SAVED_STATE, SUBCLASSES = "_extra_state", "_saved_state", "subclasses"
GROUPS, ODD = "groups", "state"


class PerRank(dict[int, Any]):
    """rank -> what it had for itself."""


class Contents:
    """``tensors``, by key, aliases among them; ``params``: keys of parameters, whether selected or not; ``roles``; ``objects``:
    their names. ``notes``: what is not as a reader might think."""

    def __init__(self, checkpoint: Source, selection: Selection) -> None:
        self.checkpoint, self.selection = checkpoint, selection
        self.notes = checkpoint.notes
        self._decoded: dict[str, Any] = {}
        self.roles: dict[str, str] = {}
        self._all = self._tensors()
        self.params = {key for key, role in self.roles.items() if role == "param"}
        names = sorted(checkpoint.objects)
        selection.check([*self._all, *names], [self.name_of(key)[1] for key in self._all if self.roles[key] in OF_A_MODULE])
        self.tensors = {key: stored for key, stored in self._all.items() if selection.only(key)}
        self.objects = [name for name in names if selection.only(name) and name != META]

    # --- tensors ------------------------------------------------------------------------------------------------
    def _tensors(self) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        own: dict[str, int] = {}
        partial: list[str] = []
        for tensor in self.checkpoint.tensors():
            self.roles[tensor.key] = tensor.role
            if not tensor.whole:
                partial.append(tensor.key)
                continue
            if tensor.rank is not None:
                own[tensor.key] = tensor.rank
            to = self._dtype_of(tensor.dtype, tensor.role)
            found[tensor.key] = Stored(tensor.key, tensor.dtype, tensor.shape, to, tensor.rank)
        for alias, key in self.checkpoint.aliases.items():
            if key in found:
                found[alias], self.roles[alias] = found[key], self.roles[key]
        self._say("differ between ranks, and are those of the first that has all of it", own)
        self._say("are left out: each rank has a part of its own", partial)
        return found

    def _say(self, what: str, keys: Iterable[str]) -> None:
        if named := sorted(keys):
            self.notes.append(f"{len(named)} tensors {what}: {', '.join(named[:5])}{', ...' if named[5:] else ''}")

    def _dtype_of(self, dtype: str, role: str) -> str:
        wanted = self.selection.dtype
        return wanted if wanted is not None and role in OF_A_MODULE and dtype in FLOATS else dtype

    def owner_of(self, key: str) -> str:
        """What was registered: the first part of the key, or what lies in a registered dict or list of that name."""
        contents = self.meta.get("contents") or {}
        owner, _, rest = key.partition(".")
        while owner in contents and rest:
            part, _, rest = rest.partition(".")
            owner = f"{owner}.{part}"
        return owner

    def name_of(self, key: str) -> tuple[str, str]:
        """(its owner, its name in that owner's state_dict()): the owner's prefix is taken off once."""
        owner = self.owner_of(key)
        return owner, key[len(owner) + 1 :]

    @cached_property
    def modules(self) -> dict[str, dict[str, Any]]:
        """Owner -> name, renamed -> Stored, or what the module's own saving adds to its state_dict()."""
        found: dict[str, dict[str, Any]] = {self.owner_of(key): {} for key in self.tensors if key in self.params}
        for key, stored in self.tensors.items():
            owner, name = self.name_of(key)
            if self.roles[key] in OF_A_MODULE and owner in found:
                self._add(found[owner], name, stored)
        for full in self.objects:
            owner, name = self.name_of(full)
            path, dot, last = name.rpartition(".")
            if owner in found and last == EXTRA_STATE:
                self._add(found[owner], name, self.object(full))
            elif owner in found and last == SAVED_STATE:
                self._add_saved(found[owner], path + dot, full)
            elif owner in found and last == SUBCLASSES:
                self.notes.append(f"{owner}: tensors that wrap others are exported as what they wrap ({full})")
        return found

    def _add_saved(self, entries: dict[str, Any], prefix: str, name: str) -> None:
        saved = self.object(name)
        if isinstance(saved, PerRank):
            self.notes.append(f"{name}: of rank {next(iter(saved))}, as each rank has its own")
            saved = next(iter(saved.values()))
        for key, item in saved.items():
            self._add(entries, prefix + key, item)

    def _add(self, entries: dict[str, Any], name: str, value: Any) -> None:
        renamed = self.selection.prefixes.rename(name)
        if renamed in entries:
            raise CkptdError(f"two entries would be {renamed}", where="--prefix-map")
        entries[renamed] = value

    def model(self) -> tuple[str, dict[str, Any]]:
        """(owner, its entries) of the one module there is, or of several the one that is called so. Raises CkptdError."""
        found = self.modules
        if MODEL in found or len(found) == 1:
            owner = MODEL if MODEL in found else next(iter(found))
            return owner, found[owner]
        what = f"several modules: {', '.join(sorted(found))}" if found else "no parameters in what is selected"
        hint = "choose one with --only NAME.*" if found else "--only takes patterns of whole keys: model.*"
        raise CkptdError(what, where=self.checkpoint.where, hint=hint)

    # --- objects ------------------------------------------------------------------------------------------------
    @property
    def meta(self) -> dict[str, Any]:
        found = self.object(META)
        return found if isinstance(found, dict) and not isinstance(found, PerRank) else {}

    def object(self, name: str) -> Any:
        """As plain values, in which a tensor that is stored as such is a Stored. None: there is none of that name."""
        if name not in self._decoded:
            self._decoded[name] = self._decode(name)
        return self._decoded[name]

    def _decode(self, name: str) -> Any:
        blobs = self.checkpoint.blobs(name) if name in self.checkpoint.objects else None
        if not isinstance(blobs, dict):
            return plain(blobs, name, self._find) if blobs is not None else None
        values = {blob: plain(blob, name, self._find) for blob in {*blobs.values()}}
        return PerRank((rank, values[blob]) for rank, blob in sorted(blobs.items()))

    def _find(self, key: str) -> Stored:
        if key not in self._all:
            raise ValueError(f"the tensor {key} is not in the checkpoint")
        return self._all[key]

    def extras(self) -> dict[str, Any]:
        """What belongs to no module and no optimizer, by name; registered tensors among it."""
        found = {name: self.object(name) for name in self.objects if not self._is_anothers(name)}
        inside = {stored.key for value in found.values() for stored in leaves(value)}
        for key, stored in self.tensors.items():
            of_a_module = self.roles[key] in OF_A_MODULE and self.owner_of(key) in self.modules
            if not of_a_module and self.roles[key] != "optim" and IN_AN_OBJECT not in key and key not in inside:
                found[key] = stored
        return found

    def _is_anothers(self, name: str) -> bool:
        owner, _, last = name.rpartition(".")
        if owner in self.optimizers:
            return last in (GROUPS, ODD)
        return self.owner_of(name) in self.modules and last in (EXTRA_STATE, SAVED_STATE, SUBCLASSES)

    @cached_property
    def optimizers(self) -> list[str]:
        """Owners of optimizer state, or of settings of groups."""
        groups = [name for name in self.objects if name.endswith(f".{GROUPS}") and _is_groups(self.object(name))]
        found: dict[str, None] = dict.fromkeys(name[: -len(GROUPS) - 1] for name in groups)
        for key in self.tensors:
            if self.roles[key] == "optim" and not any(key.startswith(f"{owner}.") for owner in found):
                found[self.owner_of(key)] = None
        return list(found)


def _is_groups(value: Any) -> bool:
    first = next(iter(value.values()), None) if isinstance(value, PerRank) else value
    return isinstance(first, dict) and {"groups", "of"} <= first.keys()


def leaves(value: Any) -> Iterable[Stored]:
    """What is stored as tensors in a tree."""
    if isinstance(value, Stored):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
