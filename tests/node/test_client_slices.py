"""Tensors to boxes (D7): whatever the placements, this rank's part is the concatenation of its boxes of the full tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckptd_client import dtypes, own
from ckptd_client.entries import Copies, Entry, Mode, Owner, State
from ckptd_client.placing import Axes, check
from ckptd_client.plan import make_plan
from ckptd_client.slices import Slice, declared_name, slices_of
from ckptd_client.world import World
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.agreement import Agreement, agree, tensor_name
from ckptd.core.state_map.box import Box, covers, disjoint
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.layout import MAYBE, REPLICA, UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout

OWNER = Owner("model", "module", None)


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[World]:
    """A process group of ``size`` in which nobody answers: enough for arithmetic."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        yield World(rank, size, tuple(f"n{r}" for r in range(size)))
    finally:
        dist.destroy_process_group()


def entry(tensor: torch.Tensor, **extra: Any) -> Entry:
    return Entry("model.w", tensor, "param", extra.pop("owner", OWNER), Mode.FENCED, **extra)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def dtensor(local: torch.Tensor, mesh: Any, placements: Any, like: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def follows(part: Slice) -> bool:
    """Is its box what its cuts make?"""
    item = LayoutItem(part.key, part.dtype, part.shape, part.box, part.role, part.sharing, 1, False, part.cuts)
    return not len(build_layout(0, 1, [item]).fragments.own["sizes"])


LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((4,), (8, 3), [Shard(0)]),
    ((4,), (13, 3), [Shard(0)]),
    ((4,), (3, 3), [Shard(0)]),  # the last rank holds nothing
    ((4,), (3, 9), [Shard(1)]),
    ((4,), (5,), [Replicate()]),
    ((4,), (), [Replicate()]),
    ((4,), (0, 3), [Shard(0)]),
    ((2, 2), (7, 5), [Replicate(), Shard(0)]),
    ((2, 2), (7, 5), [Shard(0), Shard(1)]),
    ((2, 2), (7, 5), [Shard(0), Shard(0)]),
    ((2, 3), (7, 5), [_StridedShard(0, split_factor=3), Replicate()]),  # alone: several boxes
    ((2, 2), (16, 5), [_StridedShard(0, split_factor=2), Replicate()]),
]


def split(placement: Any, tensor: Any, parts: int) -> Any:
    try:
        return placement._split_tensor(tensor, parts, with_padding=False, contiguous=True)[0]
    except AssertionError as error:
        if "only allows even sharding" in str(error):
            pytest.skip(f"torch {torch.__version__} itself refuses uneven strided shards")
        raise


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), LAYOUTS, ids=[str(case) for case in LAYOUTS])
def test_a_ranks_boxes_are_its_local_tensor(mesh_shape: Any, shape: Any, placements: Any) -> None:
    size = torch.Size(mesh_shape).numel()
    full = numbers(shape)
    everything: dict[Box, str] = {}
    for rank in range(size):
        with rank_of(rank, size) as world:
            mesh = init_device_mesh("cpu", mesh_shape)
            local = full
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():
                    parts = split(placement, local, mesh_shape[dim])
                    local = parts[mesh.get_coordinate()[dim]]
            tensor = dtensor(local.clone(), mesh, placements, full)
            for part in slices_of(entry(tensor), world):
                assert torch.equal(part.view(tensor.to_local()), cut(full, part.box))
                everything[part.box] = part.sharing
                alone = isinstance(placements[0], _StridedShard)
                assert follows(part) == (not alone or (part.cuts is None and part.box == Box.whole(shape))) or not part.stored
                assert (part.sharing == REPLICA) == any(p.is_replicate() for p in placements)
    assert covers(tuple(shape), everything)
    assert disjoint(list(everything))


def test_fsdp_on_tp_is_cut_right_to_left_even_where_that_is_uneven() -> None:
    """FSDP2 shards what TP left: [_StridedShard, Shard]. 9 rows over tp=2 and dp=4: (5, 4) rows, in shares of (2, 1)."""
    full, boxes = numbers((9, 2)), []
    for rank in range(8):
        with rank_of(rank, 8) as world:
            mesh = init_device_mesh("cpu", (4, 2))
            dp, tp = mesh.get_coordinate()
            of_tp = full.chunk(2)[tp]
            mine = list(of_tp.chunk(4))
            local = mine[dp] if dp < len(mine) else full[:0]
            tensor = dtensor(local.clone(), mesh, [_StridedShard(0, split_factor=2), Shard(0)], full)
            for part in slices_of(entry(tensor), world):
                if part.box.volume:
                    assert torch.equal(part.view(local), cut(full, part.box)) and follows(part)
                    boxes.append(part.box)
    assert covers((9, 2), boxes)
    assert disjoint(boxes)


def test_a_placement_that_does_not_fit_its_local_tensor_is_refused_by_name() -> None:
    with rank_of(0, 4) as world:
        mesh = init_device_mesh("cpu", (4,))
        tensor = dtensor(torch.zeros(5, 3), mesh, [Shard(0)], torch.zeros(8, 3))
        with pytest.raises(CkptdError, match=r"model\.w"):
            slices_of(entry(tensor), world)


def test_own_is_for_what_a_rank_has_whole() -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        model = torch.nn.Linear(3, 4)
        model.weight = torch.nn.Parameter(dtensor(torch.zeros(2, 3), mesh, [Shard(0)], torch.zeros(4, 3)))
        rules = {"model.weight": own("mean")}
        owner = Owner("model", "module", model, rules=rules, axes=Axes())
        with pytest.raises(CkptdError, match="cut by torch"):
            check([owner])
        owner.rules = {"model.*": own("mean")}  # the bias is whole
        check([owner])


def test_partial_values_fit_only_the_same_world() -> None:
    with rank_of(2, 4) as world:
        mesh = init_device_mesh("cpu", (4,))
        (part,) = slices_of(
            entry(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)), world
        )
        assert (part.shape, part.box, part.sharing) == ((4, 3), Box((2, 0), (1, 3)), UNIQUE) and follows(part)


def test_who_shares_is_structure_or_declaration_never_a_guess() -> None:
    with rank_of(1, 4) as world:
        plain = torch.zeros(3)

        def sharing(**extra: Any) -> tuple[str, bool]:
            (part,) = slices_of(entry(plain, **extra), world)
            return part.sharing, part.captured

        assert sharing() == (MAYBE, True)
        assert sharing(copies=Copies((0, 1, 2, 3))) == (REPLICA, True)
        assert sharing(copies=Copies((0, 1))) == (
            MAYBE,
            True,
        )  # a pipeline stage: its namesake may hold another value
        assert sharing(copies=Copies((0, 1, 2, 3), first_only=True)) == (UNIQUE, False)
        declared = Owner("model", "module", None, replicated=("model.*",))
        assert sharing(owner=declared) == (REPLICA, True)
        sub = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        sharded = distribute_tensor(torch.zeros(4), sub, [Shard(0)], src_data_rank=None)
        assert [part.sharing for part in slices_of(entry(sharded), world)] == [MAYBE]


DECLARED = Owner("model", "module", None, replicated=("model.*",))


def test_what_ddp_broadcasts_is_its_first_ranks_whatever_a_pattern_says() -> None:
    """BatchNorm's statistics differ between ranks: a pattern that happens to match them would void every snapshot."""
    world = World(1, 4, ("n0", "n1", "n2", "n3"))

    def sharing(copies: Copies, *patterns: str) -> tuple[str, bool]:
        owner = Owner("model", "module", None, replicated=patterns)
        (part,) = slices_of(entry(torch.zeros(3), owner=owner, copies=copies), world)
        return part.sharing, part.captured

    whole, group = Copies((0, 1, 2, 3), first_only=True), Copies((0, 1), first_only=True)
    assert sharing(whole, "*") == sharing(whole, "model.*", "other") == (UNIQUE, False)
    assert sharing(group, "*") == (MAYBE, True)
    assert sharing(whole, "model.w") == (REPLICA, True)  # whoever names it as it is, means it
    assert sharing(Copies((0, 1)), "*") == (REPLICA, True)  # a parameter


def staged(rank: int, keys: tuple[str, ...], alike: tuple[int, ...], replicas: int = 0) -> Layout:
    """Four ranks on four nodes; what they hold is declared, nothing more is known."""
    world = World(rank, 4, ("n0", "n1", "n2", "n3"), alike=alike)
    owner = Owner("model", "module", None, replicated=("*",))
    entries = [Entry(key, torch.zeros(8), "param", owner, Mode.FENCED) for key in keys]
    return make_plan(State(entries), world, replicas, 0, None).layout


def test_declared_keys_of_pipeline_stages_are_captured_within_each_stage() -> None:
    """What a pattern matches is on the ranks that have it: planned over all ranks, some keys would be captured by nobody."""
    stages = {rank: ("both", f"s{rank // 2}.a", f"s{rank // 2}.b") for rank in range(4)}
    pairs = {rank: tuple(other for other in range(4) if other // 2 == rank // 2) for rank in range(4)}
    layouts = {rank: staged(rank, keys, pairs[rank]) for rank, keys in stages.items()}
    held = sorted((f.key, rank // 2) for rank, layout in layouts.items() for f in layout.fragments)
    assert held == sorted([("both", 0), ("both", 1), ("s0.a", 0), ("s0.b", 0), ("s1.a", 1), ("s1.b", 1)])
    sums = {r: [(tensor_name(f.key, f.box), b"-" * 16) for f in of.fragments] for r, of in layouts.items()}
    assert agree(layouts, sums) == Agreement((), ())


def test_ranks_of_one_stage_that_hold_other_keys_void_the_snapshot() -> None:
    """They registered more since they met: the plan of each leaves to the other what that one does not have."""
    alike = (0, 1), (0, 1), (2, 3), (2, 3)
    layouts = {rank: staged(rank, ("a", "b") if rank == 1 else ("a",), alike[rank]) for rank in range(4)}
    (error,) = agree(layouts, {rank: [] for rank in range(4)}).errors
    assert error.startswith("ranks 0, 1 captured by different plans")


def test_a_name_of_what_is_declared() -> None:
    def name(*entries: Entry) -> str:
        return declared_name(State(list(entries)))

    mine, other = (entry(torch.zeros(size), owner=DECLARED) for size in (3, 4))
    buffer = entry(torch.zeros(9), owner=DECLARED, copies=Copies((0, 1), first_only=True))
    assert name(mine) == name(mine, buffer) == name(mine, entry(torch.zeros(2)))
    assert len({name(), name(mine), name(other), name(mine, other)}) == 4


def test_declared_copies_over_sister_meshes_are_captured_once() -> None:
    """A model shard for each of two data-parallel replicas, which only the user's word says are equal (D7, D8)."""
    boxes, ids = [], set()
    for rank in range(8):
        with rank_of(rank, 8) as world:
            shard = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copy", "shard"))["shard"]
            tensor = distribute_tensor(numbers((6, 3)), shard, [Shard(0)], src_data_rank=None)
            (part,) = slices_of(entry(tensor, owner=DECLARED), world)
            assert (part.sharing, part.holders) == (REPLICA, (rank % 4, rank % 4 + 4))
            layout = make_plan(State([entry(tensor, owner=DECLARED)]), world, 0, 0, None).layout
            ids.add(layout.plan_id)
            boxes += [f.box for f in layout.fragments]
    assert len(ids) == 1
    assert len(boxes) == len(set(boxes))
    assert covers((6, 3), boxes)


def test_declared_copies_along_two_dimensions_of_three() -> None:
    with rank_of(5, 8) as world:
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        tensor = distribute_tensor(
            numbers((6, 3)), root["a", "c"], [Shard(0), Replicate()], src_data_rank=None
        )
        (part,) = slices_of(entry(tensor, owner=DECLARED), world)
        assert (part.sharing, part.holders) == (REPLICA, (4, 5, 6, 7))


def test_declared_copies_over_meshes_that_know_nothing_of_each_other_are_captured_by_all() -> None:
    """Who else holds what cannot be told; that they are equal still holds."""
    for rank in range(4):
        with rank_of(rank, 4) as world:
            mesh = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
            tensor = distribute_tensor(numbers((6, 3)), mesh, [Replicate()], src_data_rank=None)
            (part,) = slices_of(entry(tensor, owner=DECLARED), world)
            assert (part.sharing, part.holders) == (REPLICA, (rank,))
            (fragment,) = make_plan(
                State([entry(tensor, owner=DECLARED)]), world, 1, 0, None
            ).layout.fragments
            assert fragment.tier == 1


def test_an_empty_tensor_of_a_sub_mesh_may_have_a_namesake_that_is_not() -> None:
    with rank_of(1, 4) as world:
        sub = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        empty = distribute_tensor(torch.zeros(0, 3), sub, [Shard(0)], src_data_rank=None)
        assert [part.sharing for part in slices_of(entry(empty), world)] == [MAYBE]


def plans(tensors: dict[str, tuple[torch.Tensor, Copies | None]], world: World, replicas: int) -> Any:
    entries = [
        Entry(key, tensor, "param", OWNER, Mode.FENCED, copies) for key, (tensor, copies) in tensors.items()
    ]
    return make_plan(State(entries), world, replicas, 0, None)


def test_copies_are_captured_only_as_often_as_protection_needs() -> None:
    """DDP on four ranks, two nodes: with replicas=1 every tensor is captured once per node, and crosses no network (D8)."""
    everyone = Copies((0, 1, 2, 3))
    tensors = {f"w{i}": (torch.zeros(1000 + i), everyone) for i in range(20)}
    nodes = ({"node": "a", "domain": "A"}, {"node": "b", "domain": "B"})
    made = [plans(tensors, World(rank, 4, ("a", "a", "b", "b"), nodes), 1) for rank in range(4)]
    keys = [{f.key for f in plan.layout.fragments} for plan in made]
    assert keys[0] | keys[1] == keys[2] | keys[3] == set(tensors)
    assert not keys[0] & keys[1]
    assert not keys[2] & keys[3]
    assert {f.tier for plan in made for f in plan.layout.fragments} == {0}
    assert len({plan.layout.plan_id for plan in made}) == 1
    sizes = [plan.layout.payload_bytes for plan in made]
    assert max(sizes) < 1.2 * min(sizes)
    alone = plans(tensors, World(0, 4, ("a",) * 4, nodes[:1]), 1)
    assert {f.tier for f in alone.layout.fragments} == {1}  # one domain only: the network must make the copy


def test_hsdp_ranks_of_different_shards_agree_on_the_plan_even_where_shards_are_empty() -> None:
    ids, boxes = set(), []
    for rank in range(8):
        with rank_of(rank, 8) as world:
            mesh = init_device_mesh("cpu", (2, 4))
            whole = {f"w{rows}": numbers((rows, 3)) for rows in (3, 5, 8)}
            tensors = {
                key: (distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None), None)
                for key, full in whole.items()
            }
            layout = plans(tensors, world, 0).layout
            ids.add(layout.plan_id)
            boxes += [(f.key, f.box) for f in layout.fragments]
    assert len(ids) == 1
    assert len(boxes) == len(set(boxes))  # replicas=0: every box is captured once
    for key, rows in (("w3", 3), ("w5", 5), ("w8", 8)):
        assert covers((rows, 3), [box for of, box in boxes if of == key])


def test_the_plan_is_kept_until_the_structure_changes() -> None:
    world = World()
    state = State([entry(torch.zeros(5))])
    first = make_plan(state, world, 0, 10, None)
    assert make_plan(State([entry(torch.ones(5))]), world, 0, 20, first) is first
    assert make_plan(State([entry(torch.ones(6))]), world, 0, 20, first) is not first
    assert make_plan(State([entry(torch.ones(5, dtype=torch.int8))]), world, 0, 20, first) is not first
    grown = make_plan(state, world, 0, 1 << 20, first)
    assert grown.layout.objects_capacity == 1 << 21


def parts_of(tensor: torch.Tensor) -> list[Slice]:
    return slices_of(entry(tensor), World())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_plain_tensors_of_every_shape(shape: tuple[int, ...]) -> None:
    (part,) = parts_of(torch.zeros(shape))
    assert part.box == Box.whole(shape)
    assert part.stored


def test_what_is_not_dense_memory_is_refused_by_name() -> None:
    for strange in (torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(CkptdError, match=r"model\.w"):
            parts_of(strange)


def test_dtypes_have_the_names_and_sizes_of_the_core() -> None:
    assert set(ITEMSIZE) - set(dtypes.TORCH) <= {"F8_E8M0"}  # younger than the oldest torch
    assert len(set(dtypes.NAME.values())) == len(dtypes.NAME)
    for name, dtype in dtypes.TORCH.items():
        assert dtype.itemsize == ITEMSIZE[name]
