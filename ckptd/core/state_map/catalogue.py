"""What a snapshot holds, without where: told to ranks before they say what they want (wire.rank.Opened)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgpack

from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_reader import DIMENSIONS_MAX, KEY_CHARACTERS_MAX, WORLD_MAX

ALL = "all"
META = "$meta"  # object: {"step", "meta", "contents": {name of a registered dict or list: keys of what a restore can make},
# "on_device": keys of tensors in objects, and registered as such, that lay on one, "rules": {pattern: what it says}, if any}
CATALOGUE_BYTES_MAX = 256 << 20  # encoded


class TensorEntry(NamedTuple):
    dtype: str  # safetensors name
    shape: tuple[int, ...]  # global
    role: str  # param | buffer | optim | extra | rng


@dataclass(frozen=True)
class Catalogue:
    """tensors by canonical key; objects: name -> the ranks that have it, ascending; aliases: alias -> canonical key.

    per_rank: "t:key" and "o:name" whose values are each rank's own. variants: for such keys the entry on ranks where dtype
    or shape differ from the one in ``tensors`` (equal names on pipeline stages). own: the ranks that have such a tensor, ascending.
    """

    world: int
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    per_rank: frozenset[str] = frozenset()
    variants: dict[str, dict[int, TensorEntry]] = field(default_factory=dict)
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def from_layouts(
        layouts: Mapping[int, Layout], objects: Mapping[int, Iterable[str]], per_rank: Collection[str] = ()
    ) -> Catalogue:
        """layouts: of every rank; objects: rank -> names in its objects region (see ``object_names``)."""
        world = max((layout.world for layout in layouts.values()), default=0)
        tensors: dict[str, TensorEntry] = {}
        aliases: dict[str, str] = {}
        variants: dict[str, dict[int, TensorEntry]] = {}
        others: dict[Table, dict[str, TensorEntry]] = {}  # what ranks of one shape have that is not as on the ranks before
        own_of: dict[Table, list[str]] = {}  # what of theirs is each rank's own
        own: dict[str, list[int]] = {}
        for rank, layout in sorted(layouts.items()):
            aliases.update(layout.aliases)
            table = layout.fragments.table
            if table not in others:
                keys, dtypes, shapes, *_, roles, _, _ = layout.fragments.columns()
                rows = list(zip(dtypes, shapes, roles, strict=True))
                entry_of = {row: TensorEntry(*row) for row in set(rows)}  # few kinds of very many tensors
                entries = dict(zip(keys, map(entry_of.__getitem__, rows), strict=True))
                tensors |= {key: entry for key, entry in entries.items() if key not in tensors}
                others[table] = {key: entry for key, entry in entries.items() if tensors[key] != entry}
                own_of[table] = [key for key in entries if f"t:{key}" in per_rank] if per_rank else []
            for key, entry in others[table].items():
                variants.setdefault(key, {})[rank] = entry
            for key in own_of[table]:
                own.setdefault(key, []).append(rank)
        ranks: dict[str, list[int]] = {}
        for rank, names in sorted(objects.items()):
            for name in sorted(set(names)):
                ranks.setdefault(name, []).append(rank)
        held = {name: tuple(found) for name, found in sorted(ranks.items())}
        owners = {key: tuple(found) for key, found in own.items()}
        return Catalogue(world, tensors, held, aliases, frozenset(per_rank), variants, owners)

    def canonical(self, key: str) -> str:
        """The key under which an alias is stored; the key itself otherwise."""
        return key if key in self.tensors else self.aliases.get(key, key)

    def tensor(self, key: str, rank: int) -> TensorEntry | None:
        """The entry as this rank of the snapshot's world knows it; None: there is no such tensor."""
        key = self.canonical(key)
        return self.variants.get(key, {}).get(rank) or self.tensors.get(key)

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that have this object, ascending; empty when there is none of that name."""
        return self.objects.get(name, ())

    def objects_of(self, rank: int) -> tuple[str, ...]:
        """Names of the objects this rank has, sorted."""
        return tuple(sorted(name for name, ranks in self.objects.items() if rank in ranks))

    def to_dict(self) -> dict[str, Any]:
        """Plain msgpack types, the format of wire.rank.Opened. "variants" and "own" are there only when there are any."""
        everyone = tuple(range(self.world))
        row_of = {entry: _row(entry) for entry in set(self.tensors.values())}
        body: dict[str, Any] = {
            "tensors": {key: row_of[entry] for key, entry in self.tensors.items()},
            "objects": {name: ALL if r == everyone else list(r) for name, r in self.objects.items()},
            "per_rank": sorted(self.per_rank),
            "aliases": dict(self.aliases),
            "world": self.world,
        }
        if self.variants:
            body["variants"] = {
                key: {str(rank): _row(entry) for rank, entry in found.items()}
                for key, found in self.variants.items()
            }
        if self.own:
            body["own"] = {key: ALL if ranks == everyone else list(ranks) for key, ranks in self.own.items()}
        return body

    @staticmethod
    def from_dict(body: Any) -> Catalogue:
        """The inverse of to_dict, also of a manifest that has these fields among others. ValueError: malformed."""
        try:
            return _read(body)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a catalogue: {type(error).__name__} {error}") from error

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb(self.to_dict())
        return packed

    @staticmethod
    def from_bytes(data: bytes) -> Catalogue:
        """ValueError: malformed or larger than CATALOGUE_BYTES_MAX."""
        if len(data) > CATALOGUE_BYTES_MAX:
            raise ValueError(f"catalogue of {len(data)} bytes, at most {CATALOGUE_BYTES_MAX} are read")
        try:
            body = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not a catalogue: {error}") from error
        return Catalogue.from_dict(body)


def object_names(digests: Iterable[tuple[str, bytes]]) -> list[str]:
    """The entries of a slot's objects region, as its digests name them ("o:name")."""
    return [name[2:] for name, _ in digests if name.startswith("o:")]


def _row(entry: TensorEntry) -> list[Any]:
    return [entry.dtype, list(entry.shape), entry.role]


def _entry(row: Any) -> TensorEntry:
    dtype, shape, role = row
    dims = tuple(shape)
    if len(dims) > DIMENSIONS_MAX or not all(type(size) is int and size >= 0 for size in dims):
        raise ValueError("a shape that is not made of sizes")
    return TensorEntry(_text(dtype), dims, _text(role))


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > KEY_CHARACTERS_MAX:
        raise ValueError("not a short text")
    return value


def _rank(value: Any, world: int) -> int:
    if type(value) is not int or not 0 <= value < world:
        raise ValueError(f"a rank outside a world of {world}")
    return value


def _read(body: Any) -> Catalogue:
    world = body["world"]
    if type(world) is not int or not 0 <= world <= WORLD_MAX:
        raise ValueError("a world that is no number within bounds")
    own = body.get("own", {})
    everyone = tuple(range(world)) if ALL in chain(body["objects"].values(), own.values()) else ()

    def ranks_of(ranks: Any) -> tuple[int, ...]:
        return everyone if ranks == ALL else tuple(sorted(_rank(rank, world) for rank in ranks))

    objects, owners = ({_text(name): ranks_of(ranks) for name, ranks in of.items()} for of in (body["objects"], own))
    variants = {
        _text(key): {_rank(int(rank), world): _entry(row) for rank, row in found.items()}
        for key, found in body.get("variants", {}).items()
    }
    return Catalogue(
        world,
        {_text(key): _entry(row) for key, row in body["tensors"].items()},
        objects,
        {_text(alias): _text(key) for alias, key in body["aliases"].items()},
        frozenset(map(_text, body["per_rank"])),
        variants,
        owners,
    )
