"""Canonical names (D7): wrappers go by their type; a piece of a name that looks like one stays."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ckptd_client import CkptdError, naming, resolve
from ckptd_client.entries import Copies, Mode
from ckptd_client.registry import Registry
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def _group() -> object:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def names(module: nn.Module) -> list[str]:
    return [spot.name for spot in naming.walk(module)[0]]


class Awkward(nn.Module):
    """Attributes that are called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)
        self._checkpoint_wrapped_module = nn.BatchNorm1d(2)


AWKWARD = [
    "module.weight", "_orig_mod.weight", "_checkpoint_wrapped_module.weight", "_checkpoint_wrapped_module.bias",
    "_checkpoint_wrapped_module.running_mean", "_checkpoint_wrapped_module.running_var",
    "_checkpoint_wrapped_module.num_batches_tracked",
]  # fmt: skip


def test_names_that_look_like_wrappers_stay() -> None:
    assert names(Awkward()) == AWKWARD


@pytest.mark.usefixtures("_group")
def test_wrappers_leave_no_trace_in_any_nesting() -> None:
    inner = Awkward()
    inner.module = checkpoint_wrapper(inner.module)
    ddp = nn.parallel.DistributedDataParallel(inner)
    assert names(ddp) == AWKWARD
    assert names(torch.compile(ddp, backend="eager")) == AWKWARD
    assert names(nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(nn.Linear(2, 2))))) == [
        "0.weight",
        "0.bias",
    ]


@pytest.mark.usefixtures("_group")
def test_replicas_that_differ_between_two_averagings_are_refused() -> None:
    """P1: a restore gave every rank a mixture of them (a framework's author)."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    ddp.register_comm_hook(PostLocalSGDState(None, None, start_localSGD_iter=1), post_localSGD_hook)
    with pytest.raises(CkptdError, match="it averages now and then") as caught:
        naming.walk(ddp)
    assert ".module" in str(caught.value)
    assert names(ddp.module) == ["weight", "bias"]


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated")
def test_ddp_says_what_is_a_copy_and_whose_the_buffers_are() -> None:
    inner = Awkward()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["module.weight"])
    model = nn.Sequential(nn.parallel.DistributedDataParallel(inner), nn.Linear(2, 2, bias=False))
    spots = {spot.name: spot.copies for spot in naming.walk(model)[0]}
    everyone = (0, 1, 2, 3)
    assert spots["0._orig_mod.weight"] == Copies(everyone)
    assert spots["0._checkpoint_wrapped_module.running_mean"] == Copies(everyone, first_only=True)
    assert spots["0.module.weight"] is None  # DDP was told to leave it alone
    assert spots["1.weight"] is None
    quiet = nn.parallel.DistributedDataParallel(Awkward(), broadcast_buffers=False)
    spots = {spot.name: spot.copies for spot in naming.walk(quiet)[0]}
    assert spots["_checkpoint_wrapped_module.running_mean"] is None  # then they are each rank's own


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it is imported
def test_what_is_not_supported_is_refused_by_name() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4)
    with pytest.raises(CkptdError, match="ZeroRedundancyOptimizer"):
        Registry().register(
            {"optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)}
        )
    fsdp1 = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(fsdp1)
    with pytest.raises(CkptdError, match="FSDP1") as caught:
        names(fsdp1)
    assert "fully_shard" in caught.value.hint


class HandWritten(AveragedModel):
    def update_parameters(self, model: nn.Module) -> None:
        for mine, its in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.5).add_(its.data, alpha=0.5)


def test_an_average_whose_update_does_not_fence_is_copied_at_once() -> None:
    """It was taken for AveragedModel's own, which waits: a write through .data behind snapshot() made a torn, durable one (P1)."""
    own, instead = HandWritten(nn.Linear(3, 3)), AveragedModel(nn.Linear(3, 3))
    instead.update_parameters = print
    registry = Registry()
    registry.register({"own": own, "instead": instead, "averaged": AveragedModel(nn.Linear(3, 3))})
    modes = {entry.key: entry.mode for entry in resolve.tensors(registry).entries}
    assert modes["own.module.weight"] is modes["instead.module.weight"] is Mode.SYNC
    assert modes["averaged.module.weight"] is Mode.FENCED


def test_who_copies_what_when() -> None:
    """D6: fenced what an optimizer steps, static what is frozen beside it, at once what the user writes by hand."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).requires_grad_(False))
    teacher, ema = nn.Linear(3, 3).requires_grad_(False), AveragedModel(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    registry = Registry()
    registry.register({"model": model, "optimizer": optimizer, "teacher": teacher, "ema": ema})
    registry.register({"scratch": torch.zeros(3), "mine": nn.Linear(2, 2)})
    registry.register({"told": torch.zeros(3)}, fenced=True)
    modes = {entry.key: entry.mode for entry in resolve.tensors(registry).entries}
    assert modes["model.0.weight"] is Mode.FENCED
    assert modes["model.1.weight"] is Mode.SYNC  # no registered optimizer steps it
    assert modes["model.1.running_mean"] is Mode.SYNC
    assert modes["model.2.weight"] is Mode.STATIC
    assert modes["teacher.weight"] is Mode.SYNC  # nobody says that it is not written
    assert modes["ema.module.0.weight"] is Mode.FENCED
    assert modes["ema.n_averaged"] is Mode.SYNC
    assert modes["scratch"] is modes["mine.weight"] is Mode.SYNC
    assert modes["told"] is Mode.FENCED
    registry.owners[
        "optimizer"
    ].writes_unfenced = True  # its steps are replayed by a graph, which no hook sees
    assert {e.key: e.mode for e in resolve.tensors(registry).entries}["model.0.weight"] is Mode.SYNC
    registry.owners["optimizer"].writes_unfenced = False
    registry.owners["model"].writes_unfenced = True  # what an audit found
    assert {entry.mode for entry in resolve.tensors(registry).entries if entry.key.startswith("model.")} == {
        Mode.SYNC
    }


def test_names_must_be_free_and_not_ours() -> None:
    registry = Registry()
    for name in ("rng", "$meta"):
        with pytest.raises(CkptdError, match="ckptd's own"):
            registry.register({name: nn.Linear(1, 1)})
    registry.register({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, key_map={"b": "a"})
    with pytest.raises(CkptdError, match="two tensors of one name"):
        resolve.tensors(registry)


def test_key_map_takes_the_longest_prefix_at_a_dot() -> None:
    registry = Registry()
    (owner,) = registry.register({"model": nn.Linear(1, 1)}, key_map={"model.a": "x", "model.a.b": "y"})
    assert owner.rename("model.a.b.weight") == "y.weight"
    assert owner.rename("model.a.c") == "x.c"
    assert owner.rename("model.ab") == "model.ab"
    assert owner.rename("model.a") == "x"
