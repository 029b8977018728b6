"""What is one logical value in this snapshot and what is each rank's own: decided by sums, every time (design D7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckptd.core.box import Box, disjoint
from ckptd.core.layout import MAYBE, REPLICA, UNIQUE, Fragment, Layout

CACHED_MAX = 32  # sets of layouts; a job has one or two alive

Digests = Sequence[tuple[str, bytes]]  # (name, 16 bytes)


def tensor_name(key: str, box: Box) -> str:
    """Name of a fragment among a slot's digests: ``t:layer.weight|0,128``; nothing after the bar for 0-d."""
    return f"t:{key}|{','.join(map(str, box.offsets))}"


def object_name(name: str) -> str:
    """Name of an entry of the objects region among a slot's digests: ``o:scheduler``."""
    return f"o:{name}"


@dataclass(frozen=True, slots=True)
class Agreement:
    """per_rank: sorted "t:key" and "o:name" whose values are each rank's own in this snapshot (same world only).

    errors: why the snapshot must be void; copies by contract that differ are silent corruption. Empty: fine.
    """

    per_rank: tuple[str, ...]
    errors: tuple[str, ...]


def agree(layouts: Mapping[int, Layout], digests: Mapping[int, Digests]) -> Agreement:
    """layouts and digests: of every rank of the snapshot.

    MAYBE fragments of equal key and box, and objects of equal name, are one logical value when the digests on all ranks
    that have them are equal, else per rank; a MAYBE without a digest on some rank counts as differing. REPLICA fragments
    of equal key and box must be equal.
    """
    claims = _claims(_Keyed(_ids(layouts), layouts))
    sums = {rank: dict(found) for rank, found in digests.items()}
    per_rank = {f"t:{key}" for key in claims.unlike}
    errors = list(claims.errors)
    for key, name, ranks in claims.maybe:
        values = {sums.get(rank, {}).get(name) for rank in ranks}
        if len(values) > 1 or None in values:
            per_rank.add(f"t:{key}")
    for key, name, ranks in claims.replica:
        errors += _copies_differ(key, name, ranks, sums)
    per_rank.update(_unequal_objects(sums))
    return Agreement(tuple(sorted(per_rank)), tuple(errors))


def _copies_differ(
    key: str, name: str, ranks: tuple[int, ...], sums: Mapping[int, dict[str, bytes]]
) -> list[str]:
    by_value: dict[bytes, list[int]] = {}
    for rank in ranks:
        value = sums.get(rank, {}).get(name)
        if value is not None:
            by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return []
    groups = " and ".join(f"rank {', '.join(map(str, group))}" for group in by_value.values())
    at = name.rpartition("|")[2]
    return [f"silent corruption: copies of {key} at [{at}] differ between {groups}"]


def _unequal_objects(sums: Mapping[int, dict[str, bytes]]) -> set[str]:
    first: dict[str, bytes] = {}
    unequal: set[str] = set()
    for found in sums.values():
        for name, value in found.items():
            if name.startswith("o:") and first.setdefault(name, value) != value:
                unequal.add(name)
    return unequal


@dataclass(frozen=True, slots=True)
class _Keyed:
    """Layouts that compare and hash by their ids."""

    ids: tuple[tuple[int, str], ...]
    layouts: Mapping[int, Layout] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the layouts alone say: which names to compare on which ranks, which keys cannot be compared, what is wrong."""

    maybe: tuple[tuple[str, str, tuple[int, ...]], ...]  # (key, digest name, ranks)
    replica: tuple[tuple[str, str, tuple[int, ...]], ...]
    unlike: tuple[str, ...]
    errors: tuple[str, ...]


def _ids(layouts: Mapping[int, Layout]) -> tuple[tuple[int, str], ...]:
    return tuple((rank, layouts[rank].layout_id) for rank in sorted(layouts))


@lru_cache(maxsize=CACHED_MAX)
def _claims(keyed: _Keyed) -> _Claims:
    by_key: dict[str, list[tuple[int, Fragment]]] = {}
    for rank, _ in keyed.ids:
        for fragment in keyed.layouts[rank].fragments:
            by_key.setdefault(fragment.key, []).append((rank, fragment))
    maybe: list[tuple[str, str, tuple[int, ...]]] = []
    replica: list[tuple[str, str, tuple[int, ...]]] = []
    unlike: list[str] = []
    errors = _different_plans(keyed.layouts)
    for key, found in sorted(by_key.items()):
        if len(found) == 1:
            continue
        wrong = _wrong(key, found)
        if wrong and all(fragment.sharing == MAYBE for _, fragment in found):
            unlike.append(key)
        elif wrong:
            errors.append(wrong)
        else:
            maybe += _compared(key, [entry for entry in found if entry[1].sharing == MAYBE])
            replica += _compared(key, [entry for entry in found if entry[1].sharing == REPLICA])
    return _Claims(tuple(maybe), tuple(replica), tuple(unlike), tuple(errors))


def _different_plans(layouts: Mapping[int, Layout]) -> list[str]:
    ranks: dict[str, int] = {}
    for rank in sorted(layouts):
        ranks.setdefault(layouts[rank].plan_id, rank)
    if len(ranks) < 2:
        return []
    return [
        f"ranks {', '.join(map(str, ranks.values()))} captured by different plans: what is a copy by structure or"
        " replicated= must be on all of them"
    ]


def _compared(key: str, found: list[tuple[int, Fragment]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The boxes that several ranks have."""
    ranks: dict[Box, list[int]] = {}
    for rank, fragment in found:
        if fragment.nbytes:
            ranks.setdefault(fragment.box, []).append(rank)
    return [(key, tensor_name(key, box), tuple(held)) for box, held in ranks.items() if len(held) > 1]


def _wrong(key: str, found: list[tuple[int, Fragment]]) -> str:
    """Why these fragments cannot be slices of one tensor; "" when they can."""
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    boxes: dict[Box, tuple[int, str]] = {}
    for rank, fragment in found:
        kinds.setdefault((fragment.dtype, fragment.shape), rank)
        other, sharing = boxes.setdefault(fragment.box, (rank, fragment.sharing))
        if other == rank or not fragment.nbytes:
            continue
        if sharing != fragment.sharing:
            return f"{key}: rank {other} and rank {rank} disagree whether it is shared"
        if sharing == UNIQUE:
            return f"{key}: rank {other} and rank {rank} both have the same slice for themselves alone"
    if len(kinds) > 1:
        texts = (f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
        return f"{key}: {', '.join(texts)}"
    if not disjoint(list(boxes)):
        return f"{key}: boxes of different ranks overlap without being equal"
    return ""
