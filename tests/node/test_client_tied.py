"""What one optimizer has of another's, and what it has for no parameter of a parameter's, is that again after a restore (P15)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ckptd_client import beside, nested, optim, tree
from ckptd_client.entries import Entry, Mode, Owner
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ckptd.export.optimizer import OptimizerState, _add_odd
from tests.node.optimizer_zoo import Counting


def of_stage(stage: int, keep: Callable[[Optimizer, Tensor], None]) -> tuple[Owner, dict[int, Entry], Any]:
    """An optimizer that has made a step, what is known of its parameter, and its state that is no tensor as a snapshot has it."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    keep(optimizer, parameter)
    owner = Owner("optimizer", "optimizer", optimizer)
    known = {id(parameter): Entry(f"model.{stage}", parameter, "param", owner, Mode.FENCED)}
    return owner, known, tree.decode(tree.encode(optim.state_entries(owner, known)[1], "optimizer.state"))


@pytest.mark.parametrize("kept", [["m"], [0, "m"]], ids=["dicts", "lists"])
def test_of_several_stages_each_ties_what_is_its_own(kept: list[Any]) -> None:
    """Their names and lengths differ, and what another one has is no place of this one's."""
    def keep(stage: int) -> Callable[[Optimizer, Tensor], None]:
        def hold(optimizer: Optimizer, parameter: Tensor) -> None:
            moment = optimizer.state[parameter]["exp_avg"]
            held: Any = {f"l{stage}": {"m": moment}} if kept == ["m"] else [*[1] * stage, [moment]]
            optimizer.state["cache"] = held  # type: ignore[index]
            optimizer.state[f"own{stage}"] = {"m": [moment]}  # type: ignore[index]
        return hold

    stages = [of_stage(stage, keep(stage)) for stage in (0, 1)]
    for at, (owner, known, _) in enumerate(stages):
        odd = optim.merge_odd([stages[at][2], stages[1 - at][2]], own_first=True)
        state = owner.value.state
        state.update(odd[""])
        optim.tie(owner, known, odd)
        (moment,) = (values["exp_avg"] for key, values in state.items() if isinstance(key, Tensor))
        assert {key for key in state if not isinstance(key, Tensor)} == {"cache", f"own{at}"}
        cache = state["cache"][f"l{at}"]["m"] if kept == ["m"] else state["cache"][-1][0]
        assert cache is moment and state[f"own{at}"]["m"][0] is moment


class AsTuple(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.state, self.defaults = inner, inner.state, {}
        self.param_groups: Any = tuple(inner.param_groups)


class Computed(Optimizer):
    param_groups: Any = property(lambda self: self.inner.param_groups)
    state: Any = property(lambda self: self.inner.state)

    def __init__(self, inner: Optimizer) -> None:
        self.__dict__ |= inner.__dict__
        self.inner = inner


class OfTwo(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        other = SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
        self.inner, self.other, self.state, self.defaults = [other, inner], other, inner.state, {}
        self.param_groups = [*other.param_groups, *inner.param_groups]


@pytest.mark.parametrize("kind", [AsTuple, Computed, OfTwo])
def test_an_odd_wrapper_takes_back_what_it_had_beside(kind: Callable[[Optimizer], Any]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    inner = Counting([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    inner.step()
    wrapper = kind(inner)
    saved = beside.collect("optimizer", wrapper)
    inner.count = 5
    beside.give_back("optimizer", wrapper, saved)
    assert inner.count == 1 and wrapper.state is inner.state
    if kind is not AsTuple:
        assert any(group is inner.param_groups[0] for group in wrapper.param_groups)
    assert nested.optimizers(wrapper)[-1] is wrapper


def test_an_export_leaves_out_what_is_of_no_parameter_and_says_so() -> None:
    """A wrapper's was taken for the state of a parameter of the wrapper's name."""
    found = OptimizerState("optimizer")
    contents: Any = SimpleNamespace(notes=[])
    _add_odd(found, {"": {"all": 1}, ":Wrap": {"own": 2}, ":=": {"": [[["all"], "k"]]}, "model.w": {"n": 3}}, contents)
    assert found.state == {"model.w": {"n": 3}}
    assert [note.rpartition(": ")[2] for note in contents.notes] == ["all", "own"]
