"""What each of thousands of ranks would have captured, as layouts: no tensor is there (P16).

A rank's layout is made of columns alone, in a millisecond, and kept by nobody here.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np

from ckptd.core.ids import NodeInfo
from ckptd.core.state_map.agreement import TENSORS
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.fragments import Fragments, Table
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout, align_up, followed
from ckptd.core.state_map.recovery import Want

Rule = tuple[tuple[int, int], ...]  # (dimension, parts) of each cut

MESHES = ("fsdp", "fsdp+tp", "fsdp+tp+pp+ep", "zero", "ddp")
WHOLE_MESHES = ("zero", "ddp")  # each rank stores whole tensors
WORDS = tuple(sorted(("F32", "param", UNIQUE, REPLICA, MAYBE)))
OBJECTS_BYTES = 4096
WIDTH = 16  # elements of each rank's share along one dimension
STAGES = 16
EXPERT_OF = 4  # one tensor of so many is of experts, all of one layer stacked
EXPERT_PARALLEL = 8  # ranks that hold different experts
MAYBE_OF = 100  # one tensor of so many is a plain value of equal name on all ranks
UNEQUAL_OF = 100  # ... and one of so many of those differs between ranks
ODD_RANKS = 20  # have another layout


@dataclass(frozen=True)
class State:
    """``total`` logical tensors of this shape. odd: ODD_RANKS have one tensor that the others lack. first: number of the first
    node, when those before it are gone."""

    mesh: str
    nodes: int
    each: int  # ranks per node
    total: int
    shape: tuple[int, int]
    odd: bool = False
    first: int = 0

    @staticmethod
    def of(mesh: str, nodes: int, each: int, tensors: int, odd: bool) -> State:
        """tensors: that each rank has a part of, or all of them."""
        made = State(mesh, nodes, each, tensors, (WIDTH, WIDTH), odd)
        along, across, stages = made._cuts
        shape = (WIDTH, WIDTH) if mesh in WHOLE_MESHES else (along * WIDTH, across * WIDTH)
        return State(mesh, nodes, each, tensors * stages, shape, odd)

    def into(self, nodes: int, first: int = 0) -> State:
        """The tensors that all ranks have, in another world."""
        return replace(self, nodes=nodes, odd=False, first=first)

    @property
    def world(self) -> int:
        return self.nodes * self.each

    def members(self) -> tuple[NodeInfo, ...]:
        numbers = range(self.first, self.first + self.nodes)
        return tuple(NodeInfo(f"n{i}", f"tcp://n{i}", f"n{i}", f"d{i}", f"n{i}#1") for i in numbers)

    def ranks(self) -> tuple[str, ...]:
        return tuple(f"n{self.first + rank // self.each}" for rank in range(self.world))

    # --- the mesh -----------------------------------------------------------------------------------------------
    @property
    def _cuts(self) -> tuple[int, int, int]:
        """(along dimension 0, along dimension 1, pipeline stages)."""
        tp = self.each if self.mesh in ("fsdp+tp", "fsdp+tp+pp+ep") else 1
        pp = min(STAGES, self.nodes) if self.mesh == "fsdp+tp+pp+ep" else 1
        return self.world // tp // pp, tp, pp

    def place(self, rank: int) -> tuple[int, int, int]:
        along, across, _ = self._cuts
        return rank // across % along, rank % across, rank // across // along

    def _rules(self) -> list[Rule]:
        """How its tensors are cut: plain values, parameters, those of experts."""
        if self.mesh in WHOLE_MESHES:
            return [()]
        along, across, _ = self._cuts
        experts = min(EXPERT_PARALLEL, along * across)
        more = [((0, experts), (0, along * across // experts))] if self.mesh.endswith("+ep") else []
        return [(), ((0, along), (1, across)), *more]

    def _places(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Where it stands in each of them."""
        at, beside, _ = self.place(rank)
        number = at * self._cuts[1] + beside
        return tuple(divmod(number, rule[1][1]) if rule else () for rule in self._rules())

    def _which(self, rank: int) -> tuple[range, ...]:
        """Numbers of the logical tensors that the rank stores. Of what every rank has whole each captures its part of them, and of
        copies that of a rank on the node before, too."""
        if self.mesh in WHOLE_MESHES:
            ranks = [rank] if self.mesh == "zero" else sorted({rank, (rank - self.each) % self.world})
            return tuple(range(at * self.total // self.world, (at + 1) * self.total // self.world) for at in ranks)
        stage, stages = self.place(rank)[2], self._cuts[2]
        return (range(stage * self.total // stages, (stage + 1) * self.total // stages),)

    def layout(self, rank: int) -> Layout:
        odd = self.odd and rank < ODD_RANKS
        table = _table(self.mesh, self._which(rank), self.shape, tuple(self._rules()), odd)
        places = self._places(rank)
        nothing = np.empty(0, np.int64)
        nbytes = table.once(table.nbytes(table.boxes(places, nothing, nothing)[1], 1 << 50))
        offset = followed(table, nbytes, OBJECTS_BYTES, len(nbytes.column))
        fragments = Fragments.of(table, places, {"offsets": nothing, "sizes": nothing}, nbytes, offset)
        end = align_up(int((fragments.offset + fragments.nbytes).max(initial=OBJECTS_BYTES)))
        return Layout(rank, self.world, fragments, OBJECTS_BYTES, end, "plan")

    def tables(self) -> set[Table]:
        """Of all ranks."""
        return {self.layout(rank).fragments.table for rank in range(self.world)}

    def digests(self, layout: Layout, step: int) -> tuple[tuple[str, bytes], ...]:
        """As the arena makes them. Of one in UNEQUAL_OF plain values each rank has its own."""
        found = []
        for key, sharing in _shared(layout.fragments.table):
            number = zlib.crc32(key.encode())
            own = sharing == MAYBE and number % UNEQUAL_OF == 0
            found.append(f"{number} {step} {layout.rank if own else ''}".encode().ljust(16)[:16])
        return ((TENSORS, b"".join(found)), ("o:rng", str(layout.rank).encode().ljust(16)))

    def wants(self, rank: int) -> list[Want]:
        """What a rank of this world asks for of what any world stored."""
        layout = self.layout(rank)
        keys, dtypes, shapes, offsets, sizes, *_ = layout.fragments.columns()
        rows = zip(keys, dtypes, shapes, offsets, sizes, strict=True)
        return [Want(i, key, dtype, shape, Box(at, size)) for i, (key, dtype, shape, at, size) in enumerate(rows)]


@lru_cache(maxsize=8)
def _shared(table: Table) -> list[tuple[str, str]]:
    names = (table.words[at] for at in table.sharing.tolist())
    return [(key, sharing) for key, sharing in zip(table.keys, names, strict=True) if sharing != UNIQUE]


@lru_cache(maxsize=64)
def _table(mesh: str, which: tuple[range, ...], shape: tuple[int, int], rules: tuple[Rule, ...], odd: bool) -> Table:
    numbers = [*chain.from_iterable(which)]
    numbers += numbers[-1:] if odd else []
    keys = [f"layers.{number // 16}.self_attn.projection_{number % 16}.weight" for number in numbers]
    if odd and keys:
        keys[-1] += ".more"
    count = len(numbers)
    number = np.array(numbers, np.int64)
    maybe = (number % MAYBE_OF == 0) & (len(rules) > 1)
    expert = (number % EXPERT_OF == 1) & (len(rules) > 2)
    shapes = np.broadcast_to(np.array(shape, np.int64), (count, 2)).copy()
    shapes[maybe], shapes[expert] = (1, WIDTH), (shape[0] * shape[1] // WIDTH, WIDTH)
    sharing = np.where(maybe, WORDS.index(MAYBE), WORDS.index(REPLICA if mesh == "ddp" else UNIQUE))
    columns = {
        "dtype": np.full(count, WORDS.index("F32")), "role": np.full(count, WORDS.index("param")), "sharing": sharing,
        "tier": np.full(count, 0 if mesh == "ddp" else 1), "dims": np.full(count, 2),
        "rule": np.where(maybe | (len(rules) == 1), 1, np.where(expert, 3, 2)), "shape": shapes.reshape(-1),
    }  # fmt: skip
    return Table.of(tuple(keys), WORDS, {name: column.astype(np.int64) for name, column in columns.items()}, rules)
