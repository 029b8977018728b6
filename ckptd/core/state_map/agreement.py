"""What is one logical value in this snapshot and what is each rank's own: decided by sums, every time (design D7)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

import numpy as np

from ckptd.core.state_map.apart import cut_apart
from ckptd.core.state_map.balance import plans_in
from ckptd.core.state_map.box import Box, Span, disjoint_spans
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.columns import Flags
from ckptd.core.state_map.fragments import Fragment, Fragments, Kinds, Rows, Table
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout

DIMENSIONS_TOGETHER_MAX = 8  # of tensors that are looked at all together
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
    of equal key and box must be equal. What layouts alone say is remembered by their ids.
    """
    claims = _claims(_Keyed(_ids(layouts), layouts))
    sums = {rank: dict(found) for rank, found in digests.items()}
    per_rank = {f"t:{key}" for key in claims.unlike}
    errors = list(claims.errors)
    for at in _differing(claims.maybe, sums, lacking=True):
        per_rank.add(f"t:{claims.maybe.keys[at]}")
    for at in _differing(claims.replica, sums, lacking=False):
        errors += _copies_differ(claims.replica, at, sums)
    per_rank.update(_unequal_objects(sums))
    return Agreement(tuple(sorted(per_rank)), tuple(errors))


_Sums = Mapping[int, Mapping[str, bytes]]  # rank -> digest name -> digest

_dtype, _shape, _sharing = attrgetter("dtype"), attrgetter("shape"), attrgetter("sharing")
_offsets, _sizes = attrgetter("box.offsets"), attrgetter("box.sizes")


@dataclass(frozen=True, slots=True)
class _Shared:
    """Boxes that several ranks have. The lists run in parallel, ``together`` are their indices by who has them."""

    keys: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the digests
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    together: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def add(self, key: str, offsets: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        self.together.setdefault(ranks, []).append(len(self.keys))
        self.keys.append(key)
        self.names.append(f"t:{key}|{','.join(map(str, offsets))}")
        self.ranks.append(ranks)


def _differing(shared: _Shared, sums: _Sums, *, lacking: bool) -> list[int]:
    """Indices of boxes whose digests are not the same everywhere; ``lacking``: or are not known.

    Boxes of the same ranks are compared as one row per rank: one comparison where nothing differs.
    """
    found: list[int] = []
    for ranks, together in shared.together.items():
        names = [shared.names[at] for at in together]
        rows = [list(map(sums.get(rank, {}).get, names)) for rank in ranks]
        if rows.count(rows[0]) == len(rows) and not (lacking and None in rows[0]):
            continue
        for at, *values in zip(together, *rows, strict=True):
            if values.count(values[0]) < len(values) or (lacking and None in values):
                found.append(at)
    return sorted(found)


def _copies_differ(shared: _Shared, index: int, sums: _Sums) -> list[str]:
    name = shared.names[index]
    by_value: dict[bytes, list[int]] = {}
    for rank in shared.ranks[index]:
        value = sums.get(rank, {}).get(name)
        if value is not None:
            by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return []
    groups = " and ".join(f"rank {', '.join(map(str, group))}" for group in by_value.values())
    at = name.rpartition("|")[2]
    return [f"silent corruption: copies of {shared.keys[index]} at [{at}] differ between {groups}"]


def _unequal_objects(sums: _Sums) -> set[str]:
    first: dict[str, bytes] = {}
    unequal: set[str] = set()
    for found in sums.values():
        for name in [name for name in found if name.startswith("o:")]:
            value = found[name]
            if first.setdefault(name, value) != value:
                unequal.add(name)
    return unequal


@dataclass(frozen=True, slots=True)
class _Keyed:
    """Layouts that compare and hash by their ids."""

    ids: tuple[tuple[int, str], ...]
    layouts: Mapping[int, Layout] = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Claims:
    """What the layouts alone say: what to compare on which ranks, which keys cannot be compared, what is wrong."""

    maybe: _Shared
    replica: _Shared
    unlike: tuple[str, ...]
    errors: tuple[str, ...]


def _ids(layouts: Mapping[int, Layout]) -> tuple[tuple[int, str], ...]:
    return tuple((rank, layouts[rank].layout_id) for rank in sorted(layouts))


@lru_cache(maxsize=CACHED_MAX)
def _claims(keyed: _Keyed) -> _Claims:
    maybe, replica = _Shared(), _Shared()
    unlike: list[str] = []
    errors = _different_plans(keyed.layouts)
    for key, ranks, found in _by_key(keyed):
        if len(found) == 1:
            continue
        spans = list(zip(map(_offsets, found), map(_sizes, found), strict=True))
        wrong = _wrong(key, ranks, found, spans)
        if wrong and all(fragment.sharing == MAYBE for fragment in found):
            unlike.append(key)
        elif wrong:
            errors.append(wrong)
        elif len(set(spans)) < len(spans):
            _compared(maybe, key, MAYBE, ranks, found, spans)
            _compared(replica, key, REPLICA, ranks, found, spans)
    return _Claims(maybe, replica, tuple(unlike), tuple(errors))


def _by_key(keyed: _Keyed) -> Iterable[tuple[str, Sequence[int], Sequence[Fragment]]]:
    """(key, ranks, fragments) in the order of keys; the two sequences run in parallel, by rank.

    No tuple per fragment: a million objects more would set the garbage collector on all layouts.
    """
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    fragments: defaultdict[str, list[Fragment]] = defaultdict(list)
    plain = _plain([keyed.layouts[rank].fragments for rank, _ in keyed.ids])
    rows, others = Rows(), dict[Table, Flags]()
    for rank, _ in keyed.ids:
        of = keyed.layouts[rank].fragments
        which = others.get(of.table)
        if which is None:
            which = others[of.table] = np.array([key not in plain for key in of.table.keys], bool)
        for _, fragment in rows.of(of, which):
            ranks[fragment.key].append(rank)
            fragments[fragment.key].append(fragment)
    return [(key, ranks[key], fragments[key]) for key in sorted(fragments)]


def _plain(all_ranks: Sequence[Fragments]) -> set[str]:
    """Keys of which each rank has slices of its own: of one dtype and shape, none shared, and no element twice. That is nearly all
    where a model is sharded, and is found for all of them together."""
    kinds, tables = Kinds(), dict[Table, list[Fragments]]()
    for of in all_ranks:
        tables.setdefault(of.table, []).append(of)
    numbers = {table: kinds.of(found[0]) for table, found in tables.items()}
    shared = {at for table, found in tables.items() for at in np.unique(numbers[table][~found[0].shared_as(UNIQUE)]).tolist()}
    looked_at = np.array([at not in shared for at in range(len(kinds.number))], bool)
    apart = cut_apart(tables, numbers, looked_at)
    rest = [of for of in all_ranks if (looked_at & ~apart)[numbers[of.table]].any()]
    dims = max((of.table.dims_max for of in rest), default=0)
    if dims > DIMENSIONS_TOGETHER_MAX:  # each row would be as wide as the widest
        rest = []
    parts = [np.empty((0, 1 + 2 * dims), np.int64)]
    for of in rest:
        found = np.column_stack((numbers[of.table], *of.boxes(dims)))
        parts.append(found[(of.nbytes > 0) & (looked_at & ~apart)[numbers[of.table]]])
    rows = np.concatenate(parts)
    rows = rows[np.lexsort(rows[:, dims::-1].T)]  # by kind and offsets
    boxes = BoxIndex.numbered(rows[:, 0], len(kinds.number), rows[:, 1 : 1 + dims], rows[:, 1 + dims :])
    apart = apart | boxes.apart if rest else apart
    single = Counter(key for key, *_ in kinds.number)
    return {key for (key, *_), at in kinds.number.items() if at not in shared and apart[at] and single[key] == 1}


def _different_plans(layouts: Mapping[int, Layout]) -> list[str]:
    found: dict[str, dict[str, int]] = {}  # who plans -> plan -> the first rank that has it
    for rank in sorted(layouts):
        for who, plan in plans_in(layouts[rank].plan_id):
            found.setdefault(who, {}).setdefault(plan, rank)
    return [
        f"ranks {', '.join(map(str, ranks.values()))} captured by different plans: what is a copy by structure must be on all"
        " of them, and what replicated= names the same as when they joined; register everything before restore()"
        for ranks in found.values()
        if len(ranks) > 1
    ]


def _compared(
    shared: _Shared,
    key: str,
    sharing: str,
    ranks: Sequence[int],
    found: Sequence[Fragment],
    spans: Sequence[Span],
) -> None:
    """Add the boxes of this sharing that several ranks have."""
    holders: dict[Span, list[int]] = {}
    for rank, fragment, span in zip(ranks, found, spans, strict=True):
        if fragment.sharing == sharing and fragment.nbytes:
            holders.setdefault(span, []).append(rank)
    for (offsets, _), held in holders.items():
        if len(held) > 1:
            shared.add(key, offsets, tuple(held))


def _wrong(key: str, ranks: Sequence[int], found: Sequence[Fragment], spans: Sequence[Span]) -> str:
    """Why these fragments cannot be slices of one tensor; "" when they can."""
    distinct = dict.fromkeys(spans)
    if len(distinct) < len(spans):
        clash = _clash(key, ranks, found, spans)
        if clash:
            return clash
    if not (_same(map(_dtype, found)) and _same(map(_shape, found))):
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, fragment in zip(ranks, found, strict=True):
            kinds.setdefault((fragment.dtype, fragment.shape), rank)
        texts = (f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
        return f"{key}: {', '.join(texts)}"
    if len(distinct) > 1 and not disjoint_spans(list(distinct)):
        return f"{key}: boxes of different ranks overlap without being equal"
    return ""


def _clash(key: str, ranks: Sequence[int], found: Sequence[Fragment], spans: Sequence[Span]) -> str:
    """Equal boxes of two ranks that must not be equal; "" when there are none."""
    if _same(map(_sharing, found)) and found[0].sharing != UNIQUE:
        return ""
    first: dict[Span, tuple[int, str]] = {}
    for rank, fragment, span in zip(ranks, found, spans, strict=True):
        other, sharing = first.setdefault(span, (rank, fragment.sharing))
        if other == rank or not fragment.nbytes:
            continue
        if sharing != fragment.sharing:
            return f"{key}: rank {other} and rank {rank} disagree whether it is shared"
        if sharing == UNIQUE:
            return f"{key}: rank {other} and rank {rank} both have the same slice for themselves alone"
    return ""


def _same(values: Iterable[object]) -> bool:
    known = list(values)
    return known.count(known[0]) == len(known)
