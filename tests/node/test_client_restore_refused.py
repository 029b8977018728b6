"""restore() of what does not fit, or cannot be had: all named, raised on all ranks, nothing written (D7, D11)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, Client, optim
from torch import nn

from ckptd.core import failpoint
from ckptd.wire import rank as wire
from tests.node.client_training import (
    Tied,
    assert_equal,
    begun,
    load,
    net,
    save,
    stepped,
)
from tests.node.rank_daemon_double import RankDaemonDouble


class Both(torch.optim.Optimizer):
    """A wrapper without state of its own, which shows its inner one's groups."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], params: Any, **options: Any) -> None:
        self.inner = kind(params, **options)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def test_every_mismatch_is_named_and_nothing_is_written(daemon: RankDaemonDouble) -> None:
    model = net()
    save(daemon, model=model, extra={"scheduler": {"a": 1}}, old={"b": 2})
    other = nn.Sequential(nn.Linear(20, 131), nn.ReLU(), nn.Linear(130, 130).double(), nn.Linear(2, 2))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CkptdError) as caught:
        load(daemon, model=other, extra={"scheduler": {"a": 0}, "new": {"c": 3}})
    text = str(caught.value)
    for part in (
        "model.0.weight: F32[131, 20] here, F32[130, 20] in the snapshot",
        "model.0.bias: F32[131] here",
        "model.2.weight: F64[130, 130] here, F32",
        "model.2.bias",
        "model.3.weight, model.3.bias, extra.new: not in the snapshot (3 in all)",
        "old: in the snapshot, but nobody registered it",
        "8 mismatches, by cause: ",
    ):
        assert part in text, text
    assert caught.value.hint
    assert_equal(other.state_dict(), before)


def test_strict_false_loads_what_fits_and_only_selects(daemon: RankDaemonDouble) -> None:
    model = net()
    save(daemon, model=model, extra={"scheduler": {"a": 1}})
    other = nn.Sequential(nn.Linear(20, 130), nn.ReLU(), nn.Linear(7, 7))
    progress = {"a": 0}
    client = load(daemon, {"strict": False}, model=other, extra={"scheduler": progress})
    assert_equal(other[0].state_dict(), model[0].state_dict())  # type: ignore[index]
    assert progress == {"a": 1}
    assert any("model.2.weight" in note for note in client.last_restore["notes"])
    third = nn.Sequential(nn.Linear(20, 130), nn.ReLU(), nn.Linear(130, 130))
    before = third[0].weight.clone()
    load(daemon, {"only": ["model.2.*"]}, model=third)
    assert torch.equal(third[0].weight, before)
    assert_equal(third[2].state_dict(), model[2].state_dict())  # type: ignore[index]


def test_include_exclude_and_key_map_rename(daemon: RankDaemonDouble) -> None:
    with Client.connect("job", socket=daemon.path) as client:
        model = net()
        client.register(model=model, exclude="*.bias", key_map={"model.0": "model.stem"})
        client.restore()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    assert {f.key for f in daemon.held[1, 1][0].layout.fragments} == {"model.stem.weight", "model.2.weight"}
    other = net()
    with torch.no_grad():
        other[0].weight.zero_()  # type: ignore[index, union-attr]
    with Client.connect("job", socket=daemon.path) as client:
        client.register(
            model=other, include=["model.stem.*"], key_map=lambda key: key.replace("model.0", "model.stem")
        )
        with pytest.raises(CkptdError, match=r"model\.stem\.bias: not in the snapshot"):
            client.restore()
        client.register(
            model=other,
            include=["model.stem.weight"],
            key_map=lambda key: key.replace("model.0", "model.stem"),
        )
        client.restore()
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[index, arg-type]


def test_an_alias_fills_two_untied_targets_and_two_values_into_a_tied_one_are_an_error(
    daemon: RankDaemonDouble,
) -> None:
    tied, untied = Tied(True), Tied(False)
    save(daemon, model=tied)
    layout = daemon.held[1, 1][0].layout
    assert [f.key for f in layout.fragments] == ["model.embed.weight"]
    assert layout.aliases == (("model.head.weight", "model.embed.weight"),)
    load(daemon, model=untied)
    assert torch.equal(untied.head.weight, tied.embed.weight)
    assert torch.equal(untied.embed.weight, tied.embed.weight)

    save(daemon, 2, model=untied)  # equal values under two keys
    again = Tied(True)
    load(daemon, model=again)
    assert torch.equal(again.head.weight, tied.embed.weight)
    with torch.no_grad():
        untied.head.weight[3, 4] += 1
    save(daemon, 3, model=untied)
    again = Tied(True)
    before = again.embed.weight.clone()
    with pytest.raises(CkptdError, match="tied here, but saved with different values"):
        load(daemon, model=again)
    assert torch.equal(again.embed.weight, before)


def test_meta_modules_are_materialised_first(daemon: RankDaemonDouble) -> None:
    model = net()
    save(daemon, model=model)
    with torch.device("meta"):
        empty = net()
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=empty)
        with pytest.raises(CkptdError, match=r"model\.0\.weight, .*: still on the meta device"):
            client.restore()
        empty.to_empty(device="cpu")
        assert client.restore() == 1
    assert_equal(empty.state_dict(), model.state_dict())


def test_tensors_without_memory_fail_the_snapshot_by_name(daemon: RankDaemonDouble) -> None:
    with torch.device("meta"):
        empty = net()
    with begun(daemon, model=empty) as client:
        status = client.snapshot(1, must=True).wait("sealed", 30)
        assert status == "failed: still on the meta device [model.0.weight]", status
        assert "model.0.weight" in client.health().problems[0]


def test_lazy_modules_are_initialised_first(daemon: RankDaemonDouble) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model)
        with pytest.raises((CkptdError, ValueError)) as caught:
            client.restore()
        assert "[model.0.weight]" in str(caught.value), caught.value
        assert "a batch" in str(caught.value)
        model(torch.ones(2, 3))
        assert client.restore() is None


def test_extra_state_scaler_generator_and_values(daemon: RankDaemonDouble) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen, "big": torch.full((5000,), self.seen)}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]
            assert torch.equal(state["big"], torch.full((5000,), self.seen))

    module, scaler = Counting(), torch.amp.GradScaler("cpu", init_scale=8.0)
    module.seen = 5
    scaler.scale(torch.ones(1))
    scaler.update(4.0)
    generator = torch.Generator().manual_seed(5)
    save(daemon, model=nn.Sequential(module), scaler=scaler, generator={"g": generator}, extra={"seed": 7})
    expected = torch.rand(3, generator=generator)
    fresh, other, target = Counting(), torch.amp.GradScaler("cpu"), torch.Generator()
    seeds = {"seed": 0}
    client = load(daemon, model=nn.Sequential(fresh), scaler=other, generator={"g": target}, extra=seeds)
    assert fresh.seen == 5
    assert other.get_scale() == 4.0
    assert torch.equal(torch.rand(3, generator=target), expected)
    assert client.values["extra.seed"] == seeds["seed"] == 7


# --- the protocol -------------------------------------------------------------------------------------------
def test_a_failure_of_one_rank_is_an_error_of_all_and_writes_nothing(daemon: RankDaemonDouble) -> None:
    model, other = net(), net()
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[index, union-attr, operator]
    save(daemon, model=model)
    before = copy.deepcopy(other.state_dict())
    failpoint.arm("restore.load:error")
    with pytest.raises(CkptdError, match=r"^rank 0: restore\.load"):
        load(daemon, model=other)
    assert_equal(other.state_dict(), before)
    failpoint.arm("")
    load(daemon, model=other)
    assert_equal(other.state_dict(), model.state_dict())


def test_what_cannot_be_recovered_raises_with_the_daemons_words(daemon: RankDaemonDouble) -> None:
    daemon.fail_restore = "rank 3's slot is held by nobody"
    with pytest.raises(CkptdError, match="rank 3's slot") as caught:
        load(daemon, model=net())
    assert caught.value.where == "unrecoverable"


def test_a_daemon_lost_in_mid_restore_raises(tmp_path: Path) -> None:
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    daemon._on_join = lambda peer, message, fds: daemon.stop()  # type: ignore[method-assign]
    with Client.connect("job", socket=daemon.path, timeout_s=5) as client:
        client.register(model=net())
        with pytest.raises(CkptdError, match="daemon was lost") as caught:
            client.restore()
    assert "start the job again" in caught.value.hint


def test_a_newer_round_replaces_an_older_offer(daemon: RankDaemonDouble) -> None:
    """Damage found at step 2: the steward offers step 1 instead, and only that is loaded."""
    model = net()
    save(daemon, 1, model=model)
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[index, union-attr, operator]
    save(daemon, 2, model=model)
    serve = daemon._on_wants

    def damaged(peer: Any, message: wire.Wants, fds: list[int]) -> None:
        if daemon._offered == (2, 2):
            del daemon.held[2, 2]
            daemon._open({"step": None})
        else:
            serve(peer, message, fds)

    daemon._on_wants = damaged  # type: ignore[method-assign]
    other = net()
    assert load(daemon, model=other).last_restore["step"] == 1
    assert_equal(other.state_dict(), expected)


def test_a_step_may_be_asked_for_and_steps_are_listed(daemon: RankDaemonDouble) -> None:
    model = net()
    for step in (1, 2):
        save(daemon, step, model=model)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model)
        assert client.restore(step=1) == 1
        assert [row["step"] for row in client.steps()] == [1, 2]
        assert daemon.messages(wire.Join)[-1].ask == {"step": 1, "source": None, "allow_fresh": False}
        with pytest.raises(ValueError, match="source"):
            client.restore(source="cloud")


def test_restore_again_in_the_same_process(daemon: RankDaemonDouble) -> None:
    """Roll back a diverged run without a restart: a new epoch, snapshots go on."""
    with stepped(daemon) as (client, training):
        expected = training.tensors()
        assert client.snapshot(5, must=True).wait("sealed", 30) == "durable"
        training.step()
        client.snapshot(6, must=True)
        assert client.restore(step=5) == 5
        assert_equal(training.tensors(), expected)
        training.step()
        assert client.snapshot(6, must=True).wait("sealed", 30) == "durable"
    assert (2, 6) in daemon.held


def test_many_mismatches_are_grouped_and_the_rest_is_in_the_log(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """P15: an error is read, ten thousand names are not."""
    model = nn.ParameterDict({f"a{i}": torch.zeros(2) for i in range(40)})
    save(daemon, model=model)
    other = nn.ParameterDict({f"a{i}": torch.zeros(2 if i < 10 else i) for i in range(30)} | {"new": torch.zeros(1)})
    with pytest.raises(CkptdError) as caught:
        load(daemon, model=other)
    text = str(caught.value)
    assert "31 mismatches" in text and "and 15 more" in text and "(20 in all)" in text and "(10 in all)" in text
    assert "model.new: not in the snapshot" in text
    assert len(text) < 1500
    assert all(f"model.a{i}: F32[{i}] here" in caplog.text for i in range(10, 30))


def optimized(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    """A net that has made one step, unless ``options`` say fresh, and its optimizer."""
    fresh, model = options.pop("fresh", False), net()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    if not fresh:
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


class MyAdamW(torch.optim.AdamW):
    pass


class Elsewhere:
    """As a library that has a class of its own under a name of torch's."""

    class Adam(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})


@pytest.mark.parametrize("kind", [torch.optim.Adamax, partial(torch.optim.SGD, momentum=0.9), partial(Both, torch.optim.SGD)])
def test_an_optimizer_of_another_class_is_refused_or_told(
    daemon: RankDaemonDouble, kind: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """AdamW's state went into Adamax without a word: KeyError('exp_inf') in its first step."""
    save(daemon, **optimized(torch.optim.AdamW))
    there = optimized(kind, fresh=True)
    before = copy.deepcopy(there["model"].state_dict())
    inner = there["optimizer"].inner if isinstance(there["optimizer"], Both) else there["optimizer"]
    name = f"torch.optim.{type(inner).__name__.lower()}.{type(inner).__name__}"
    with pytest.raises(CkptdError) as caught:
        load(daemon, **there)
    for part in ("optimizer: saved by torch.optim.adamw.AdamW", f"{name} is registered", "strict=False"):
        assert part in str(caught.value)
    assert_equal(there["model"].state_dict(), before)
    assert not inner.state
    client = load(daemon, {"strict": False}, **there)
    told = f"optimizer: saved by torch.optim.adamw.AdamW, {name} is registered"
    assert any(told in note for note in client.last_restore["notes"])
    assert any(told in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert all("exp_avg" in inner.state[parameter] for parameter in there["model"].parameters())


@pytest.mark.parametrize(
    ("saved", "kind"),
    [
        (torch.optim.AdamW, torch.optim.Adam), (torch.optim.Adam, torch.optim.AdamW), (MyAdamW, torch.optim.Adam),
        (torch.optim.Adam, MyAdamW), (torch.optim.Adam, Elsewhere.Adam), (torch.optim.AdamW, partial(Both, torch.optim.AdamW)),
        (partial(Both, torch.optim.AdamW), torch.optim.AdamW),
    ],
)  # fmt: skip
def test_an_optimizer_of_a_class_with_the_same_names_is_taken(
    daemon: RankDaemonDouble, saved: Callable[..., Any], kind: Callable[..., Any]
) -> None:
    save(daemon, **optimized(saved))
    client = load(daemon, **optimized(kind, fresh=True))
    assert not client.last_restore["notes"]


def test_a_snapshot_that_does_not_name_the_class_is_taken_as_before(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = optim.groups_tree
    monkeypatch.setattr(optim, "groups_tree", lambda *args: {k: v for k, v in made(*args).items() if k in ("groups", "of")})
    save(daemon, **optimized(torch.optim.AdamW))
    assert not load(daemon, **optimized(torch.optim.Adamax, fresh=True)).last_restore["notes"]


def test_each_optimizer_of_a_list_has_its_own_class(daemon: RankDaemonDouble) -> None:
    """By parameter, not by place: another split of the same parameters finds its classes."""

    def split(first: Any, second: Any) -> dict[str, Any]:
        model: Any = net()
        return {"model": model, "optimizer": [first(model[0].parameters(), lr=0.01), second(model[2].parameters(), lr=0.01)]}

    here = split(torch.optim.AdamW, torch.optim.RMSprop)
    here["model"](torch.ones(2, 20)).sum().backward()
    for optimizer in here["optimizer"]:
        optimizer.step()
    save(daemon, **here)
    there = split(torch.optim.AdamW, torch.optim.RMSprop)
    there["optimizer"].reverse()
    load(daemon, **there)
    with pytest.raises(CkptdError) as caught:
        load(daemon, **split(torch.optim.AdamW, torch.optim.AdamW))
    text = str(caught.value)
    assert "saved by torch.optim.rmsprop.RMSprop, torch.optim.adamw.AdamW is registered" in text
    assert "saved by torch.optim.adamw.AdamW" not in text


def test_classes_of_several_ranks_are_kept_apart_when_their_groups_are_merged() -> None:
    trees = [
        {"groups": [{"lr": 1}], "of": {"a": 0}, "kinds": [["x.Adam"]], "kind": [0]},
        {"groups": [{"lr": 2}], "of": {"b": 0}},
        {"groups": [{"lr": 3}, {"lr": 3}], "of": {"c": 1}, "kinds": [["x.SGD"], ["x.Adam"]], "kind": [0, 1]},
    ]
    merged = optim.merge_groups(trees)
    assert [optim.kinds_of(merged, key) for key in "abc"] == [["x.Adam"], [], ["x.Adam"]]
