"""`ckptd export`: what torch's own readers find in it is what was captured (P1), whatever the checkpoint was made of (P9)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckptd.export.export import Report, Request, export
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
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{where}.{number}")
    else:
        assert found == wanted, where


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
