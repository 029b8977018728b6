"""Worlds of ranks with real payloads, written and committed through ckptd.persist: for the tests of durable storage."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import numpy as np
import xxhash
from hypothesis import strategies as st

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.core.state_map.writes import assign_writes
from ckptd.persist.commit import commit
from ckptd.persist.pieces import HeldPiece
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Storage
from ckptd.persist.writer import write_pieces
from tests.core.worlds import rows_of, tilings

JOB = "1000/gpt"
DEFAULT = SnapshotId(1, 10)
OBJECTS_CAPACITY = 4096
Values = np.ndarray  # shape (*tensor shape, itemsize), uint8


@dataclass(frozen=True, repr=False)
class Record:
    """What the writer reads of a slot's record."""

    layout: Layout
    sums: bytes
    objects_bytes: int
    tier: int = 0


@dataclass(repr=False)
class World:
    """values: (key, rank or None) -> elements; slots: one payload and record per rank."""

    layouts: dict[int, Layout]
    values: dict[tuple[str, int | None], Values]
    dtypes: dict[tuple[str, int | None], str]
    per_rank: frozenset[str] = frozenset()
    objects: dict[int, dict[str, bytes]] = field(default_factory=dict)
    slots: dict[int, tuple[bytearray, Record]] = field(default_factory=dict)

    def held(self, piece: WritePiece) -> HeldPiece:
        payload, record = self.slots[piece.rank]
        return HeldPiece(piece, memoryview(payload), record, slot=100 + piece.rank)

    def bytes_of(self, key: str, rank: int | None, box: Box) -> bytes:
        spans = zip(box.offsets, box.sizes, strict=True)
        return self.values[key, rank][tuple(slice(at, at + size) for at, size in spans)].tobytes()


def make_world(
    items: Mapping[int, Sequence[LayoutItem]],
    *,
    per_rank: frozenset[str] = frozenset(),
    objects: Mapping[int, dict[str, bytes]] | None = None,
    aliases: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    values: dict[tuple[str, int | None], Values] | None = None,
) -> World:
    """Random bytes for every tensor (or ``values``), cut into the ranks' slots."""
    noise = np.random.default_rng(seed)
    size = len(items)
    world = World({}, {} if values is None else values, {}, per_rank)
    for rank in range(size):
        layout = build_layout(rank, size, items[rank], OBJECTS_CAPACITY, aliases=aliases)
        found = (objects or {}).get(rank, {"rng": f"rng{rank}".encode(), "scheduler": b"same"})
        world.layouts[rank], world.objects[rank] = layout, found
        payload = bytearray(layout.payload_bytes)
        packed = msgpack.packb(found)
        payload[: len(packed)] = packed
        for f in layout.fragments:
            own = rank if f.sharing == MAYBE and f"t:{f.key}" in per_rank else None
            world.dtypes[f.key, own] = f.dtype
            if (f.key, own) not in world.values:
                world.values[f.key, own] = noise.integers(0, 256, (*f.shape, ITEMSIZE[f.dtype]), np.uint8)
            payload[f.offset : f.offset + f.nbytes] = world.bytes_of(f.key, own, f.box)
        world.slots[rank] = payload, Record(layout, slot_sums(payload, layout), len(packed))
    world.per_rank |= {f"o:{name}" for name in _unequal(world.objects)}
    return world


def slot_sums(payload: bytearray, layout: Layout) -> bytes:
    view = memoryview(payload)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + size]) for at, size in layout.blocks())


def _unequal(objects: Mapping[int, dict[str, bytes]]) -> set[str]:
    names = {name for found in objects.values() for name in found}
    return {name for name in names if len({found[name] for found in objects.values() if name in found}) > 1}


@st.composite
def worlds(draw: st.DrawFn, ranks: int = 4, tensors: int = 5) -> World:
    """Every dtype, 0-d to 3-d, empty; sharded at random or in rows, copied, plain equal, each rank's own (also in shape)."""
    size = draw(st.integers(1, ranks))
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(size)}
    per_rank: set[str] = set()
    for number in range(draw(st.integers(1, tensors))):
        key = f"layer.{number}/w"
        dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
        shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        kind = draw(st.sampled_from(("shard", "rows", REPLICA, MAYBE, "own", "unlike")))
        if kind in ("shard", "rows") and 0 not in shape:
            boxes = rows_of(shape, size) if kind == "rows" and shape else draw(tilings(shape))
            for index, box in enumerate(boxes):
                rank = index if kind == "rows" and shape else draw(st.integers(0, size - 1))
                items[rank].append(LayoutItem(key, dtype, shape, box, "param", UNIQUE, 1, draw(st.booleans())))
            continue
        sharing = REPLICA if kind == REPLICA else MAYBE
        own = kind in ("own", "unlike") and size > 1
        if own:
            per_rank.add(f"t:{key}")
        for rank in items:
            mine = (*shape, rank + 1) if own and kind == "unlike" else shape
            items[rank].append(LayoutItem(key, dtype, mine, Box.whole(mine), "buffer", sharing, 1))
    return make_world(items, per_rank=frozenset(per_rank), seed=draw(st.integers(0, 99)))


def epoch_record(
    number: int = 1, size: int = 1, ancestry: Sequence[SnapshotId] = (), nonce: str = ""
) -> EpochRecord:
    nodes = tuple(
        NodeInfo(f"n{i}", f"tcp://127.0.0.1:{i + 1}", f"127.0.0.1:{i + 1}", f"rack{i}") for i in range(size)
    )
    return EpochRecord(
        number, nonce or f"nonce{number}", tuple(n.node for n in nodes), nodes, tuple(ancestry)
    )


def orders(world: World, nodes: int = 2) -> dict[str, list[HeldPiece]]:
    """Who writes what when rank r lives on node r % nodes and is held by the next node, too."""
    holdings: dict[str, list[tuple[int, int]]] = {f"n{node}": [] for node in range(nodes)}
    for rank in world.layouts:
        for node in {rank % nodes, (rank + 1) % nodes}:
            holdings[f"n{node}"].append((rank, 0))
    ordered = assign_writes(world.layouts, holdings, world.per_rank)
    return {node: [world.held(piece) for piece in pieces] for node, pieces in ordered.items()}


def write_all(
    storage: Storage,
    world: World,
    snapshot: SnapshotId,
    attempt: str,
    nodes: int = 2,
    bytes_max: int = 1 << 32,
    *,
    dedup: bool = False,
    compress: bool = False,
    row_deltas: Sequence[str] = (),
) -> list[bytes]:
    storage_order = orders(world, nodes).items()
    return [
        write_pieces(
            storage,
            JOB,
            snapshot,
            attempt,
            node,
            pieces,
            threading.Event(),
            per_rank=world.per_rank,
            bytes_max=bytes_max,
            dedup=dedup,
            compress=compress,
            row_deltas=row_deltas,
        )
        for node, pieces in storage_order
    ]


def commit_all(
    storage: Storage,
    world: World,
    snapshot: SnapshotId,
    reports: Sequence[bytes],
    attempt: str = "a1",
    *,
    keep: bool = False,
    record: EpochRecord | None = None,
) -> None:
    record = record or epoch_record(snapshot.epoch, len(world.layouts))
    commit(storage, JOB, snapshot, attempt, record, reports, world.layouts, world.per_rank, keep)


def save(
    storage: Storage,
    world: World,
    snapshot: SnapshotId = DEFAULT,
    attempt: str = "a1",
    *,
    keep: bool = False,
    dedup: bool = False,
    compress: bool = False,
    row_deltas: Sequence[str] = (),
) -> None:
    reports = write_all(storage, world, snapshot, attempt, dedup=dedup, compress=compress, row_deltas=row_deltas)
    commit_all(storage, world, snapshot, reports, attempt, keep=keep)


def check_all(checkpoint: Checkpoint, world: World, seed: int = 0) -> None:
    """Every tensor whole and a few boxes of each, every object: bit-exact."""
    noise = random.Random(seed)
    for (key, rank), values in world.values.items():
        shape = values.shape[:-1]
        for box in [Box.whole(shape), *(random_box(noise, shape) for _ in range(3))]:
            dest = bytearray(box.volume * values.shape[-1])
            checkpoint.read(key, box, memoryview(dest), rank)
            assert dest == world.bytes_of(key, rank, box), (key, rank, box)
    for rank, objects in world.objects.items():
        for name, blob in objects.items():
            assert checkpoint.object_bytes(name, rank) == blob


def random_box(noise: random.Random, shape: Sequence[int]) -> Box:
    offsets = tuple(noise.randint(0, size) for size in shape)
    return Box(offsets, tuple(noise.randint(0, size - at) for size, at in zip(shape, offsets, strict=True)))


def small_world(ranks: int = 2, seed: int = 0, rows: int = 600) -> World:
    """A few tensors of a few MiB: several blocks, merged rows and columns, a plain one, a per-rank one, a tied one."""
    items: dict[int, list[LayoutItem]] = {rank: [] for rank in range(ranks)}
    wide, tall = (rows, 1024), (512, 8 * ranks)
    for rank, box in enumerate(rows_of(wide, ranks)):
        items[rank].append(LayoutItem("model.wide", "F32", wide, box, "param", UNIQUE, 1))
        column = Box((0, 8 * rank), (512, 8))
        items[rank].append(LayoutItem("model.tall", "BF16", tall, column, "param", UNIQUE, 1))
        items[rank].append(LayoutItem("model.norm", "F32", (5,), Box.whole((5,)), "param", MAYBE, 1))
        items[rank].append(LayoutItem("model.mean", "F64", (3,), Box.whole((3,)), "buffer", MAYBE, 1))
        items[rank].append(LayoutItem("optim.step", "F32", (), Box.whole(()), "optim", MAYBE, 1))
    own = frozenset({"t:model.mean"}) if ranks > 1 else frozenset()
    return make_world(items, per_rank=own, seed=seed, aliases=[("model.head", "model.wide")])
