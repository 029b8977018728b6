"""The quick look at a known structure must see every change of it, or a snapshot would hold the wrong tensors (P1)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ckptd_client import Client, recall, snapshots
from ckptd_client.recall import Recall
from torch import nn

from tests.node.client_training import (
    Training,
    assert_same,
    begun,
    connected,
    first_snapshot,
    load,
    net,
    restored,
)
from tests.node.optimizer_zoo import train
from tests.node.rank_daemon_double import RankDaemonDouble


def test_nobody_searches_for_garbage_while_snapshots_are_planned_and_gathered(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The million objects that a plan of 20,000 tensors is made of live on: the search took longer than all else."""
    searching = []

    def noted(name: str) -> None:
        inner = getattr(snapshots, name)
        monkeypatch.setattr(snapshots, name, lambda *args: (searching.append((name, gc.isenabled())), inner(*args))[1])

    noted("make_plan")
    noted("gather")
    training = Training()
    with connected(daemon, training) as client:
        first_snapshot(client, training)
        training.step()
        client.snapshot(2, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert searching == [("make_plan", False), ("gather", False), ("gather", False)]
    assert gc.isenabled()


def replace_parameter(training: Training, client: Client) -> None:
    training.model[2].weight = nn.Parameter(torch.randn(3, training.width))
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    client.register(optimizer=training.optimizer)


def replace_data(training: Training, client: Client) -> None:
    training.model[0].weight.data = torch.randn(training.width, training.width)


def transpose_data(training: Training, client: Client) -> None:
    training.model[0].weight.data = torch.randn(training.width, training.width).t()


def replace_buffer(training: Training, client: Client) -> None:
    training.model[1].running_mean = torch.randn(training.width)


def replace_state(training: Training, client: Client) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def forget_state(training: Training, client: Client) -> None:
    training.optimizer.state.clear()


def other_dtype(training: Training, client: Client) -> None:
    training.model[1].running_var.data = torch.rand(training.width, dtype=torch.float64)


def add_module(training: Training, client: Client) -> None:
    training.model[0].add_module("more", nn.Linear(3, 4))


def freeze(training: Training, client: Client) -> None:
    training.model[0].weight.requires_grad_(False)


def new_name(training: Training, client: Client) -> None:
    client.register(scratch=nn.Linear(5, 5, bias=False))


def rename_module(training: Training, client: Client) -> None:
    training.model.add_module("last", training.model._modules.pop("2"))


def rename_parameter(training: Training, client: Client) -> None:
    training.model[2].register_parameter("shift", training.model[2]._parameters.pop("bias"))
    training.model[2].register_parameter("bias", None)


def rename_state(training: Training, client: Client) -> None:
    for state in training.optimizer.state.values():
        state["moment"] = state.pop("exp_avg")


def leave_out(training: Training, client: Client) -> None:
    training.model[1]._non_persistent_buffers_set.add("running_var")


CHANGES: list[Callable[[Training, Client], None]] = [
    replace_parameter, replace_data, transpose_data, replace_buffer, replace_state, forget_state, other_dtype, add_module,
    freeze, new_name, rename_module, rename_parameter, rename_state, leave_out,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_structure_is_looked_up_anew(
    daemon: RankDaemonDouble, change: Callable[[Training, Client], None]
) -> None:
    training = Training()
    with restored(daemon, training, state_bytes=1 << 20) as client:
        for step in (1, 2):
            training.step()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
        change(training, client)
        expected = training.tensors()
        if change is new_name:
            scratch = client._registry.owners["scratch"].value
            expected["scratch.weight"] = scratch.weight.detach().clone()
        client.snapshot(3, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert_same(daemon.held[1, 3][0], expected)


def merge(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].extend(groups.pop()["params"])


def move(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def split(groups: list[dict[str, Any]]) -> None:
    groups.insert(1, {**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.5})


@pytest.mark.parametrize("cut", [merge, move, split], ids=lambda cut: cut.__name__)
def test_groups_that_are_cut_anew_in_mid_run_come_back_as_they_are(daemon: RankDaemonDouble, cut: Callable[..., None]) -> None:
    """All parameters in their order were compared, not where one group ends: the snapshot had the options of the groups before."""

    def grouped() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        head, tail = (list(model[at].parameters()) for at in (0, 2))
        return model, torch.optim.SGD([{"params": head, "lr": 0.1}, {"params": tail, "lr": 0.01}], lr=1.0, momentum=0.9)

    model, optimizer = grouped()
    with begun(daemon, model=model, optimizer=optimizer) as client:
        train(model, [optimizer], 1)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        cut(optimizer.param_groups)
        train(model, [optimizer], 1)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    expected = train(model, [optimizer], 3)
    fresh, other = grouped()
    cut(other.param_groups)
    for group in other.param_groups:
        group["lr"] = 7.0
    load(daemon, model=fresh, optimizer=other)
    assert train(fresh, [other], 3) == expected


def test_what_a_hook_adds_to_what_is_saved_is_saved_from_then_on(daemon: RankDaemonDouble) -> None:
    """Of a module or an optimizer; a hook that came after the first snapshot, or a value that appeared then, was not asked for."""

    def hooked(model: nn.Module, optimizer: Any, kept: dict[str, Any]) -> None:
        model[0].register_state_dict_post_hook(lambda _, saved, prefix, __: saved.update({f"{prefix}scale": kept["scale"]}))
        model[0].register_load_state_dict_pre_hook(lambda _, saved, prefix, *__: kept.update(scale=saved.pop(f"{prefix}scale", 1)))
        optimizer.register_state_dict_post_hook(lambda _, saved: saved.update(ema=kept["ema"]) if kept["ema"] else None)
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: kept.update(ema=saved.get("ema")))

    model, kept = net(), {"scale": 1, "ema": None}
    optimizer = torch.optim.AdamW(model.parameters())
    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in range(1, 4):
            train(model, [optimizer], 1)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
            if step == 1:
                hooked(model, optimizer, kept)
            if step == 2:
                kept.update(scale=2, ema=0.5)
    fresh, back = net(), {"scale": 1, "ema": None}
    other = torch.optim.AdamW(fresh.parameters())
    hooked(fresh, other, back)
    load(daemon, model=fresh, optimizer=other)
    assert back == kept


def test_an_unchanged_structure_is_not_looked_up_again(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    found: list[bool] = []
    look = Recall.tensors
    monkeypatch.setattr(
        Recall, "tensors", lambda self: (result := look(self), found.append(result is not None))[0]
    )
    with restored(daemon, training) as client:
        for step in range(1, 5):
            training.step()
            expected = training.tensors()
            client.snapshot(step, must=True)
            training.step()
            assert client.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, step][0], expected)
    assert found == [True, True, True]


def test_an_optimizer_of_others_that_goes_does_not_cost_the_known_structure(daemon: RankDaemonDouble, looked_up: list[int]) -> None:
    """Whenever the garbage collector came by, the next snapshot looked everything up by name."""
    training, other = Training(), Training()
    other.step()
    with restored(daemon, training) as client:
        for step in range(1, 4):
            training.step()
            looked_up.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
            if step == 2:
                del other
                gc.collect()
    assert looked_up == []


def test_an_optimizer_in_the_place_of_one_that_is_gone_is_another(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody registered either of them; the first one stepped what is not registered. Where in memory they lie may be the same."""
    monkeypatch.setattr(recall, "id", lambda one: 7 if isinstance(one, torch.optim.Optimizer) else id(one), raising=False)
    training, other = Training(), Training()
    other.step()
    with restored(daemon, training) as client:
        for step in (1, 2):
            training.step()
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        del other
        gc.collect()
        training.step()
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"
        later = type(training.optimizer)(training.model.parameters())
        training.step()
        later.step()
        assert "nobody registered" in client.snapshot(4, must=True).status


class Loader:
    """Keeps a tensor that is too large to lie among the small values, and replaces it."""

    def __init__(self) -> None:
        self.order = torch.arange(9000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.order = state["order"]


def test_tensors_inside_of_objects_do_not_cost_the_known_structure(daemon: RankDaemonDouble, looked_up: list[int]) -> None:
    """A GradScaler's scale on its device, or a loader's order, made every snapshot look everything up by name."""
    training, loader = Training(), Loader()
    with connected(daemon, training) as client:
        client.register(loader=loader)
        client.restore()
        for step in range(1, 6):
            training.step()
            loader.order = torch.randperm(9000 if step < 5 else 9001)
            looked_up.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
            assert looked_up == ([] if step in (2, 3, 4) else [1])
            expected = training.tensors() | {"loader#0": loader.order.clone()}
            assert_same(daemon.held[1, step][0], expected)


def test_nothing_of_the_trainers_is_kept_alive(daemon: RankDaemonDouble) -> None:
    import gc
    import weakref

    training = Training()
    with connected(daemon, training) as client:
        first_snapshot(client, training)
        moments = [weakref.ref(state["exp_avg"]) for state in training.optimizer.state.values()]
        training.optimizer.state.clear()
        gc.collect()
        assert [moment() for moment in moments] == [None] * len(moments)
