"""Two checkpoints side by side: keys, shapes, dtypes, elements and objects. Reads a few MiB at a time, every byte verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np

from ckptd.core.state_map.box import Box, intersect, merge, split
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.index import Tensor
from ckptd.persist.manifest import ObjectRef
from ckptd.persist.numbers import distance, numbers
from ckptd.persist.reader import Checkpoint

STEP_BYTES = 4 << 20  # of each checkpoint that are compared at a time
DEPTH_MAX = 200  # of lists and dicts in an object, as many as are ever written

Wanted = Callable[[str], bool]
T = TypeVar("T")
Tick = Callable[[int], None]  # so many bytes more were compared


@dataclass(frozen=True)
class Difference:
    """One tensor or object. what: ``only in A`` (or B), ``other dtype``, ``other shape``, ``other parts``, ``other values``.
    rank: whose own value. first: index of the first element that differs in C order, of an object its path inside. elements: how
    many differ."""

    name: str
    kind: str  # tensor or object
    what: str
    rank: int | None = None
    a: str = ""
    b: str = ""
    max_difference: int | float | None = None
    first: str = ""
    elements: int = 0


def differences(a: Checkpoint, b: Checkpoint, wanted: Wanted, tick: Tick = lambda nbytes: None) -> Iterator[Difference]:
    """By name: tensors, then objects. Raises FileDamage, StorageError."""
    mine, its = _tensors(a, wanted), _tensors(b, wanted)
    for key in sorted(mine.keys() | its.keys()):
        for rank in _ranks(mine.get(key, {}), its.get(key, {})):
            x, y = (_of(found.get(key, {}), rank) for found in (mine, its))
            yield from _tensor(a, b, key, rank, x, y, tick)
    yield from _objects(a, b, wanted)


def _tensors(checkpoint: Checkpoint, wanted: Wanted) -> dict[str, dict[int | None, Tensor]]:
    """By key, tied names among them, and rank."""
    found: dict[str, dict[int | None, Tensor]] = {}
    for tensor in checkpoint.index.tensors():
        found.setdefault(tensor.key, {})[tensor.rank] = tensor
    for alias, key in checkpoint.manifest.aliases.items():
        found.setdefault(alias, found.get(key, {}))
    return {key: tensors for key, tensors in found.items() if wanted(key)}


def _ranks(a: dict[int | None, T], b: dict[int | None, T]) -> list[int | None]:
    """One value for all in both, or in one alone; else rank by rank."""
    own = sorted(rank for rank in a.keys() | b.keys() if rank is not None)
    return [*own] if own else [None]


def _of(found: dict[int | None, T], rank: int | None) -> T | None:
    return found.get(rank, found.get(None))


def _tensor(
    a: Checkpoint, b: Checkpoint, key: str, rank: int | None, x: Tensor | None, y: Tensor | None, tick: Tick
) -> Iterator[Difference]:
    if x is None or y is None:
        yield Difference(key, "tensor", "only in B" if x is None else "only in A", rank, _facts(x), _facts(y))
        return
    facts = _facts(x), _facts(y)
    if x.shape != y.shape:
        yield Difference(key, "tensor", "other shape", rank, *facts)
        return
    if x.dtype != y.dtype:
        yield Difference(key, "tensor", "other dtype", rank, *facts)
    boxes = a.boxes(key, rank), b.boxes(key, rank)
    if rank is None or merge(boxes[0]) == merge(boxes[1]) == [Box.whole(x.shape)]:
        parts = [Box.whole(x.shape)]
    else:  # what that rank had need not be all of the tensor
        parts = [part for one in boxes[0] for other in boxes[1] if (part := intersect(one, other)) is not None]
        if merge(boxes[0]) != merge(boxes[1]):
            yield Difference(key, "tensor", "other parts", rank, str(boxes[0]), str(boxes[1]))
    yield from _values(a, b, (x, y), key, rank, parts, tick)


def _values(
    a: Checkpoint, b: Checkpoint, pair: tuple[Tensor, Tensor], key: str, rank: int | None, parts: list[Box], tick: Tick
) -> Iterator[Difference]:
    x, y = pair
    items = ITEMSIZE[x.dtype], ITEMSIZE[y.dtype]
    farthest: int | float = 0
    first: tuple[int, ...] | None = None
    count = 0
    for part in (piece for box in parts if box.volume for piece in split(box, STEP_BYTES // max(items))):
        views = [memoryview(bytearray(part.volume * item)) for item in items]
        for checkpoint, view in zip((a, b), views, strict=True):
            checkpoint.read(key, part, view, rank)
        tick(len(views[0]) + len(views[1]))
        at, apart = _compare(views, pair)
        if not len(at):
            continue
        count += len(at)
        farthest = max(farthest, apart)
        local = np.unravel_index(int(at[0]), part.sizes) if part.sizes else ()
        index = tuple(int(i) + offset for i, offset in zip(local, part.offsets, strict=True))
        first = index if first is None else min(first, index)
    if first is not None:
        place = str(list(first))
        yield Difference(key, "tensor", "other values", rank, _facts(x), _facts(y), farthest, place, count)


def _compare(views: list[memoryview], pair: tuple[Tensor, Tensor]) -> tuple[Any, int | float]:
    """(which elements differ, how far they are apart at most); bit by bit where both have one dtype."""
    x, y = pair
    if x.dtype == y.dtype:
        if views[0] == views[1]:
            return (), 0
        rows = [np.frombuffer(view, np.uint8).reshape(-1, ITEMSIZE[x.dtype]) for view in views]
        at = np.flatnonzero((rows[0] != rows[1]).any(1))
        p, q = (numbers(row[at].data, x.dtype) for row in rows)
        return at, distance(p, q)
    p, q = numbers(views[0], x.dtype), numbers(views[1], y.dtype)
    at = np.flatnonzero((p != q) & ~(np.isnan(p) & np.isnan(q)))
    return at, distance(p[at], q[at])


def _facts(tensor: Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


# --- objects ------------------------------------------------------------------------------------------------
def _objects(a: Checkpoint, b: Checkpoint, wanted: Wanted) -> Iterator[Difference]:
    mine, its = _refs(a), _refs(b)
    for name in filter(wanted, sorted(mine.keys() | its.keys())):
        for rank in _ranks(mine.get(name, {}), its.get(name, {})):
            x, y = (_of(found.get(name, {}), rank) for found in (mine, its))
            yield from _object(a, b, name, rank, x, y)


def _refs(checkpoint: Checkpoint) -> dict[str, dict[int | None, ObjectRef]]:
    found: dict[str, dict[int | None, ObjectRef]] = {}
    for ref in checkpoint.manifest.objects:
        found.setdefault(ref.name, {}).update(dict.fromkeys([None] if ref.ranks is None else ref.ranks, ref))
    return found


def _object(
    a: Checkpoint, b: Checkpoint, name: str, rank: int | None, x: ObjectRef | None, y: ObjectRef | None
) -> Iterator[Difference]:
    if x is None or y is None:
        yield Difference(name, "object", "only in B" if x is None else "only in A", rank)
    elif x.sum != y.sum:
        path, p, q = _apart(_plain(a.files.blob(x)), _plain(b.files.blob(y)), "", 0) or ("", "other bytes", "other bytes")
        yield Difference(name, "object", "other values", rank, p, q, first=path)


def _plain(blob: bytes) -> Any:
    """What can be looked at; nothing of it is made into an object (docs/FORMAT.md section 6)."""
    def extension(code: int, body: bytes) -> list[Any]:
        return [f"type {code}", _plain(body)]

    return msgpack.unpackb(blob, ext_hook=extension, strict_map_key=False)


def _apart(a: Any, b: Any, path: str, depth: int) -> tuple[str, str, str] | None:
    """(path, one, other) of the first value that differs."""
    if type(a) is type(b) and depth < DEPTH_MAX:
        if isinstance(a, dict) and a.keys() == b.keys():
            return next(filter(None, (_apart(a[key], b[key], f"{path}.{key}", depth + 1) for key in a)), None)
        if isinstance(a, list) and len(a) == len(b):
            pairs = enumerate(zip(a, b, strict=True))
            return next(filter(None, (_apart(x, y, f"{path}[{at}]", depth + 1) for at, (x, y) in pairs)), None)
    return None if a == b and type(a) is type(b) else (path, _short(a), _short(b))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
