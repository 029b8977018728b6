"""`ckptd export`: what torch's own readers find in it is what was captured (P1), whatever the checkpoint was made of (P9)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptd_client import tree
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import AdamW

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.export.export import Report, Request, export
from ckptd.persist.names import step_dir
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import DEFAULT, JOB, make_world, save
from tests.node.commands import Cli
from tests.node.imports import restored, run_import
from tests.node.optimizer_zoo import EightBit, Lookahead
from tests.node.optimizer_zoo import train as train_zoo
from tests.node.trained import STEPS, Small, Train, steps_of, trained

# torch's own loaders say so where there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


class Trained(NamedTuple):
    model: Small
    optimizer: torch.optim.Optimizer
    scheduler: Any
    directory: Path


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    with trained() as found:
        yield found


def groups_of(model: Small) -> list[dict[str, Any]]:
    """Not in the model's order, with a parameter that gets no gradient."""
    return [
        {"params": [*model.norm.parameters(), model.frozen], "lr": 0.5, "weight_decay": 0.0},
        {"params": [*model.middle.parameters(), model.embed.weight, model.none]},
    ]


@pytest.fixture(scope="module")
def small(train: Train) -> Trained:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(groups_of(model), lr=torch.tensor(0.01), betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    registered = {"model": model, "optimizer": optimizer, "extra": {"scheduler": scheduler, "progress": {"seen": {1: (2, 3)}}}}
    return Trained(model, optimizer, scheduler, train("small", registered, steps_of(model, optimizer, scheduler)))


def exported(source: Path, dest: Path, to: str, **how: Any) -> Report:
    return export(Request(str(source), str(dest), to, **how))


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted) and len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{where}.{number}")
    else:
        assert found == wanted, where


def test_a_numbered_optimizer_goes_back_by_the_order_of_its_file(train: Train, cli: Cli, tmp_path: Path) -> None:
    """The file had its tensors by name, layer 10 before layer 2: all but two moments came back as another layer's, silently."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)), nn.BatchNorm1d(4))
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        weights = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
        return model, AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])

    model, optimizer = made()

    def step(number: int) -> None:
        model(torch.randn(5, 4, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    exported(train("order", {"model": model, "optimizer": optimizer}, step), tmp_path / "a.pt", "torch")
    weights = [name for name in torch.load(tmp_path / "a.pt", weights_only=True)["model"] if name.endswith("weight")]
    assert weights == [f"{layer}.weight" for layer in range(13)]
    run_import(cli, tmp_path / "a.pt", "torch", tmp_path / "root", "--param-names", "model")
    again, other = made()
    restored(tmp_path / "root", model=again, optimizer=other)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])


# --- torch ----------------------------------------------------------------------------------------------------------
def test_torch_opens_it_without_unpickling_anything(small: Trained, tmp_path: Path) -> None:
    dest = tmp_path / "all.pt"
    report = exported(small.directory, dest, "torch")
    for how in ({}, {"mmap": True}):
        found = torch.load(dest, weights_only=True, **how)
        assert_same(found["model"], dict(small.model.state_dict()), "model")
        assert_same(found["optimizer"], small.optimizer.state_dict(), "optimizer")
        assert found["step"] == STEPS
        assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr(), "tied"
    assert_same(found["extra"]["extra.scheduler"], small.scheduler.state_dict(), "scheduler")
    assert found["extra"]["extra.progress"] == {"seen": {1: (2, 3)}}
    assert (report.files, report.reused, report.notes) == (1, 0, [])
    again = Small()
    again.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(groups_of(again))
    optimizer.load_state_dict(found["optimizer"])
    model, other = copy.deepcopy((small.model, small.optimizer))
    steps_of(again, optimizer)(6)
    steps_of(model, other)(6)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def mixed(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Tensors, numbers and lists in their states, and two in one list."""
    first, second = model[0].parameters(), model[1].parameters()
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), EightBit(second)]


def test_other_optimizers(train: Train, tmp_path: Path) -> None:
    """Two in a list are one after the other; what a wrapper keeps is by the wrapper's name."""
    for name, make in {"mixed": mixed, "lookahead": lambda model: Lookahead(AdamW(model.parameters()))}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 4), nn.Linear(4, 4))
        made = make(model)
        each = made if isinstance(made, list) else [made]
        registered = {"net": model, "opt": made}
        directory = train(name, registered, lambda number, model=model, each=each: train_zoo(model, each, 1))  # type: ignore[misc]
        exported(directory, tmp_path / name, "torch")
        found = torch.load(tmp_path / name, weights_only=True)
        assert_same(found["model"], dict(model.state_dict()))
        groups = found["optimizer"]["param_groups"]
        state = {number: dict(values) for number, values in found["optimizer"]["state"].items()}
        if name == "mixed":
            of_each = [optimizer.state_dict() for optimizer in each]
            assert_same(state, {2 * at + key: value for at, one in enumerate(of_each) for key, value in one["state"].items()})
            assert [group["params"] for group in groups] == [[0, 1], [2, 3]]
            assert [group["lr"] for group in groups] == [0.1, 1e-2]
        else:
            inner, outer = made.optimizer.state_dict()["state"], made.state
            for number, parameter in enumerate(model.parameters()):
                own = {f"Lookahead.{key}": value for key, value in outer[parameter].items()}
                assert_same(state[number], {**inner[number], **own})


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------
def blank() -> tuple[Small, torch.optim.Optimizer]:
    """A program that begins anew, as torch's tutorials have it: its states are born before the load asks for them."""
    torch.manual_seed(1)
    model = Small()
    optimizer = torch.optim.AdamW(groups_of(model), lr=torch.tensor(9.0))
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("layout", ["state_dict", "flat"])
def test_stock_dcp_loads_model_optimizer_and_objects(small: Trained, tmp_path: Path, layout: str) -> None:
    exported(small.directory, tmp_path / "dcp", "dcp", layout=layout)
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    model, optimizer = blank()
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "extra.scheduler": {**small.scheduler.state_dict(), "last_epoch": -1},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(state["extra.scheduler"], small.scheduler.state_dict())
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    assert_same(dict(model.state_dict()), dict(small.model.state_dict()))
    assert_same(get_optimizer_state_dict(model, optimizer), get_optimizer_state_dict(small.model, small.optimizer))


def test_without_a_program_dcp_finds_the_same_tree(small: Trained, tmp_path: Path) -> None:
    """planner_data: torch's own tool makes one file of it."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    exported(small.directory, tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert_same(found["model"], dict(small.model.state_dict()))
    assert_same(found["optim"], get_optimizer_state_dict(small.model, small.optimizer))
    assert found["extra.progress"] == {"seen": {"1": (2, 3)}}, "its paths are texts"


def test_torchtitan_has_the_model_without_a_prefix(small: Trained, tmp_path: Path) -> None:
    exported(small.directory, tmp_path / "titan", "dcp", layout="torchtitan")
    model, optimizer = blank()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    wanted = get_optimizer_state_dict(small.model, small.optimizer, options=options)
    assert_same(state.pop("optimizer"), wanted)
    assert_same(state, dict(small.model.state_dict()))


# --- ranks ----------------------------------------------------------------------------------------------------------
def test_stages_have_groups_of_their_own(tmp_path: Path) -> None:
    """What each rank had for itself: their groups together are the optimizer's, other values are by rank."""
    settings = {"lr": 0.1, "momentum": 0.9}
    items: dict[int, list[LayoutItem]] = {0: [], 1: []}
    objects: dict[int, dict[str, bytes]] = {}
    for rank in range(2):
        key = f"model.{rank}.w"
        for name, role in ((key, "param"), (f"opt.{key}.momentum_buffer", "optim")):
            items[rank].append(LayoutItem(name, "F32", (3,), Box.whole((3,)), role, MAYBE, 1))
        groups = {"groups": [{**settings, "lr": 0.2}, settings], "of": {key: rank}, "kinds": [["torch.optim.sgd.SGD"]]}
        state = {key: {"steps": rank, "parts": [{"$tensor": "momentum_buffer"}, 7]}}
        values = {"opt.groups": {**groups, "kind": [0, 0]}, "opt.state": state, "rng": rank}
        objects[rank] = {name: tree.encode(value, name) for name, value in values.items()}
    world = make_world(items, objects=objects)
    save(PosixStorage(str(tmp_path / "root")), world)
    report = exported(tmp_path / "root" / step_dir(JOB, DEFAULT), tmp_path / "out", "torch")
    assert [note for note in report.notes if "numbered rank by rank" in note]
    found = torch.load(tmp_path / "out", weights_only=True)
    optimizer = found["optimizer"]
    assert found["extra"] == {"rng": {0: 0, 1: 1}}
    groups_found = [(group["lr"], group["params"], group["foreach"]) for group in optimizer["param_groups"]]
    assert groups_found == [(0.2, [0], None), (0.1, [1], None)]
    for rank in range(2):
        own = torch.from_numpy(world.values[f"opt.model.{rank}.w.momentum_buffer", None].copy().view(np.float32)[:, 0])
        assert_bits(optimizer["state"][rank].pop("parts")[0], own)
        assert optimizer["state"][rank] == {"steps": rank}


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


# --- and back: `ckptd import` of it, as another job -----------------------------------------------------------------
def exported_by(cli: Cli, source: Path | str, dest: Path, *how: object) -> Path:
    ran = cli("export", source, dest, "--to", *how)
    assert ran.code == 0, ran.err
    return dest


def zeros(dtype: torch.dtype = torch.bfloat16) -> tuple[Small, torch.optim.Optimizer, Any]:
    """What it all is to come back into. dtype: of the layer that is bfloat16 in training."""
    model = Small()
    model.middle.to(dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    optimizer = torch.optim.AdamW(groups_of(model), lr=torch.tensor(9.0))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def names(small: Trained, path: Path) -> Path:
    """As docs/OPERATIONS.md has the program write it."""
    of = {p: name for name, p in small.model.named_parameters()}
    path.write_text("\n".join(of[p] for group in small.optimizer.param_groups for p in group["params"]))
    return path


def test_one_file_of_torch(small: Trained, cli: Cli, tmp_path: Path) -> None:
    """Model with its ties and extra state, optimizer, and the values beside them, in the meta. A scheduler with one tensor among
    its numbers, and a module's extra state, were taken to pieces."""
    exported_by(cli, small.directory, tmp_path / "a.pt", "torch")
    report = run_import(cli, tmp_path / "a.pt", "torch", tmp_path / "root", "--param-names", names(small, tmp_path / "names"))
    assert report["aliases"] == {"model.head.weight": "model.embed.weight"} and report["notes"] == []
    model, optimizer, scheduler = zeros()
    extra = restored(tmp_path / "root", model=model, optimizer=optimizer)["meta"]["extra"]
    scheduler.load_state_dict(extra["extra.scheduler"])
    assert_same(dict(model.state_dict()), dict(small.model.state_dict()))
    assert_same(optimizer.state_dict(), small.optimizer.state_dict())
    assert_same(scheduler.state_dict(), small.scheduler.state_dict())
    assert model.head.weight is model.embed.weight and extra["extra.progress"] == {"seen": {1: (2, 3)}} and "rng" in extra
    exported_by(cli, report["path"], tmp_path / "b.pt", "torch")
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert_same(two["model"], one["model"])
    assert_same(two["optimizer"]["state"], one["optimizer"]["state"])
    ways = ("foreach", "fused", "capturable", "differentiable")  # to compute, which an import leaves to the program
    settings = [{name: value for name, value in group.items() if name not in ways} for group in one["optimizer"]["param_groups"]]
    assert_same(two["optimizer"]["param_groups"], settings)


def test_files_of_the_hub_as_they_are(small: Trained, cli: Cli, tmp_path: Path) -> None:
    """The same files again, byte by byte: all tensors of the model, what is tied once."""
    exported_by(cli, small.directory, tmp_path / "a", "hf", "--as-is", "--shard-size", "300")
    report = run_import(cli, tmp_path / "a", "hf", tmp_path / "root", "--prefix-map", "=model.")
    exported_by(cli, report["path"], tmp_path / "b", "hf", "--as-is", "--shard-size", "300")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) > 2 and files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    model, *_ = zeros()
    restored(tmp_path / "root", strict=False, model=model)
    assert_same(tensors_of(model), tensors_of(small.model))


def test_a_universal_checkpoint_of_deepspeed(small: Trained, cli: Cli, tmp_path: Path) -> None:
    """Parameters and Adam's states as F32, groups, the scheduler, what DeepSpeed does not load; import found no shapes in it."""
    exported_by(cli, small.directory, tmp_path / "a", "deepspeed", "--zero", "2")
    more = ("--prefix-map", "lr_scheduler=extra.scheduler")
    report = run_import(cli, tmp_path / "a", "universal", tmp_path / "root", *more)
    assert report["notes"] == [] and "model.head.weight" not in report["tensors"], "what is tied is there once"
    model, optimizer, scheduler = zeros(torch.float32)
    said = restored(tmp_path / "root", strict=False, model=model, optimizer=optimizer, extra={"scheduler": scheduler})
    assert said["meta"]["extra"]["extra.progress"] == {"seen": {1: (2, 3)}}
    assert_same(scheduler.state_dict(), small.scheduler.state_dict())
    widened = Small()
    widened.load_state_dict(small.model.state_dict())
    widened.middle.float().load_state_dict(small.model.middle.state_dict())
    assert_same(tensors_of(model), tensors_of(widened))
    wanted, found = small.optimizer.state_dict(), optimizer.state_dict()
    assert_same(found["param_groups"], wanted["param_groups"])
    wide = {number: {name: value.float() for name, value in state.items()} for number, state in wanted["state"].items()}
    assert_same(found["state"], wide)
