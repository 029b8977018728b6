"""From a tensor as this rank holds it to N-d boxes of the logical tensor, and who else holds them (design D7)."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.cuts import Place
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE
from ckptd_client import dtypes
from ckptd_client.entries import Copies, Entry, Owner, Placed, State, matches
from ckptd_client.naming import is_dtensor, local_of, root_mesh
from ckptd_client.runs import boxes_of, cut, dim_cuts, in_order
from ckptd_client.supported import check_memory
from ckptd_client.world import World


class Slice(NamedTuple):
    """One box of an entry's logical tensor that lies on this rank. ``at``: its offsets in the local tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    at: tuple[int, ...]
    role: str
    sharing: str
    holders: tuple[int, ...] = ()  # REPLICA: all ranks that hold this box
    captured: bool = True  # False: by definition another rank's value (DDP buffers)
    declared: bool = False  # REPLICA by the user's word alone
    cuts: tuple[Place, ...] | None = None  # that make the box, where it is one of those that they make
    flat: bool = False  # the local tensor holds it in C order from ``at`` on, and has one dimension
    placed: bool = False  # by the program's word

    @property
    def nbytes(self) -> int:
        return self.box.volume * dtypes.TORCH[self.dtype].itemsize

    def of_state(self, key: str) -> Slice:
        """Of an optimizer's tensor that lies as this one does."""
        return self._replace(key=key, role="optim")

    @property
    def stored(self) -> bool:
        """Has a fragment. A tensor that is empty as a whole has one too: the checkpoint must know that it exists."""
        return bool(self.box.volume) or 0 in self.shape

    def view(self, local: Tensor) -> Tensor:
        """The part of the rank's local tensor that is this box."""
        if self.flat:
            return local if self.box.sizes == local.shape else local.narrow(0, self.at[0], self.box.volume).view(self.box.sizes)
        sizes = self.box.sizes[
            len(self.box.sizes) - len(self.at) :
        ]  # a stacked Partial has one dimension more
        if sizes == local.shape:
            return local
        for dim, (start, size) in enumerate(zip(self.at, sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


def slices_of(entry: Entry, world: World) -> list[Slice]:
    """Raises CkptdError naming the key: unknown dtype, tensor subclass, placements that are not understood."""
    tensor = entry.tensor
    check_memory(entry.key, tensor)
    if entry.placed is not None:
        return _of_placed(entry, entry.placed, world)
    if is_dtensor(tensor):
        return _of_dtensor(entry, world)
    return [plain_slice(entry, entry.key, tensor, entry.role, entry.copies, world)]


def plain_slice(entry: Entry, key: str, tensor: Tensor, role: str, copies: Copies | None, world: World) -> Slice:
    """Of a tensor without placements that belongs to the entry's owner. Raises CkptdError naming the key: unknown dtype."""
    shape, box = whole_of(tensor.shape)
    dtype = dtypes.name_of(tensor.dtype, key)
    return Slice(key, dtype, shape, box, box.offsets, role, *_plain_sharing(entry.owner, key, copies, world))


@lru_cache(maxsize=4096)
def whole_of(size: Any) -> tuple[tuple[int, ...], Box]:
    """Of a shape, and its box: thousands of tensors have one."""
    shape = tuple(size)
    return shape, Box.whole(shape)


def declared_name(state: State) -> str:
    """Equal on two ranks that declare the same tensors to be copies: what one of them holds by declaration, both do. Optimizer
    state is left out, which is born later and named by its parameters."""
    entries = [entry for entry in state.entries if entry.role != "optim" and _is_declared(entry.owner, entry.key, entry.copies)]
    rows = sorted(f"{entry.key} {entry.tensor.dtype} {tuple(entry.tensor.shape)}" for entry in entries)
    return _hashed(rows)


def placed_name(state: State) -> str:
    """Equal on two ranks that hold the same boxes of what the program has cut itself; "": there are none."""
    entries = [entry for entry in state.entries if entry.placed is not None and entry.role != "optim"]
    rows = sorted(f"{entry.key} {entry.tensor.dtype} {entry.placed}" for entry in entries)
    return _hashed(rows) if rows else ""


def _hashed(rows: list[str]) -> str:
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()


def _is_declared(owner: Owner, key: str, copies: Copies | None) -> bool:
    """Buffers that DDP broadcasts differ between ranks whatever a pattern says: it must name such a one as it is."""
    if copies is not None and copies.first_only:
        return key in owner.replicated
    return matches(key, owner.replicated)


def _plain_sharing(owner: Owner, key: str, copies: Copies | None, world: World) -> tuple[str, tuple[int, ...], bool, bool]:
    """(sharing, holders, captured, declared). What structure says of the whole job needs no declaration."""
    if world.size == 1:
        return UNIQUE, (), True, False
    declared = _is_declared(owner, key, copies)
    if copies is not None and len(copies.ranks) == world.size:
        if not copies.first_only:
            return REPLICA, world.everyone, True, False
        if not declared:
            return UNIQUE, (), world.rank == min(copies.ranks), False
    if declared:
        return REPLICA, world.declaring, True, True
    return MAYBE, (), True, False  # equal names elsewhere may or may not be copies: each snapshot decides


def _of_placed(entry: Entry, placed: Placed, world: World) -> list[Slice]:
    """Of boxes nobody knows what others hold: a rank that has the same one has a copy, which must be equal. A rule says it of all
    ranks, or it says nothing. Ranks that have had all boxes in common since they met capture copies together."""
    dtype = dtypes.name_of(entry.tensor.dtype, entry.key)
    kind = (entry.role, *_placed_sharing(entry, placed, world))
    boxes = placed.boxes or ((_nothing(placed.shape, (0,) * len(placed.shape)), (0,) * len(placed.shape)),)
    return [Slice(entry.key, dtype, placed.shape, box, at, *kind, flat=placed.flat, placed=True) for box, at in boxes]


def _placed_sharing(entry: Entry, placed: Placed, world: World) -> tuple[str, tuple[int, ...], bool, bool]:
    """(sharing, holders, captured, declared)."""
    if world.size == 1 or (placed.alone and placed.ranks == world.size):
        return UNIQUE, (), True, False
    if placed.ranks not in (0, world.size):
        return MAYBE, (), True, False
    if entry.role == "optim" and not placed.ranks:  # born with a step: nobody has heard of it when the ranks meet
        return REPLICA, (world.rank,), True, False
    return REPLICA, world.together or (world.rank,), True, True


def _of_dtensor(entry: Entry, world: World) -> list[Slice]:
    tensor: Any = entry.tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(tensor.shape)
    local = local_of(tensor)
    mesh_shape = tuple(mesh.mesh.shape)
    by_dim = [dim_cuts(dim, mesh_shape, coordinate, placements, entry.key) for dim in range(len(shape))]
    runs = [cut([(0, size)], cuts) for size, cuts in zip(shape, by_dim, strict=True)]
    expected = tuple(sum(length for _, length in dim) for dim in runs)
    if expected != tuple(local.shape):
        raise CkptdError(
            f"placements {placements} promise a local shape {list(expected)}, it is {list(local.shape)}",
            where=entry.key, hint="this sharding is not understood; report it with the placements",
        )  # fmt: skip
    sharing, holders, declared = _dtensor_sharing(entry, coordinate, world)
    dtype = dtypes.name_of(tensor.dtype, entry.key)
    if 0 in shape:  # nothing to hold, but the checkpoint must know that it exists
        whole = Box.whole(shape)
        empty = MAYBE if sharing == MAYBE else UNIQUE
        return [Slice(entry.key, dtype, shape, whole, whole.offsets, entry.role, empty)]
    boxes = boxes_of(runs) or [(_nothing(shape, expected), (0,) * len(shape))]
    orders = list(map(in_order, by_dim))
    places = None if None in orders else tuple((dim, *cut) for dim, order in enumerate(orders) for cut in order or ())
    kind = (entry.role, sharing, holders, True, declared, places)
    found = [Slice(entry.key, dtype, shape, box, at, *kind) for box, at in boxes]
    if any(placement.is_partial() for placement in placements):
        return [_stacked(part, world) for part in found]
    return found


def _nothing(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """An uneven shard that is empty: planned like the others, so that all ranks plan alike, but never stored."""
    return Box(tuple(0 if size else extent for extent, size in zip(shape, sizes, strict=True)), sizes)


def _stacked(part: Slice, world: World) -> Slice:
    """A Partial value means nothing without all the others: kept as row ``rank`` of a [world, ...] tensor, so that
    only the same world can take it back."""
    box = Box((world.rank, *part.box.offsets), (1, *part.box.sizes))
    cuts = None
    if part.cuts is not None:
        cuts = ((0, world.size, world.rank), *((dim + 1, parts, at) for dim, parts, at in part.cuts))
    return Slice(part.key, part.dtype, (world.size, *part.shape), box, part.at, part.role, UNIQUE, cuts=cuts)


def _dtensor_sharing(
    entry: Entry, coordinate: Sequence[int], world: World
) -> tuple[str, tuple[int, ...], bool]:
    """(sharing, holders, declared)."""
    if world.size == 1:
        return UNIQUE, (), False
    tensor: Any = entry.tensor
    mesh = tensor.device_mesh
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    holders = tuple(sorted(int(rank) for rank in mesh.mesh[index].reshape(-1).tolist()))
    if mesh.size() == world.size:
        return (REPLICA, holders, False) if len(holders) > 1 else (UNIQUE, (), False)
    if _is_declared(entry.owner, entry.key, entry.copies):
        alike = set(world.declaring)
        return REPLICA, tuple(rank for rank in _in_all_cuts(mesh, holders, world) if rank in alike), True
    return MAYBE, (), False  # a sub-mesh: other parts of the job may hold other values


def _in_all_cuts(mesh: Any, holders: tuple[int, ...], world: World) -> tuple[int, ...]:
    """Whoever holds what ``holders`` hold, when all sub-meshes of the job hold the same.

    Known where the sub-mesh was cut from a mesh that spans the job: the ranks at the same places of its sister cuts. Else
    each rank answers for itself: more copies are captured than needed, never fewer.
    """
    root = root_mesh(mesh)
    if root.size() != world.size:
        return (world.rank,)
    everyone, members = (tuple(whole.mesh.reshape(-1).tolist()) for whole in (root, mesh))
    return _sisters(tuple(root.mesh.shape), everyone, members, holders) or (world.rank,)


@lru_cache(maxsize=1024)
def _sisters(
    shape: tuple[int, ...], everyone: tuple[int, ...], members: tuple[int, ...], holders: tuple[int, ...]
) -> tuple[int, ...]:
    """``everyone``: the ranks of a mesh of ``shape``, of which ``members`` are a cut, some of which are ``holders``. Nobody
    when the cut does not take whole dimensions (unflattened meshes)."""
    places = dict(zip(everyone, itertools.product(*map(range, shape)), strict=True))
    first = places[members[0]]
    along = [dim for dim in range(len(shape)) if any(places[rank][dim] != first[dim] for rank in members)]
    if math.prod(shape[dim] for dim in along) != len(members):
        return ()
    wanted = {tuple(places[rank][dim] for dim in along) for rank in holders}
    return tuple(
        sorted(rank for rank, place in places.items() if tuple(place[dim] for dim in along) in wanted)
    )
