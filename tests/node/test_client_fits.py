"""What a user names and nothing fits is an error, not silence: patterns, keys of dicts, steps (P15; found by fresh eyes)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from ckptd_client import CkptdError, Client, tree
from ckptd_client.tree import ForeignType
from torch import nn

from tests.node.client_training import Training, begun, load, restored, save
from tests.node.rank_daemon_double import RankDaemonDouble

ONE, TWO = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize("only", ["modle.*", "model", [], ["model.*", "modle.*"]])
def test_a_pattern_of_restore_that_fits_no_key_is_named(daemon: RankDaemonDouble, only: Any) -> None:
    """It returned the step, and the weights were the fresh ones."""
    save(daemon, model=nn.Linear(3, 3))
    with pytest.raises(CkptdError, match=r"fits none of 3 keys: model\.bias, model\.weight, rng") as caught:
        load(daemon, {"only": only}, model=nn.Linear(3, 3))
    assert "model.*" in str(caught.value)


def test_what_a_snapshot_was_given_along_comes_back_with_only(daemon: RankDaemonDouble) -> None:
    save(daemon, model=nn.Linear(3, 3))
    assert load(daemon, {"only": "model.*"}, model=nn.Linear(3, 3)).last_restore["meta"] == {"note": "hello"}


@pytest.mark.parametrize("include", ["modle.*", "model", ["model.*", "modle.*"]])
def test_a_pattern_of_register_that_fits_no_key_is_named(daemon: RankDaemonDouble, include: Any) -> None:
    """All snapshots were sealed, and held nothing."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with Client.connect("job", socket=daemon.path) as client:
        with pytest.raises(CkptdError, match=r"fits none of 2 keys: model\.bias, model\.weight"):
            client.register(model=model, optimizer=optimizer, include=include)
        client.register(model=model, optimizer=optimizer, include=["model.*", "optimizer.*.exp_avg"])


@pytest.mark.parametrize(
    "objects",
    [
        {"extra": {1: ONE, "1": TWO}}, {"extra": {"a.b": ONE, "a": {"b": TWO}}}, {"a.b": ONE, "a": {"b": TWO}},
        {"a": [ONE], "a.0": TWO}, {"extra": {1: "one", "1": "two"}},
    ],
    ids=str,
)  # fmt: skip
def test_two_objects_of_one_name_are_refused(daemon: RankDaemonDouble, objects: dict[str, Any]) -> None:
    """Only one of them came back."""
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(CkptdError, match="have this name"):
        client.register(**objects)


@pytest.mark.parametrize("key", [nn.Parameter(torch.ones(2)), nn.Linear(2, 2), None, (0, 1)], ids=lambda key: type(key).__name__)
def test_a_key_that_no_other_process_has_is_refused(daemon: RankDaemonDouble, key: Any) -> None:
    """Of optimizers in backward, {parameter: optimizer}: the tensor's values were the name."""
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(ForeignType, match="a key of type"):
        client.register(optimizers={key: torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)})


def test_what_went_backwards_is_what_wait_answers_for(daemon: RankDaemonDouble) -> None:
    """A counter that begins anew each epoch: "durable" was said of the step before."""
    training = Training()
    with restored(daemon, training) as client:
        for step in (4, 5, 1):
            training.step()
            client.snapshot(step, must=True)
        assert client.wait("durable", 30) == "failed: step went backwards from 5"
        training.step()
        client.snapshot(6, must=True)
        assert client.wait("durable", 30) == "durable"


def test_a_run_that_was_over_is_started_again_without_a_warning(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """README's own lines: the loop makes no step, and wait() has nothing to wait for."""
    with restored(daemon, Training()) as client:
        assert client.wait("durable", 5) == "nothing to wait for"
    assert "ended otherwise" not in caplog.text


@pytest.mark.parametrize("step", [-1, 2**53 + 1, 2**70])
def test_a_step_that_none_can_be_changes_nothing(daemon: RankDaemonDouble, step: int) -> None:
    """Every later one "went backwards"."""
    training = Training()
    with restored(daemon, training) as client:
        training.step()
        with pytest.raises(ValueError, match=r"a step is 0 to 2\^53"):
            client.snapshot(step)
        assert client.snapshot(1, must=True).wait("durable", 30) == "durable"


class Raising:
    def __init__(self, *, saves: bool) -> None:
        self.saves, self.calls = saves, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls > 2 and not self.saves:
            raise RuntimeError("loader workers are gone")
        return {"calls": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("boom")


def test_the_object_whose_own_method_raised_is_named(daemon: RankDaemonDouble) -> None:
    with begun(daemon, loader=Raising(saves=False)) as client:
        said = [client.snapshot(step, must=True).wait("sealed", 5) for step in (1, 2, 3)][-1]
    assert said.startswith("failed: its state_dict() raised RuntimeError: loader workers are gone") and "loader" in said, said
    daemon.held.clear()
    save(daemon, sched=Raising(saves=True))
    with pytest.raises(CkptdError, match=r"its load_state_dict\(\) raised ValueError: boom \[sched\]"):
        load(daemon, sched=Raising(saves=True))


def test_nothing_is_imported_to_tell_a_masked_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that has changed its user, or its root, may not be able to read numpy's files any more."""
    monkeypatch.delattr(np, "ma")
    monkeypatch.delitem(sys.modules, "numpy.ma")
    tree.encode({"seen": np.arange(3)}, "values")
    assert "numpy.ma" not in sys.modules


def test_a_masked_array_is_refused(daemon: RankDaemonDouble) -> None:
    """Its mask was lost."""
    masked = np.ma.masked_array([1, 2], mask=[0, 1])
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(ForeignType, match="a masked array: save its data"):
        client.register(seen=masked)
