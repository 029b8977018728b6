"""State that an engine has cut by itself, handed over box by box: register_boxes() (design D18).

ckptd finds out how torch has cut a tensor. Where another library did (ZeRO, a distributed optimizer, layers that are parallel by
hand) an adapter says it: which box of which logical tensor a piece of memory holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map import box as extents
from ckptd_client import dtypes, supported, tree, watch
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import Placed
from ckptd_client.naming import is_dtensor

ROLES = ("param", "buffer", "optim", "extra")
OPTIMIZER = "optimizer"  # what state of a parameter is called after, as under register(optimizer=...)


@dataclass(frozen=True, eq=False)
class Box:
    """``tensor`` holds this box of the logical tensor ``key``, whose shape is ``global_shape``, in elements.

    offsets: of the box in the logical tensor. sizes: of the box; None: the tensor's shape. flat: (start, stop), the part of the
    box in C order that the tensor holds, which then has one dimension. copy: 0 is the value; what another rank holds as copy 1
    must be equal to it, or the snapshot is void. role: "param", "buffer", "optim" or "extra". of: (key of a parameter, name of a
    state) of optimizer state, which may leave ``key`` empty: it is called as register(optimizer=...) calls it.
    """

    key: str
    tensor: Tensor
    global_shape: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int] | None = None
    flat: tuple[int, int] | None = None
    copy: int = 0
    role: str = "param"
    of: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return self.key or (".".join((OPTIMIZER, *self.of)) if self.of else "")

    @property
    def kind(self) -> str:
        """Its role."""
        return "optim" if self.of else self.role

    def placed(self) -> Placed:
        """Raises CkptdError naming the key and what does not fit."""
        shape, offsets = tuple(map(int, self.global_shape)), tuple(map(int, self.offsets))
        sizes = tuple(map(int, self.tensor.shape if self.sizes is None else self.sizes))
        whole, box = extents.Box.whole(shape), extents.Box(offsets, sizes)
        if len(offsets) != len(shape) or len(sizes) != len(shape) or min((*shape, *offsets, *sizes), default=0) < 0:
            raise self._wrong(f"offsets {list(offsets)} and sizes {list(sizes)} are none of a tensor of shape {list(shape)}")
        if not extents.contains(whole, box):
            raise self._wrong(f"the box at {list(offsets)} of sizes {list(sizes)} leaves the shape {list(shape)}")
        if self.flat is None:
            if tuple(self.tensor.shape) != sizes:
                raise self._wrong(f"a tensor of shape {list(self.tensor.shape)} for a box of sizes {list(sizes)}")
            return Placed(shape, ((box, (0,) * len(shape)),))
        return Placed(shape, tuple(self._ranges(box)), flat=True)

    def _ranges(self, box: extents.Box) -> Iterable[tuple[extents.Box, tuple[int, ...]]]:
        start, stop = map(int, self.flat or (0, 0))
        if not 0 <= start <= stop <= box.volume or tuple(self.tensor.shape) != (stop - start,):
            text = f"a tensor of shape {list(self.tensor.shape)} for the range [{start}, {stop}) of {box.volume} elements"
            raise self._wrong(f"{text}; flat= is a range of the box, and its tensor has one dimension")
        if not self.tensor.is_contiguous():
            raise self._wrong("a flat range that is not contiguous in memory")
        at = 0
        for part in extents.flat_range_boxes(box.sizes, start, stop) or [extents.Box((0,) * len(box.sizes), (0,) * len(box.sizes))]:
            moved = tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True))
            yield extents.Box(moved, part.sizes), (at,)
            at += part.volume

    def _wrong(self, what: str) -> CkptdError:
        return CkptdError(what, where=tree.printable(self.name), hint="offsets, sizes and flat count elements")


@dataclass(frozen=True, eq=False)
class Blob:
    """Bytes under a name, which ckptd keeps and never looks into. ``data``: or a function that gives them, asked at each
    snapshot; not asked where they are loaded. per_rank: each rank has its own."""

    key: str
    data: bytes | Callable[[], bytes] | None = None
    per_rank: bool = False

    def get(self) -> bytes:
        """Raises CkptdError: that is no bytes."""
        found = self.data() if callable(self.data) else self.data
        if not isinstance(found, bytes | bytearray | memoryview):
            raise CkptdError(f"a Blob of {type(found).__name__}, not of bytes", where=self.key)
        return bytes(found)


Provider = Callable[[bool], Iterable[Box | Blob]]
Loaded = dict[str, Any]  # key of a Blob -> its bytes; per_rank, and restored into another world: {rank: bytes} of all who saved one


@dataclass(eq=False)
class Boxes:
    """What ``provider(loading)`` gave when it was asked last."""

    name: str
    provider: Provider
    restored: Callable[[Loaded], None] | None = None
    boxes: list[tuple[Box, Placed]] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    loading: bool = False
    _seen: list[Any] = field(default_factory=list)
    _born: set[tuple[int, int]] = field(default_factory=set)

    def ask(self, *, loading: bool) -> None:
        """Raises CkptdError naming what cannot be saved; whatever the provider raises goes on."""
        found = list(self.provider(loading))
        for one in found:
            if not isinstance(one, Box | Blob):
                raise CkptdError(f"the provider gave a {type(one).__name__}, not a Box or a Blob", where=self.name)
        boxes = [(box, box.placed()) for box in found if isinstance(box, Box) if _supported(box)]
        blobs = [one for one in found if isinstance(one, Blob)]
        if not loading:  # what is asked for twice comes twice
            _check_together(boxes, blobs)
        self.boxes, self.blobs, self.loading = boxes, blobs, loading
        self._seen, self._born = self._marks(), _born()

    def changed(self) -> bool:
        """Has a tensor another storage, shape or dtype than when the provider was asked, has an optimizer state that it had not, or
        was that for a restore? An optimizer that has gone gives birth to nothing."""
        return self.loading or self._seen != self._marks() or not _born() <= self._born

    def offered(self, catalogue: Catalogue) -> None:
        """What a restore may have, before it is asked for."""

    def is_per_rank(self, key: str) -> bool:
        return any(blob.per_rank for blob in self.blobs if blob.key == key)

    def give_back(self, loaded: Loaded) -> None:
        """All boxes are written. Raises CkptdError with what ``restored`` raised."""
        try:
            if self.restored is not None:
                self.restored(loaded)
        except Exception as error:
            raise CkptdError(f"its restored() raised {type(error).__name__}: {error}", where=self.name) from error

    def _marks(self) -> list[Any]:
        return [(box.tensor.data_ptr(), box.tensor.shape, box.tensor.dtype) for box, _ in self.boxes]


def _born() -> set[tuple[int, int]]:
    """Optimizer state is born with a step: which have stepped, and how much they have state for."""
    return {(watch.first(optimizer), len(optimizer.state)) for optimizer in watch.stepped()}


def _supported(box: Box) -> bool:
    """Raises CkptdError otherwise."""
    key, tensor = tree.printable(box.name), box.tensor
    if not box.name or not tree.is_text(box.name) or box.name.startswith("$"):
        raise CkptdError("a Box without a key that can be one", where=key, hint="key=, or of=(parameter, state)")
    if not isinstance(tensor, Tensor) or is_dtensor(tensor):
        hint = "a DTensor needs no Box: register() finds out how it lies; or give its to_local()"
        raise CkptdError(f"a Box of a {type(tensor).__name__}", where=key, hint=hint)
    if box.kind not in ROLES:
        raise CkptdError(f"role {box.kind!r}", where=key, hint=f"one of {', '.join(ROLES)}")
    dtypes.name_of(tensor.dtype, key)
    supported.check_tensor(key, tensor)
    return True


def _check_together(boxes: list[tuple[Box, Placed]], blobs: list[Blob]) -> None:
    """Raises CkptdError: two boxes that cannot be of one tensor, or a name that two have."""
    of_key: dict[str, list[tuple[Box, Placed]]] = {}
    for box, placed in boxes:
        of_key.setdefault(box.name, []).append((box, placed))
    for key, found in of_key.items():
        kinds = {(box.tensor.dtype, placed.shape, box.kind) for box, placed in found}
        if len(kinds) > 1:
            told = " and ".join(f"{dtype} {list(shape)} ({role})" for dtype, shape, role in sorted(kinds, key=str))
            raise CkptdError(f"boxes of one key and different kinds: {told}", where=key)
        if len(found) > 1 and not extents.disjoint([part for _, placed in found for part, _ in placed.boxes]):
            raise CkptdError("two boxes of one rank that overlap", where=key, hint="what a rank holds twice it hands over once")
    seen = set(of_key)
    for blob in blobs:
        if blob.key in seen:
            raise CkptdError("two of one name", where=blob.key)
        seen.add(blob.key)
