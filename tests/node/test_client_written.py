"""What is written past the fence (P1): its version counter moves, the snapshot is void, and it is copied at once from then on.

Every copy is delayed, as in the tear test: without the delay most of these snapshots pass by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ckptd_client import Client, _switches, capture
from ckptd_client.handles import Handle
from torch import nn

from ckptd.core import failpoint
from tests.node.client_training import (
    Training,
    all_copied,
    assert_same,
    begun,
    bits_equal,
    connected,
    restored,
    stored,
)
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.node.test_client_tear import Everything
from tests.waiting import until

DELAY_S = 0.05
SNAPSHOTS = 6


@pytest.fixture(autouse=True)
def _delayed() -> Iterator[None]:
    failpoint.arm(f"capture.tensor:sleep={DELAY_S}")
    yield
    failpoint.arm("")


class Words(Training):
    """An embedding that renormalises what it looks up, in the forward pass, before a linear layer."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.embedding = nn.Embedding(300, 64, max_norm=1.0)
        self.model = nn.Sequential(self.embedding, nn.Linear(64, 200), nn.Linear(200, 200))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.arange(300)).square().mean().backward()
        self.optimizer.step()


def clamp(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.clamp_(-0.01, 0.01)


def written(client: Client, training: Training, step: int) -> Handle:
    """A snapshot of this step, of which a weight is written afterwards."""
    training.step()
    handle = client.snapshot(step, must=True)
    clamp(training)
    return handle


def look(training: Training) -> None:
    training.model(torch.arange(300))


def nothing(training: Training) -> None:
    pass


class Seen:
    """What became of each snapshot, and what of the sealed ones is wrong."""

    def __init__(self) -> None:
        self.statuses: list[str] = []
        self.torn: list[str] = []

    @property
    def void(self) -> list[str]:
        return [status for status in self.statuses if status.startswith("void")]


def trained(
    daemon: RankDaemonDouble, training: Training, between: Callable[[Any], None], snapshots: int = SNAPSHOTS
) -> Seen:
    """``between``: what the loop does to the weights after snapshot() and before the next step."""
    seen = Seen()
    with restored(daemon, training) as client:
        for step in range(1, snapshots + 1):
            training.step()
            expected = training.tensors()
            handle = client.snapshot(step, must=True)
            between(training)
            training.step()
            seen.statuses.append(handle.wait("sealed", 30))
            if (1, step) in daemon.held:
                found = stored(daemon.held[1, step][0])
                seen.torn += [f"{step}: {key}" for key in expected if not bits_equal(found[key], expected[key])]
    return seen


@pytest.mark.writes_what_is_read
@pytest.mark.parametrize(("make", "between"), [(Words, look), (Words, nothing), (lambda: Training(200), clamp)])
def test_a_weight_that_is_written_after_the_snapshot_is_torn_in_none(
    daemon: RankDaemonDouble, make: Callable[[], Training], between: Callable[[Training], None]
) -> None:
    seen = trained(daemon, make(), between)
    assert seen.torn == []
    assert seen.void == ["void: written before the fence: model.0.weight"], "the first; then it is copied at once"
    assert seen.statuses.count("durable") == SNAPSHOTS - 1


def reset_moments(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].zero_()


def reset_one(training: Training) -> None:
    training.optimizer.state[training.model[0].weight]["exp_avg"].zero_()


@pytest.mark.writes_what_is_read
@pytest.mark.parametrize("between", [reset_moments, reset_one])
def test_optimizer_state_that_is_written_after_the_snapshot_is_torn_in_none(
    daemon: RankDaemonDouble, between: Callable[[Training], None]
) -> None:
    """By hand, before its optimizer has stepped again."""
    seen = trained(daemon, Training(200), between)
    assert seen.torn == []
    assert len(seen.void) == 1 and seen.void[0].startswith("void: written before the fence: optimizer.model.0.weight.exp_avg")
    assert seen.statuses.count("durable") == SNAPSHOTS - 1


def test_state_that_its_optimizer_writes_is_no_write_past_the_fence(daemon: RankDaemonDouble) -> None:
    """Nor is that of one of two optimizers which step one after the other, at one fence each."""
    training = Training(200)
    first, second = ([*part.parameters()] for part in (training.model[0], training.model[2]))
    training.optimizer = torch.optim.AdamW(first, lr=0.1)
    other = torch.optim.AdamW([*second, *training.model[1].parameters()], lr=0.1)
    with begun(daemon, model=training.model, one=training.optimizer, two=other) as client:
        for step in range(1, 5):
            training.step()
            other.step()
            handle = client.snapshot(step, must=True)
            training.step()
            other.step()
            assert handle.wait("sealed", 30) == "durable"


@pytest.mark.writes_what_is_read
def test_only_the_tensors_that_were_written_are_copied_at_once(daemon: RankDaemonDouble) -> None:
    training = Training(200)
    with restored(daemon, training) as client:
        handle = written(client, training, 1)
        assert handle.wait("sealed", 30) == "void: written before the fence: model.0.weight"
        assert any("model.0.weight" in text for text in client.health().problems)
        training.step()
        expected = training.tensors()
        handle = client.snapshot(2, must=True)
        assert not client._engine._all_copied(), "its moments are still copied in the background"
        clamp(training)
        training.step()
        assert handle.wait("sealed", 30) == "durable"
        assert_same(daemon.held[1, 2][0], expected)


@pytest.mark.writes_what_is_read
def test_the_snapshot_after_a_write_is_audited(daemon: RankDaemonDouble) -> None:
    """Who writes one tensor by hand may write others in ways that move no counter."""
    daemon.policy["audit_every"] = 1000
    training = Training(200)
    with restored(daemon, training) as client:
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        handle = written(client, training, 2)
        training.step()
        assert handle.wait("sealed", 30).startswith("void: written before the fence")
        handle = client.snapshot(3, must=True)
        all_copied(client)
        state = training.optimizer.state[training.model[0].weight]["exp_avg"]
        state.data.add_(1)
        training.step()
        assert handle.wait("sealed", 30) == "void: hidden write: optimizer.model.0.weight.exp_avg"


@pytest.mark.writes_what_is_read
def test_the_second_time_the_owner_is_copied_at_once(daemon: RankDaemonDouble) -> None:
    training = Training(200)
    third = nn.Linear(200, 200)
    training.model.append(third)
    training.optimizer.add_param_group({"params": list(third.parameters())})
    training.model[2] = nn.Linear(200, 200)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.01)
    with restored(daemon, training) as client:
        for step, layer in enumerate((0, 2, 3), start=1):
            training.step()
            expected = training.tensors()
            handle = client.snapshot(step, must=True)
            with torch.no_grad():
                training.model[layer].weight.mul_(0.5)
            training.step()
            taken = handle.wait("sealed", 30)
            assert taken.startswith("void: written" if step < 3 else "durable"), (step, taken)
        assert_same(daemon.held[1, 3][0], expected)


@pytest.mark.writes_what_is_read
def test_without_a_fence_the_counters_are_asked_before_the_seal(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """The last step of a run: no optimizer comes after it. P1: nor does wait() capture what is there now under its
    number: it may be an average of weights that was put in place for an evaluation."""
    training = Training(200)
    with restored(daemon, training) as client:
        handle = written(client, training, 1)
        until(lambda: handle.status.startswith("void: written"), what="found though nobody fenced")
        assert client.wait("durable", 30) == handle.status
        assert "not captured again, as the state has changed since: model.0.weight" in caplog.text and daemon.held == {}
        expected = training.tensors()
        assert client.snapshot(1, must=True).wait("durable", 30) == "durable"  # somebody says so
        assert_same(daemon.held[1, 1][0], expected)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many, the caller among them, for one operation of torch's on the host, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.writes_what_is_read
@pytest.mark.parametrize(("write_s", "threads"), [(capture.WRITE_S, 2), (0.0, 1), (0.0, 16)], indirect=["threads"])
def test_a_write_that_is_under_way_when_the_last_byte_is_copied_is_found(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, write_s: float, threads: int
) -> None:
    """A counter moves when the write is over. Nothing is delayed here but the write, which may take longer than is waited for.
    Who calls it is soon done with its own part, and sleeps until the others of torch's pool are."""
    monkeypatch.setattr(capture, "WRITE_S", write_s)
    failpoint.arm("")
    torch.manual_seed(1)
    weight = torch.rand(1 << 24 if write_s else 1 << 20 if threads == 1 else 1 << 23)  # copied while the slow write below runs
    if threads > 2:
        weight[: len(weight) // threads] = 0.0  # where the slow function below has a pole, which is quick
    parameter = nn.Parameter(weight)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with begun(daemon, w=parameter, opt=optimizer) as client:
        for step in range(1, 4):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            expected = parameter.detach().clone()
            handle = client.snapshot(step, must=True)
            with torch.no_grad():
                if not write_s and step == 1:
                    parameter.polygamma_(2)  # one call of a few tenths of a second
                elif write_s and step < 3:
                    parameter.pow_(1.1).cos_()
            until(lambda handle=handle: handle.status != "capturing", what="its end")  # type: ignore[misc]
            if (1, step) in daemon.held:
                assert bits_equal(stored(daemon.held[1, step][0])["w"], expected), f"snapshot {step} is torn"


def test_a_write_by_hand_behind_the_users_own_fence_is_none(daemon: RankDaemonDouble) -> None:
    """``fenced=True``: the user fences and writes, the counter moves after the fence."""
    average = {"w": torch.zeros(100, 100)}
    training = Training(200)
    with connected(daemon, training) as client:
        client.register(average=average, fenced=True)
        client.restore()
        for step in range(1, 4):
            training.step()
            expected = average["w"].clone()
            handle = client.snapshot(step, must=True)
            client.fence()
            average["w"].add_(1)
            assert handle.wait("sealed", 30) == "durable"
            assert bits_equal(stored(daemon.held[1, step][0])["average.w"], expected)
        assert client.health().problems == []


@pytest.mark.parametrize("kind", ["fused", "foreach", "plain"])
def test_nobody_cries_wolf(daemon: RankDaemonDouble, kind: str) -> None:
    """Two optimizers, BatchNorm, averages in three ways, two backward passes to a step; every snapshot is audited."""
    daemon.policy["audit_every"] = 1
    failpoint.arm("")
    everything = Everything(kind)
    with Client.connect("job", socket=daemon.path) as client:
        everything.register(client)
        client.restore()
        for step in range(1, 6):
            everything.step(client)
            handle = client.snapshot(step, must=True)
            everything.step(client)
            assert handle.wait("sealed", 30) == "durable", step
        assert client.health().problems == []


def test_lbfgs_moves_its_weights_behind_the_fence(daemon: RankDaemonDouble) -> None:
    daemon.policy["audit_every"] = 1
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 100)).square().mean()
        loss.backward()
        return loss

    with begun(daemon, model=model, optimizer=optimizer) as client:
        for step in range(1, 7):
            optimizer.step(closure)
            expected = model.weight.detach().clone()
            handle = client.snapshot(step, must=True)
            optimizer.step(closure)
            status = handle.wait("sealed", 30)
            assert status == "durable" or (status == "skipped: no memory" and step < 4), "its state grows"
            assert status != "durable" or bits_equal(stored(daemon.held[1, step][0])["model.weight"], expected)


def test_inference_tensors_have_no_counter_and_are_copied_at_once(daemon: RankDaemonDouble) -> None:
    """A base model that was loaded under inference_mode, below a head that trains."""
    with torch.inference_mode():
        base = nn.Linear(200, 200)
    base.requires_grad_(False)
    head = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    with begun(daemon, model=nn.ModuleList([base, head]), optimizer=optimizer) as client:
        for step in range(1, 4):
            head(torch.ones(2, 200)).sum().backward()
            optimizer.step()
            expected = base.weight.clone()
            handle = client.snapshot(step, must=True)
            with torch.inference_mode():
                base.weight.mul_(0.5)
            assert handle.wait("sealed", 30) == "durable", handle.status
            assert bits_equal(stored(daemon.held[1, step][0])["model.0.weight"], expected)


@pytest.mark.chaos
@pytest.mark.writes_what_is_read
@pytest.mark.parametrize("make", [Words, lambda: Training(200)])
def test_without_the_look_at_the_counters_these_snapshots_are_torn(
    daemon: RankDaemonDouble, make: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_switches, "VERSIONS", False)
    assert trained(daemon, make(), nothing if make is Words else clamp).torn != []


@pytest.mark.writes_what_is_read
def test_a_tensor_that_is_written_and_taken_out_of_its_dict_while_it_is_captured_is_void(daemon: RankDaemonDouble) -> None:
    """P15: nobody was told of it by then, neither the handle nor the daemon, which waited for that grant's answer."""
    training, more = Training(), {"x": torch.zeros(100, 100), "y": torch.zeros(100, 100)}
    with restored(daemon, training) as client:
        client.register(fenced=True, extra=more)
        training.step()
        handle = client.snapshot(1, must=True)
        more.pop("x").add_(1)
        client.snapshot(2, must=True)  # which looks at the dict again
        assert until(lambda: not handle.taken and handle.status) == "void: written before the fence: extra.x"
        daemon.wait_for(lambda: handle.status.removeprefix("void: ") in daemon.voided.values())
