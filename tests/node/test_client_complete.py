"""P15: a snapshot holds all that training needs to go on, or it fails and says by name what it lacks."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ckptd_client import CkptdError, Client, optim
from ckptd_client.same import same
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.node.client_training import begun, load, net, save
from tests.node.optimizer_zoo import HOLDING, Common, EightBit, Keeping, Lookahead, train
from tests.node.rank_daemon_double import RankDaemonDouble


def refused(daemon: RankDaemonDouble, **objects: Any) -> str:
    """Why these could not be restored; "" when they were."""
    try:
        load(daemon, **objects)
    except CkptdError as error:
        return str(error)
    return ""


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_goes_on(
    daemon: RankDaemonDouble, make: Callable[[nn.Sequential], Optimizer], **how: Any
) -> tuple[nn.Module, Any]:
    """A job that was restored, and then once more, trains on as if it had never been interrupted, to the last bit. The last one."""
    model = net()
    optimizer = make(model)
    for start in (1, 2):
        train(model, [optimizer], 3)
        save(daemon, start, model=model, optimizer=optimizer)
        expected = train(model, [optimizer], 4)
        fresh = net()
        other = make(fresh)
        load(daemon, how, model=fresh, optimizer=other)
        assert train(fresh, [other], 4) == expected
        assert all(map(torch.equal, parameters_of(fresh), parameters_of(model)))
        model, optimizer = fresh, other
    return fresh, other


@pytest.mark.parametrize("kind", HOLDING)
def test_an_optimizer_that_holds_others_comes_back_with_all_their_state(daemon: RankDaemonDouble, kind: str) -> None:
    assert_goes_on(daemon, HOLDING[kind])


def test_what_an_optimizer_has_for_no_parameter_and_for_one_stays_one_tensor(daemon: RankDaemonDouble) -> None:
    _, optimizer = assert_goes_on(daemon, lambda model: Common(model.parameters()))
    norms = [optimizer.state["all"]["both"][1], *(state["norm"] for state in optimizer.state.values())]
    assert all(norm is norms[0] for norm in norms)


def test_the_state_of_a_container_is_found_by_another_split_and_by_no_container(daemon: RankDaemonDouble) -> None:
    """Another pipeline split gives other positions in the container, and other optimizers altogether."""
    model = net()
    first = [AdamW(model[:1].parameters(), lr=1e-2), AdamW(model[1:].parameters(), lr=1e-2)]
    train(model, first, 3)
    save(daemon, model=model, optimizers=first)
    expected = train(model, first, 4)
    for split in (2, 3):
        fresh = net()
        parts = [part for part in (fresh[split:], fresh[:split]) if list(part.parameters())]
        others = [AdamW(part.parameters(), lr=5e-2) for part in parts]
        assert not refused(daemon, model=fresh, optimizers=others)
        assert train(fresh, others, 4) == expected


def test_two_optimizers_of_the_same_parameters_keep_their_states_apart(daemon: RankDaemonDouble) -> None:
    def make(model: nn.Module) -> list[Optimizer]:
        return [SGD(model.parameters(), lr=1e-2, momentum=0.9), SGD(model.parameters(), lr=1e-3, momentum=0.5)]

    model = net()
    both = make(model)
    train(model, both, 3)
    save(daemon, model=model, optimizers=both)
    expected = train(model, both, 4)
    fresh = net()
    others = make(fresh)
    load(daemon, model=fresh, optimizers=others)
    assert train(fresh, others, 4) == expected


def test_what_parameters_share_is_saved_once_and_comes_back_shared(daemon: RankDaemonDouble) -> None:
    model = net()
    optimizer = EightBit(model.parameters())
    train(model, [optimizer], 2)
    save(daemon, model=model, optimizer=optimizer)
    expected = train(model, [optimizer], 4)
    fresh = net()
    other = EightBit(fresh.parameters())
    load(daemon, model=fresh, optimizer=other)
    tables = [other.state[parameter].get("qmap1") for parameter in fresh.parameters()]
    assert all(table is tables[0] is not None for table in tables), tables
    assert train(fresh, [other], 4) == expected
    stored = [f.key for f in daemon.held[1, 1][0].layout.fragments if f.key.endswith("qmap1")]
    assert len(stored) == 1


def test_what_is_shared_comes_back_into_state_that_is_there(daemon: RankDaemonDouble) -> None:
    model = net()
    optimizer = EightBit(model.parameters())
    train(model, [optimizer], 2)
    save(daemon, model=model, optimizer=optimizer)
    saved = [optimizer.state[parameter]["state1"].clone() for parameter in model.parameters()]
    train(model, [optimizer], 2)
    optimizer.qmap.zero_()
    assert not refused(daemon, model=model, optimizer=optimizer)
    assert torch.equal(optimizer.qmap, torch.linspace(-1, 1, 256))
    assert all(map(torch.equal, saved, (optimizer.state[parameter]["state1"] for parameter in model.parameters())))


def test_the_state_of_parameters_that_left_their_group_is_told_and_left_out(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """It was saved, and then neither the program with that group nor the one without it could be restored."""

    def make(model: nn.Module) -> Optimizer:
        return SGD([{"params": list(model[at].parameters())} for at in (0, 2)], lr=1e-2, momentum=0.9)  # type: ignore[index]

    optim._warn_once.cache_clear()
    model = net()
    optimizer = make(model)
    train(model, [optimizer], 1)
    del optimizer.param_groups[1]
    save(daemon, model=model, optimizer=optimizer)
    assert "optimizer has for model.2.weight, model.2.bias is not saved" in caplog.text
    fresh = net()
    other = make(fresh)
    assert "no hyperparameters for model.2.weight" in refused(daemon, model=fresh, optimizer=other)
    del other.param_groups[1]
    expected = train(model, [optimizer], 3)
    load(daemon, model=fresh, optimizer=other)
    assert train(fresh, [other], 3) == expected


class Numbered(Optimizer):
    """Keeps its momentum under a number and within an OrderedDict, and counts under a number of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[0] = self.state.get(0, 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({0: torch.zeros_like(p), "deep": OrderedDict({1: torch.zeros_like(p), "size": p.shape})})
                for moment in (state[0], state["deep"][1]):
                    p.sub_(moment.mul_(0.9).add_(p.grad), alpha=group["lr"] / self.state[0])  # type: ignore[index,operator]


def test_numbers_as_keys_and_kinds_of_containers_come_back_as_they_were(daemon: RankDaemonDouble) -> None:
    """Momentum under the key 0 came back under "0", and the optimizer began with another."""
    model, optimizer = assert_goes_on(daemon, lambda model: Numbered(model.parameters()))
    deep = optimizer.state[model.get_parameter("0.bias")]["deep"]
    assert (type(deep), type(deep["size"])) == (OrderedDict, torch.Size)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("value", [Pair(torch.ones(1), torch.ones(1)), defaultdict(int, {"a": 1})], ids=["named", "default"])
def test_a_container_that_would_come_back_as_another_is_refused_by_name(daemon: RankDaemonDouble, value: Any) -> None:
    """As everywhere else. It came back as a tuple or a dict, where torch would have failed."""
    model = net()
    optimizer = AdamW(model.parameters())
    with begun(daemon, model=model, optimizer=optimizer) as client:
        train(model, [optimizer], 1)
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        optimizer.state[model.get_parameter("2.bias")]["m"] = value
        status = client.snapshot(2, must=True).status
        assert status.startswith("failed: type: optimizer.state.model.2.bias.m: ") and type(value).__qualname__ in status
        assert "cannot be saved without pickle" in status


# --- what an optimizer keeps to itself ----------------------------------------------------------------------
def told_of_attributes(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, make: Callable[[nn.Sequential], Optimizer]
) -> list[str]:
    model = net()
    optimizer = make(model)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in range(1, 5):
            train(model, [optimizer], 1)
            client.snapshot(step, must=True).wait("sealed", 30)
    return [record.getMessage() for record in caplog.records if "attributes" in record.getMessage()]


def test_attributes_that_a_step_changes_and_no_snapshot_holds_are_named_once(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    said = told_of_attributes(daemon, caplog, lambda model: Lookahead(Keeping(model.parameters())))
    assert len(said) == 1, said
    assert "optimizer (Keeping) changes its attributes k, mean, odd, scale, table, " in said[0]
    assert "state_dict()" in said[0]  # the remedy


@pytest.mark.parametrize("kind", HOLDING)
def test_what_is_saved_or_stays_is_not_named(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    assert told_of_attributes(daemon, caplog, HOLDING[kind]) == []


def test_what_a_hook_adds_to_the_state_dict_comes_back(daemon: RankDaemonDouble) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = Keeping(model.parameters())

        def add(optimizer: Any, saved: dict[str, Any]) -> None:
            saved["k"] = optimizer.k

        def take(optimizer: Any, saved: dict[str, Any]) -> None:
            optimizer.k = saved["k"]

        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)
        return optimizer

    _, optimizer = assert_goes_on(daemon, make)
    assert optimizer.k == 2 * (3 + 4)


@pytest.mark.parametrize(
    "value",
    [float("nan"), [torch.ones(2), torch.zeros(3)], {"slow": [torch.ones(2)]}, np.arange(4.0), (1, None, "x")],
    ids=["no number", "list", "dict", "array", "tuple"],
)
def test_whatever_a_state_dict_has_beside_state_and_groups_comes_back(daemon: RankDaemonDouble, value: Any) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer = Keeping(model.parameters())
        kept: dict[str, Any] = {"beside": None}
        optimizer.register_step_post_hook(lambda *_: kept.update(beside=value))
        optimizer.register_state_dict_post_hook(lambda _, saved: saved.update(kept))
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: kept.update(beside=saved["beside"]))
        return optimizer

    _, optimizer = assert_goes_on(daemon, make)
    assert same(optimizer.state_dict()["beside"], value)


# --- an optimizer that nobody registered --------------------------------------------------------------------
@contextmanager
def training_of_the_body(daemon: RankDaemonDouble) -> Iterator[tuple[Client, nn.Module, Optimizer, Optimizer]]:
    """Client, model, the body's optimizer, which is registered, and the head's."""
    model = net()
    body, head = AdamW(model[:1].parameters(), lr=1e-2), AdamW(model[1:].parameters(), lr=1e-2)
    with begun(daemon, model=model, optimizer=body) as client:
        yield client, model, body, head


def test_a_parameter_of_an_unregistered_optimizer_fails_the_snapshot_by_name(daemon: RankDaemonDouble) -> None:
    with training_of_the_body(daemon) as (client, model, body, head):
        train(model, [body, head], 2)
        status = client.snapshot(2, must=True).wait("sealed", 30)
        assert status.startswith("failed: incomplete: model.2.weight, model.2.bias: "), status
        (problem,) = client.health().problems
        assert "AdamW" in problem
        assert "without=" in problem  # and the remedy
        assert not daemon.held
        client.register(head=head)
        train(model, [body, head], 1)
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"
        assert client.health().problems == []


def test_state_that_is_meant_to_be_absent_is_named_and_left_out(daemon: RankDaemonDouble) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with begun(daemon, model=model, without=["model.0.*"]) as client:
        train(model, [optimizer], 2)
        status = client.snapshot(2, must=True).wait("sealed", 30)
        assert status.startswith("failed: incomplete: model.2.weight"), status
        client.register(without=["model.2.weight", "model.2.bias"])
        train(model, [optimizer], 1)
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"


def test_an_optimizer_that_appears_later_is_seen(daemon: RankDaemonDouble) -> None:
    with training_of_the_body(daemon) as (client, model, body, head):
        for step in (1, 2, 3):
            train(model, [body], 1)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        train(model, [body, head], 1)
        assert client.snapshot(4, must=True).wait("sealed", 30).startswith("failed: incomplete: model.2")


def test_an_optimizer_that_was_replaced_and_let_go_is_not_kept_alive(daemon: RankDaemonDouble) -> None:
    """The plan of the snapshot before held the one of the phase before, so it was missed, and no other plan was ever made."""
    model = net()
    with begun(daemon, model=model) as client:
        for step, part in enumerate((model[:1], model[2:]), start=1):
            optimizer = AdamW(part.parameters(), lr=1e-2)
            client.register(optimizer=optimizer)
            train(model, [optimizer], 1)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"


def test_an_optimizer_of_a_phase_that_is_over_is_not_missed(daemon: RankDaemonDouble) -> None:
    """A warm-up's optimizer is still in a variable when the next one has taken over."""
    model = net()
    warm_up, optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9), AdamW(model.parameters(), lr=1e-2)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        train(model, [warm_up], 2)
        assert client.snapshot(2, must=True).wait("sealed", 30).startswith("failed: incomplete: model.0.weight")
        train(model, [optimizer], 2)
        assert client.snapshot(4, must=True).wait("sealed", 30) == "durable"
    assert warm_up.state


class Counting(Optimizer):
    """Plain steps, which it counts in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / group["k"])


def halve(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / 2  # of a tensor: a new one


def freeze(optimizer: Optimizer) -> None:
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0001)


def scheduled(optimizer: Any) -> Optimizer:
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return optimizer  # type: ignore[no-any-return]


def halve_in_place(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"].div_(2)


WITHOUT_STATE: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Optimizer], None], str]] = {
    "by hand": (lambda params: SGD(params, lr=1e-2), halve, "SGD) that nobody registered, and its lr has changed since"),
    "a tensor": (lambda params: SGD(params, lr=torch.tensor(1e-2)), halve, "its lr has changed"),
    "in place": (lambda params: SGD(params, lr=torch.tensor(1e-2)), halve_in_place, "its lr has changed"),
    "a scheduler": (
        lambda params: scheduled(SGD(params, lr=1e-2)),
        lambda optimizer: optimizer.scheduler.step(),  # type: ignore[attr-defined]
        "its lr has changed",
    ),
    "two": (lambda params: SGD(params, lr=1e-2), freeze, "its lr, weight_decay have changed"),
}


@pytest.mark.parametrize("kind", WITHOUT_STATE)
@pytest.mark.parametrize("old", [False, True], ids=["nobody", "another"])
def test_an_unregistered_optimizer_without_state_is_missed_once_its_groups_change(
    daemon: RankDaemonDouble, kind: str, old: bool
) -> None:
    """What the script sets it sets again; what was changed since is lost. ``old``: the one that is registered steps no more."""
    make, change, text = WITHOUT_STATE[kind]
    model = net()
    optimizer = make(model.parameters())
    registered = {"optimizer": AdamW(model.parameters())} if old else {}
    with begun(daemon, model=model, **registered) as client:
        for step in (1, 2):
            train(model, [optimizer], 1)
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        change(optimizer)
        for step in (3, 4):
            train(model, [optimizer], 1)
            status = client.snapshot(step, must=True).wait("sealed", 30)
            assert status.startswith("failed: incomplete: model.0.weight, model.0.bias, model.2.weight, model.2.bias: "), status
            assert text in status
        assert "without=" in client.health().problems[0]
        client.register(this=optimizer, without=["scheduler"])
        train(model, [optimizer], 1)
        assert client.snapshot(5, must=True).wait("sealed", 30) == "durable"
        assert client.health().problems == []


def test_what_an_unregistered_optimizer_counts_in_its_groups_is_missed_and_may_be_meant(daemon: RankDaemonDouble) -> None:
    model = net()
    optimizer = Counting(model.parameters())
    with begun(daemon, model=model) as client:
        train(model, [optimizer], 1)
        status = client.snapshot(1, must=True).wait("sealed", 30)
        assert status.startswith("failed: incomplete: model.0.weight") and "its k has changed" in status
        client.register(without=["model.*"])
        train(model, [optimizer], 1)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"


class Clipping(Optimizer):
    """Steps through another one, whose groups it shows as its own."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


def test_groups_that_a_registered_optimizer_shares_are_saved_with_it(daemon: RankDaemonDouble) -> None:
    model = net()
    base = SGD(model.parameters(), lr=1e-2)
    clipping = Clipping(base)
    with begun(daemon, model=model, optimizer=base) as client:
        train(model, [clipping], 1)
        halve(base)
        train(model, [clipping], 1)
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"


class Application:
    """Saves model and optimizer by itself, as the examples of torch.distributed.checkpoint do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


class Foreign(Application):
    """Steps as an optimizer does without being torch's (Megatron's, Apex's); what it saves are copies."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": copy.deepcopy(self.optimizer.state_dict())}


@pytest.mark.parametrize("made", [AdamW, SGD])
@pytest.mark.parametrize("kind", [Application, Foreign])
def test_an_optimizer_that_another_object_saves_is_registered(
    daemon: RankDaemonDouble, kind: type[Application], made: type[Any]
) -> None:
    model = net()
    optimizer = made(model.parameters(), lr=1e-2)
    train(model, [optimizer], 2)
    halve(optimizer)
    train(model, [optimizer], 1)
    save(daemon, model=model, application=kind(optimizer))
    expected = train(model, [optimizer], 4)
    fresh = net()
    other = made(fresh.parameters(), lr=1e-2)
    load(daemon, model=fresh, application=kind(other))
    assert train(fresh, [other], 4) == expected


class Agent(Foreign):
    """Steps and drops gradients as an optimizer does; its own saving has forgotten the optimizer, or one of two."""

    def __init__(self, *optimizers: Optimizer, saved: int = 0) -> None:
        self.first, *self.others = optimizers
        self.saved = list(optimizers[:saved])

    def zero_grad(self) -> None:
        for optimizer in (self.first, *self.others):
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1, "saved": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.saved]}


def test_an_optimizer_that_its_owners_state_dict_lacks_is_missed(daemon: RankDaemonDouble) -> None:
    """Whatever had a zero_grad() was taken at its word, and the moments of an agent's optimizer were in no snapshot."""
    model = net()
    body, head = AdamW(model[0].parameters()), AdamW([model[2].weight])
    with begun(daemon, model=model, agent=Agent(body, head)) as client:
        train(model, [body, head], 1)
        assert client.snapshot(1, must=True).status.startswith("failed: incomplete: model.0.weight, model.0.bias, model.2.weight: ")
        client.register(agent=Agent(body, head, saved=1))
        assert client.snapshot(2, must=True).status.startswith("failed: incomplete: model.2.weight: ")
        client.register(agent=Agent(body, head, saved=2))
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"
