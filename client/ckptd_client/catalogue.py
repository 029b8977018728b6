"""What a snapshot holds, as the daemon tells it before a restore (wire.rank.Opened)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.catalogue import ALL


@dataclass(frozen=True)
class Catalogue:
    """tensors: key -> (dtype, shape, role); objects: name -> the ranks that saved it, None: all; per_rank: "t:key" and "o:name"
    that differ between ranks; own: key of such a tensor -> the ranks that have one, None: all. odd: such keys of another dtype or
    shape on some."""

    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    objects: dict[str, frozenset[int] | None]
    per_rank: frozenset[str]
    aliases: dict[str, str] = field(default_factory=dict)
    world: int = 1
    own: dict[str, frozenset[int] | None] = field(default_factory=dict)
    odd: frozenset[str] = frozenset()

    @staticmethod
    def decode(data: bytes, rank: int) -> Catalogue:
        """As this rank of the snapshot's world knows it: under one name a rank may have had another dtype or shape. Raises
        CkptdError for anything else than a catalogue."""
        try:
            body: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False, use_list=False)
            rows = dict(body["tensors"])
            for key, found in body.get("variants", {}).items():
                rows[key] = found.get(str(rank), rows[key])
            tensors = {key: (dtype, tuple(shape), role) for key, (dtype, shape, role) in rows.items()}
            return Catalogue(
                tensors,
                _ranks(body["objects"]),
                frozenset(body["per_rank"]),
                dict(body["aliases"]),
                body["world"],
                _ranks(body.get("own", {})),
                frozenset(body.get("variants", ())),
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CkptdError(f"the daemon's catalogue does not parse: {error}") from error

    def source_of(self, key: str) -> str | None:
        """The key under which this tensor was saved: its own, or that of the one it was tied to."""
        if key in self.tensors:
            return key
        other = self.aliases.get(key)
        return other if other in self.tensors else None

    def owners_of(self, key: str) -> list[int]:
        """Who has saved a value of its own of this tensor; nobody: it is none such, or the daemon is of a release that does not
        tell."""
        ranks = self.own.get(key, frozenset())
        return list(range(self.world)) if ranks is None else sorted(ranks)

    def ranks_of(self, name: str) -> list[int]:
        """Who has saved this object."""
        ranks = self.objects[name]
        return list(range(self.world)) if ranks is None else sorted(ranks)

    def saved_by(self, name: str, rank: int | None) -> bool:
        """This object, by this rank; None: by every one."""
        ranks = self.objects.get(name, frozenset())
        return ranks is None or (len(ranks) == self.world if rank is None else rank in ranks)

    def is_per_rank(self, kind: str, name: str) -> bool:
        return f"{kind}:{name}" in self.per_rank


def _ranks(of: dict[str, Any]) -> dict[str, frozenset[int] | None]:
    return {name: None if ranks == ALL else frozenset(ranks) for name, ranks in of.items()}
