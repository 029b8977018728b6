"""What is refused says by name what does not fit and what to do about it; what a person can do helps (P15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, Client
from torch import nn

from tests.node.client_training import Tied, load, net, save
from tests.node.rank_daemon_double import RankDaemonDouble


def refusal(daemon: RankDaemonDouble, how: dict[str, Any] | None = None, **objects: Any) -> str:
    with pytest.raises(CkptdError) as caught:
        load(daemon, how, **objects)
    text = str(caught.value)
    assert "restore() again" not in text, "nothing would be another way then"
    return text


def trained(model: nn.Module, *groups: list[int]) -> torch.optim.Optimizer:
    """Each group with a learning rate of its own, after one step."""
    parameters = list(model.parameters())
    held = [{"params": [parameters[at] for at in group], "lr": 0.1 * (n + 1)} for n, group in enumerate(groups)]
    optimizer = torch.optim.AdamW(held or parameters)
    sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


# --- tied weights -------------------------------------------------------------------------------------------
def test_weights_that_are_tied_here_and_were_not(daemon: RankDaemonDouble) -> None:
    save(daemon, model=Tied(False))
    text = refusal(daemon, model=Tied(True))
    assert "model.embed.weight and model.head.weight: tied here, but saved with different values" in text
    assert "untie them" in text and "only=" in text
    half, saved = Tied(True), Tied(False)
    load(daemon, {"only": ["model.embed.*"]}, model=half)
    assert not torch.equal(half.embed.weight, saved.embed.weight)


def test_the_optimizers_state_of_weights_that_are_tied_here(daemon: RankDaemonDouble) -> None:
    model = Tied(False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    save(daemon, model=model, optimizer=trained(model))
    again = Tied(True)
    text = refusal(daemon, model=again, optimizer=torch.optim.AdamW(again.parameters()))
    assert "optimizer: model.embed.weight is tied to model.head.weight here, and each was saved with a state of its own" in text
    assert "nobody registered" not in text


def test_weights_that_were_tied_and_are_not_here_have_the_state_of_both(daemon: RankDaemonDouble) -> None:
    """As they have the value (D7)."""
    model = Tied(True)
    optimizer = trained(model)
    save(daemon, model=model, optimizer=optimizer)
    again = Tied(False)
    fresh = torch.optim.AdamW(again.parameters(), lr=9.0)
    load(daemon, model=again, optimizer=fresh)
    expected = optimizer.state[model.embed.weight]["exp_avg"]
    moments = [fresh.state[layer.weight]["exp_avg"] for layer in (again.embed, again.head)]
    assert all(torch.equal(moment, expected) for moment in moments) and moments[0] is not moments[1]
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


# --- groups -------------------------------------------------------------------------------------------------
def test_a_parameter_that_was_moved_to_another_group(daemon: RankDaemonDouble) -> None:
    model = net()
    save(daemon, model=model, optimizer=trained(model, [0, 1], [2, 3]))
    again = net()
    text = refusal(daemon, model=again, optimizer=trained(again, [0, 1, 2], [3]))
    mixed = "group 0 mixes parameters saved with different hyperparameters (lr): model.0.weight and model.2.weight"
    assert f"optimizer: {mixed}" in text
    assert "group them as they were" in text and "strict=False" in text


def test_strict_false_leaves_groups_alone_that_do_not_fit(daemon: RankDaemonDouble) -> None:
    """A mixed one, and one of parameters that are new."""
    model = net()
    optimizer = trained(model, [0, 1], [2, 3])
    save(daemon, model=model, optimizer=optimizer)
    again = nn.Sequential(*net(), nn.Linear(130, 2))
    parameters = list(again.parameters())
    groups = [{"params": parameters[:3], "lr": 5.0}, {"params": parameters[3:4], "lr": 6.0}, {"params": parameters[4:], "lr": 7.0}]
    fresh = torch.optim.AdamW(groups)
    client = load(daemon, {"strict": False}, model=again, optimizer=fresh)
    assert [group["lr"] for group in fresh.param_groups] == [5.0, 0.2, 7.0]
    assert torch.equal(fresh.state[parameters[2]]["exp_avg"], optimizer.state[list(model.parameters())[2]]["exp_avg"])
    assert any("group 0 mixes" in note for note in client.last_restore["notes"])
    assert any("no hyperparameters for model.3.weight" in note for note in client.last_restore["notes"])


# --- tensors that are no plain ones -------------------------------------------------------------------------
class Saving:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"it": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["it"]


class Marked(torch.Tensor):
    """A subclass that says nothing of what it is made of."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(daemon: RankDaemonDouble) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    module = nn.Module()
    module.register_buffer("b", nested)
    with Client.connect("job", socket=daemon.path) as client:
        for key, value in (("t", nested), ("x.a", {"a": nested}), ("m.b", module), ("s.it", Saving(nested))):
            with pytest.raises((CkptdError, TypeError)) as caught:
                client.register(**{key.partition(".")[0]: value})
            text = str(caught.value)
            assert key in text and "nested tensor" in text and "unbind()" in text, text


def test_a_subclass_that_says_nothing_of_itself(daemon: RankDaemonDouble) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(3).as_subclass(Marked))
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(CkptdError) as caught:
        client.register(m=module)
    text = str(caught.value)
    assert "m.w" in text and "Marked" in text and "__tensor_flatten__" in text and "as_subclass(torch.Tensor)" in text, text


# --- text ---------------------------------------------------------------------------------------------------
def test_strings_with_lone_surrogates_are_refused_by_name(daemon: RankDaemonDouble) -> None:
    """As os.listdir() gives them for names that are no UTF-8."""
    broken = "a\udcffb"
    cases: list[tuple[str, Any]] = [
        ("x.name", {"name": broken}), ("x (key 'a\\udcffb')", {broken: 1}), ("x.deep[1]", {"deep": [1, broken]}),
        (r"x.a\udcffb", {broken: torch.ones(2)}),
    ]  # fmt: skip
    with Client.connect("job", socket=daemon.path) as client:
        for path, value in cases:
            with pytest.raises((CkptdError, TypeError)) as caught:
                client.register(x=value)
            text = str(caught.value)
            assert path in text and "is no text: it holds half of a surrogate pair" in text and "os.fsencode" in text, text
            text.encode()  # so that a log can hold it
        client.register(w=torch.ones(3))
        client.restore()
        assert client.snapshot(1, {"path": broken}, must=True).status.startswith("failed: type: ")
        assert any("$meta.meta.path" in text and "surrogate" in text for text in client.health().problems)


# --- what surrounds the call ------------------------------------------------------------------------------------
@pytest.mark.parametrize("around", [torch.inference_mode(), torch.device("meta")], ids=["inference", "meta"])
def test_a_restore_makes_what_training_goes_on_with_whatever_it_stands_in(daemon: RankDaemonDouble, around: Any) -> None:
    model, other = net(), net()
    save(daemon, model=model, optimizer=trained(model))
    fresh = torch.optim.AdamW(other.parameters())
    with around:
        load(daemon, model=other, optimizer=fresh)
    assert torch.equal(model[0].weight, other[0].weight)
    other(torch.ones(2, 20)).sum().backward()
    fresh.step()
    assert {state["step"].item() for state in fresh.state.values()} == {2.0}
