"""What is one logical value in this snapshot and what is each rank's own: decided by sums, every time (design D7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ckptd.core.state_map.apart import cut_apart
from ckptd.core.state_map.balance import plans_in
from ckptd.core.state_map.box import Box, Span, disjoint_spans
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.columns import Ints
from ckptd.core.state_map.fragments import Fragment, Fragments, Kinds, Table, standing_alike
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout

DIMENSIONS_TOGETHER_MAX = 8  # of tensors that are looked at all together
CACHED_MAX = 32  # sets of layouts; a job has one or two alive
COMPARED_TOGETHER_MAX = 1 << 18  # digests

DIGEST_BYTES = 16
TENSORS = "t"  # the digests of all fragments that are not UNIQUE, one after the other in the order of the layout

Digests = Sequence[tuple[str, bytes]]  # (name, digest): TENSORS, and one "o:name" for each object


def tensor_name(key: str, box: Box) -> str:
    """How an earlier release named a fragment's digest: ``t:layer.weight|0,128``; nothing after the bar for 0-d."""
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


def in_order(layout: Layout, digests: Digests) -> Digests:
    """As they are written now. An earlier release named the digest of each fragment; one of which any is missing has none."""
    named = {name: value for name, value in digests if name.startswith("t:")}
    if not named:
        return digests
    others = tuple(pair for pair in digests if pair[0] not in named)
    values = [named.get(tensor_name(f.key, f.box), b"") for f in layout.fragments if f.sharing != UNIQUE]
    whole = all(len(value) == DIGEST_BYTES for value in values)
    return ((TENSORS, b"".join(values)), *others) if whole else others


def agree(layouts: Mapping[int, Layout], digests: Mapping[int, Digests]) -> Agreement:
    """layouts and digests: of every rank of the snapshot.

    MAYBE fragments of equal key and box, and objects of equal name, are one logical value when the digests on all ranks
    that have them are equal, else per rank; a MAYBE without a digest on some rank counts as differing. REPLICA fragments
    of equal key and box must be equal. What layouts alone say is remembered by their ids.
    """
    claims = _claims(_Keyed(_ids(layouts), layouts))
    sums = {rank: dict(found) for rank, found in digests.items()}
    tensors = {rank: found.get(TENSORS, b"") for rank, found in sums.items()}
    maybe, replica = claims.maybe, claims.replica
    per_rank = {f"t:{key}" for key in claims.unlike}
    per_rank.update(f"t:{maybe.boxes[at].key}" for at in maybe.differing(tensors, lacking=True))
    per_rank.update(_unequal_objects(sums))
    corrupt = (replica.told(at, tensors) for at in replica.differing(tensors, lacking=False))
    return Agreement(tuple(sorted(per_rank)), (*claims.errors, *corrupt))


_dtype, _shape, _sharing = attrgetter("dtype"), attrgetter("shape"), attrgetter("sharing")
_offsets, _sizes = attrgetter("box.offsets"), attrgetter("box.sizes")


class _Has(NamedTuple):
    """Ranks that stand alike (the number of these among all such) have this fragment; ``at``: its digest among theirs."""

    group: int
    at: int
    fragment: Fragment


class _Box(NamedTuple):
    """One that several ranks have."""

    key: str
    offsets: tuple[int, ...]


class _Holders(NamedTuple):
    """Ranks that stand alike, which boxes they have, where the digest of each lies among theirs, and how many bytes all of those
    are."""

    ranks: tuple[int, ...]
    boxes: Ints
    at: Ints
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Shared:
    """Boxes that several ranks have."""

    boxes: list[_Box]
    holders: list[_Holders]

    def differing(self, tensors: Mapping[int, bytes], *, lacking: bool) -> list[int]:
        """Indices of boxes whose digests are not the same everywhere; ``lacking``: or are not known. Nearly all ranks that stand
        alike say word for word the same: that is one comparison for each rank, whatever the number of boxes."""
        values = _Values(len(self.boxes))
        for holders in self.holders:
            known = b""
            for rank in holders.ranks:
                said = tensors.get(rank, b"")
                if len(said) != holders.nbytes:
                    values.differs[holders.boxes] |= lacking
                elif said != known:
                    known = said
                    values.add(holders.boxes, _rows(said)[holders.at])
        return values.differing()

    def told(self, at: int, tensors: Mapping[int, bytes]) -> str:
        """Which ranks have which value of one."""
        box = self.boxes[at]
        where = ((holders, place) for holders in self.holders for place in holders.at[holders.boxes == at].tolist())
        places = sorted((rank, place, holders.nbytes) for holders, place in where for rank in holders.ranks)
        by_value: dict[bytes, list[int]] = {}
        for rank, place, nbytes in places:
            said = tensors.get(rank, b"")
            if len(said) == nbytes:
                by_value.setdefault(said[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES], []).append(rank)
        groups = " and ".join(f"rank {', '.join(map(str, group))}" for group in by_value.values())
        return f"silent corruption: copies of {box.key} at [{','.join(map(str, box.offsets))}] differ between {groups}"


class _Values:
    """Any one digest of each box, and which boxes have another one as well. Many are compared together: thousands of ranks may have
    a few boxes each."""

    def __init__(self, boxes: int) -> None:
        self.differs = np.zeros(boxes, bool)
        self._any, self._known = np.empty((boxes, DIGEST_BYTES // 8), np.int64), np.zeros(boxes, bool)
        self._waiting: list[tuple[Ints, Ints]] = []
        self._rows = 0

    def add(self, boxes: Ints, digests: Ints) -> None:
        self._waiting.append((boxes, digests))
        self._rows += len(boxes)
        if self._rows > COMPARED_TOGETHER_MAX:
            self._compare()

    def differing(self) -> list[int]:
        self._compare()
        found: list[int] = np.flatnonzero(self.differs).tolist()
        return found

    def _compare(self) -> None:
        if not self._waiting:
            return
        boxes, digests = map(np.concatenate, zip(*self._waiting, strict=True))
        new = ~self._known[boxes]
        self._any[boxes[new]] = digests[new]
        self._known[boxes] = True
        self.differs[boxes[(digests != self._any[boxes]).any(1)]] = True
        self._waiting, self._rows = [], 0


def _rows(digests: bytes) -> Ints:
    """Two numbers each."""
    return np.frombuffer(digests, np.int64).reshape(-1, DIGEST_BYTES // 8)


def _unequal_objects(sums: Mapping[int, Mapping[str, bytes]]) -> set[str]:
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
    groups = _Groups(keyed)
    maybe, replica = _Compared(groups, MAYBE), _Compared(groups, REPLICA)
    unlike: list[str] = []
    errors = _different_plans(keyed.layouts)
    for key, found in groups.by_key():
        if len(found) == 1 and len(groups.ranks(found[0])) == 1:
            continue
        wrong = _wrong(key, found, groups)
        if wrong and all(has.fragment.sharing == MAYBE for has in found):
            unlike.append(key)
        elif wrong:
            errors.append(wrong)
        else:
            maybe.add(key, found)
            replica.add(key, found)
    return _Claims(maybe.made(), replica.made(), tuple(unlike), tuple(errors))


class _Groups:
    """Ranks that stand alike in what is not plainly theirs alone."""

    def __init__(self, keyed: _Keyed) -> None:
        all_ranks = {rank: keyed.layouts[rank].fragments for rank, _ in keyed.ids}
        plain = _plain(list(all_ranks.values()))
        self._all = standing_alike(all_ranks, lambda of: np.array([key not in plain for key in of.table.keys], bool))
        self._digested = [~all_ranks[group.ranks[0]].shared_as(UNIQUE) for group in self._all]

    def by_key(self) -> Iterable[tuple[str, Sequence[_Has]]]:
        """In the order of keys."""
        found: dict[str, list[_Has]] = {}
        for number, (group, digested) in enumerate(zip(self._all, self._digested, strict=True)):
            before = (np.cumsum(digested) - 1).tolist()
            for at, fragment in group.rows:
                found.setdefault(fragment.key, []).append(_Has(number, before[at], fragment))
        return sorted(found.items())

    def ranks(self, has: _Has) -> tuple[int, ...]:
        return self._all[has.group].ranks

    def holders(self, group: int, boxes: Sequence[int], at: Sequence[int]) -> _Holders:
        nbytes = DIGEST_BYTES * int(np.count_nonzero(self._digested[group]))
        return _Holders(self._all[group].ranks, np.array(boxes, np.int64), np.array(at, np.int64), nbytes)

    def each(self, found: Sequence[_Has]) -> Iterable[tuple[int, Fragment]]:
        """By rank: to name two of them."""
        by_rank = [(rank, number, has.fragment) for number, has in enumerate(found) for rank in self.ranks(has)]
        return ((rank, fragment) for rank, _, fragment in sorted(by_rank, key=lambda one: one[:2]))


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


class _Compared:
    """Gathers the boxes of one sharing that several ranks have."""

    def __init__(self, groups: _Groups, sharing: str) -> None:
        self._groups, self._sharing = groups, sharing
        self._boxes: list[_Box] = []
        self._held: dict[int, tuple[list[int], list[int]]] = {}  # by group: which boxes, and where the digest of each lies

    def add(self, key: str, found: Sequence[_Has]) -> None:
        holders: dict[Span, list[_Has]] = {}
        for has in found:
            if has.fragment.sharing == self._sharing and has.fragment.nbytes:
                holders.setdefault((has.fragment.box.offsets, has.fragment.box.sizes), []).append(has)
        for (offsets, _), held in holders.items():
            if len(held) > 1 or len(self._groups.ranks(held[0])) > 1:
                for has in held:
                    boxes, at = self._held.setdefault(has.group, ([], []))
                    boxes.append(len(self._boxes))
                    at.append(has.at)
                self._boxes.append(_Box(key, offsets))

    def made(self) -> _Shared:
        return _Shared(self._boxes, [self._groups.holders(group, *held) for group, held in sorted(self._held.items())])


def _wrong(key: str, found: Sequence[_Has], groups: _Groups) -> str:
    """Why these fragments cannot be slices of one tensor; "" when they can."""
    fragments = [has.fragment for has in found]
    distinct = dict.fromkeys(zip(map(_offsets, fragments), map(_sizes, fragments), strict=True))
    if len(distinct) < sum(len(groups.ranks(has)) for has in found):
        clash = _clash(key, found, groups)
        if clash:
            return clash
    if not (_same(map(_dtype, fragments)) and _same(map(_shape, fragments))):
        kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, fragment in groups.each(found):
            kinds.setdefault((fragment.dtype, fragment.shape), rank)
        texts = (f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
        return f"{key}: {', '.join(texts)}"
    if len(distinct) > 1 and not disjoint_spans(list(distinct)):
        return f"{key}: boxes of different ranks overlap without being equal"
    return ""


def _clash(key: str, found: Sequence[_Has], groups: _Groups) -> str:
    """Equal boxes of two ranks that must not be equal; "" when there are none."""
    if _same(has.fragment.sharing for has in found) and found[0].fragment.sharing != UNIQUE:
        return ""
    first: dict[Span, tuple[int, str]] = {}
    for rank, fragment in groups.each(found):
        span = fragment.box.offsets, fragment.box.sizes
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
