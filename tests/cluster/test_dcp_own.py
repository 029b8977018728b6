"""What DCP's own tests ask of a writer and a reader, over real daemons: placements into each other, objects, parts of a
checkpoint, faults on one rank, the forms of checkpoint_id, models through get_state_dict() and set_state_dict()."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cluster.nodes import Cluster, Trainer, TrainerError, together

JOB = "own"


def own(world: Sequence[Trainer], what: str, **how: Any) -> list[Any]:
    return together(world, "dcp_own", what=what, **how)


@pytest.mark.chaos
def test_each_placement_into_each_other(nodes: Cluster) -> None:
    """Copies, rows, columns and ShardedTensors of two ranks, of which one has nothing of some."""
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    ways = [["r"], ["0"], ["1"], ["t"]]
    for step, way in enumerate(ways, 1):
        assert own(world, "save_placed", step=step, way=way) == [None] * 2
        for other in ways:
            assert own(world, "load_placed", step=step, way=other) == [True] * 2, (way, other)


@pytest.mark.chaos
def test_meshes_of_two_dimensions_into_each_other_and_into_other_worlds(nodes: Cluster) -> None:
    four = nodes.several(4, memory_budget="256MiB")
    world = nodes.world(four, JOB, kind="explicit")
    ways = [list(way) for way in itertools.product("r01", repeat=2)]
    for step, way in enumerate(ways, 1):
        assert own(world, "save_placed", step=step, way=way) == [None] * 4
        for other in (ways[step % len(ways)], ["0"], ["1"]):
            assert own(world, "load_placed", step=step, way=other) == [True] * 4, (way, other)
    for trainer in world:
        trainer.kill()
    for count, way in ((3, ["1"]), (2, ["0", "1"]), (1, ["r"])):
        world = nodes.world(four[:count], JOB, kind="explicit")
        assert own(world, "load_placed", step=len(ways), way=way) == [True] * count
        for trainer in world:
            trainer.kill()


def test_objects_and_what_one_rank_has_alone(nodes: Cluster) -> None:
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    for found in (*own(world, "save_objects", step=1), *own(world, "load_objects")):
        assert not found, str(found)


def test_a_part_of_it_what_is_not_in_it_and_another_shape(nodes: Cluster) -> None:
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    assert own(world, "save_placed", step=1, way=["0"]) == [None] * 2
    assert own(world, "load_part") == [{"t0": [1.0, 2.0]}] * 2
    assert own(world, "load_part", missing=True, partial=True) == [{"t0": [1.0, 2.0], "nobody": [-3.0, -3.0]}] * 2
    for how, said in (({"missing": True}, "Missing key in checkpoint state_dict: nobody"), ({"taller": 1}, "Size mismatch")):
        found = own(world, "load_part", **how)
        assert all(isinstance(one, TrainerError) and said in str(one) for one in found), found
    assert own(world, "load_part") == [{"t0": [1.0, 2.0]}] * 2


def test_a_fault_of_one_rank_is_heard_by_all_and_the_next_call_works(nodes: Cluster) -> None:
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    steps = itertools.count(1)
    for where, on in (("set_up", 1), ("local", 0), ("global", 0), ("resolve", 1), ("resolve", 0)):
        found = own(world, "save_faulty", step=next(steps), where=where, on=on)
        assert all(isinstance(one, TrainerError) and f"fault in {where}" in str(one) for one in found), (where, found)
        step = next(steps)
        assert own(world, "save_faulty", step=step, where="", on=0) == [None] * 2, where
        assert own(world, "load_faulty", where="", on=0) == [[float(step), f"{step}.0"]] * 2, where
    for where, on in (("local", 1), ("global", 0), ("bytes", 1), ("resolve", 1), ("commit", 0)):
        found = own(world, "load_faulty", where=where, on=on)
        assert all(isinstance(one, TrainerError) and f"fault in {where}" in str(one) for one in found), (where, found)
        assert own(world, "load_faulty", where="", on=0) == [[float(step), f"{step}.0"]] * 2, where


def test_the_forms_of_checkpoint_id(nodes: Cluster) -> None:
    """The last number of it is the step, for each save and load of one writer and one reader; a step that was said counts more."""
    alone = nodes.world(nodes.several(1), JOB, kind="explicit")
    names = ["3", "step-4", "run/step_5", "/tmp/run.x/6/", "epoch=2-step=0007"]
    assert own(alone, "by_id", ids=names) == [[3, 4, 5, 6, 7]]
    assert own(alone, "by_id", ids=["run/8"], step=9) == [[9]]
    for name in ("run", "", "12.ckpt"):
        found = own(alone, "save_by_id", name=name)
        assert "no step" in str(found[0]), found


def test_plans_that_the_planner_keeps(nodes: Cluster) -> None:
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    assert own(world, "save_cached", steps=[1, 2, 3]) == [None] * 2
    assert own(world, "load_faulty", where="", on=0) == [[3.0, "3.0"]] * 2


MODELS = [
    ("ddp", {}), ("fsdp", {}), ("hsdp", {}), ("fsdp", {"flatten_optimizer_state_dict": True}), ("fsdp", {"full_state_dict": True}),
]  # fmt: skip


def test_models_through_get_state_dict_and_set_state_dict(nodes: Cluster) -> None:
    """They train on as if nothing had been between; DDP's into FSDP2 and the other way round."""
    world = nodes.world(nodes.several(2), JOB, kind="explicit")
    for step, (kind, options) in enumerate(MODELS, 1):
        losses = own(world, "train", kind=kind, step=step, options=options)
        assert not any(isinstance(one, TrainerError) for one in losses), (kind, losses)
        others = {kind} if options else {kind, "ddp", "fsdp"}
        for other in sorted(others):
            found = own(world, "go_on", kind=other, options=options)
            assert found == pytest.approx(losses, rel=1e-6), (kind, other)
