"""Steps that no optimizer's hook sees: replayed graphs, optimizers of one's own. Not skipped without a word, and not torn (D6).

There is no graph without a device: a replay is what a user sees of one, weights and moments that change while nobody calls
``step()``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from ckptd_client import Client
from torch import nn

from ckptd.core import failpoint
from tests.node.client_training import Training, assert_same, bits_equal, restored, stored
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until

SNAPSHOTS = 12
DELAY_S = 0.05
UNSEEN = "no optimizer step since the last snapshot"


@pytest.fixture(autouse=True)
def _delayed() -> Iterator[None]:
    failpoint.arm(f"capture.tensor:sleep={DELAY_S}")
    yield
    failpoint.arm("")


def written(training: Training) -> list[torch.Tensor]:
    """All that a step writes."""
    states = training.optimizer.state.values()
    return [*training.model.parameters(), *(value for state in states for value in state.values() if value.ndim)]


def counted(training: Training) -> None:
    """An optimizer of one's own, which writes as torch does: counters move."""
    with torch.no_grad():
        for tensor in written(training):
            tensor.mul_(0.9).add_(0.01)


def replayed(training: Training) -> None:
    """As a graph does: no counter moves."""
    for tensor in written(training):
        tensor.data.mul_(0.9).add_(0.01)


def told(client: Client) -> None:
    """client.stepped(), where there is such a thing."""
    getattr(client, "stepped", lambda: None)()


def trained(
    daemon: RankDaemonDouble, training: Training, step: Callable[[Training], None], after: Callable[[Client], None] | None = None
) -> tuple[list[str], list[str], list[str]]:
    """(what became of each snapshot, what of the sealed ones is wrong, health's problems). One step by the hook comes first."""
    statuses, torn, expected = [], [], {}
    with restored(daemon, training) as client:
        training.step()
        for group in training.optimizer.param_groups:
            group["capturable"] = group.pop("was_capturable", False)
        for number in range(1, SNAPSHOTS + 1):
            expected[number] = training.tensors()
            until(lambda: len(client._session.grants) > 0, what="a grant")  # a slot is free again a while after its snapshot
            handle = client.snapshot(number, must=number == 1)
            step(training)
            if after is not None:
                after(client)
            statuses.append(handle.wait("sealed", 30) if handle.taken else handle.status)
        problems = client.health().problems
    for (_, number), ranks in daemon.held.items():
        found = stored(ranks[0])
        torn += [f"{number}: {key}" for key, value in expected[number].items() if not bits_equal(found[key], value)]
    return statuses, torn, problems


@pytest.mark.writes_what_is_read
def test_a_step_that_only_counters_show_is_not_missed(daemon: RankDaemonDouble) -> None:
    """The first such step voids its snapshot; the optimizer's state, which is not watched, is copied at once then too."""
    statuses, torn, _ = trained(daemon, Training(200), counted)
    assert torn == []
    assert statuses.count("durable") >= 3 and not any(UNSEEN in status for status in statuses), statuses


@pytest.mark.writes_what_is_read
def test_what_may_be_replayed_by_a_graph_is_neither_skipped_nor_torn(daemon: RankDaemonDouble) -> None:
    """``capturable=True``, and nobody calls step()."""
    training = Training(200)
    for group in training.optimizer.param_groups:
        group["was_capturable"] = True
    statuses, torn, problems = trained(daemon, training, replayed)
    assert [text for text in torn if not text.startswith("1:")] == [], "the first is of a step that a hook saw"
    assert statuses.count("durable") >= 3 and not any(UNSEEN in status for status in statuses), statuses
    assert problems == []


@pytest.mark.writes_what_is_read
def test_steps_that_nobody_sees_are_a_problem_of_health(daemon: RankDaemonDouble) -> None:
    statuses, _, problems = trained(daemon, Training(200), replayed)
    assert statuses[1:] == [f"skipped: {UNSEEN}"] * (SNAPSHOTS - 1)
    assert any("client.stepped()" in text for text in problems), problems


def test_a_few_snapshots_without_a_step_are_none(daemon: RankDaemonDouble) -> None:
    """Gradients are accumulated; and the next step ends the trouble."""
    training = Training(200)
    with restored(daemon, training) as client:
        for number in range(1, 31):
            if number % 4 == 1:
                training.step()
            handle = client.snapshot(number, must=number % 4 == 1)
            assert handle.taken == (number % 4 == 1)
        assert client.health().problems == []
        for number in range(31, 50):
            client.snapshot(number)
        assert client.health().problems != []
        training.step()
        assert client.snapshot(50, must=True).wait("sealed", 30) == "durable"
        assert client.health().problems == []


@pytest.mark.writes_what_is_read
def test_steps_that_the_user_tells_of_are_captured_whole(daemon: RankDaemonDouble) -> None:
    statuses, torn, problems = trained(daemon, Training(200), replayed, told)
    assert torn == []
    assert statuses[0].startswith("void: a step was made"), "nobody had said so yet"
    assert statuses.count("durable") >= 3 and not any(UNSEEN in status for status in statuses), statuses
    assert problems == []


def test_behind_the_users_own_fence_captures_overlap_with_such_steps(daemon: RankDaemonDouble) -> None:
    training = Training(200)
    with restored(daemon, training) as client:
        training.step()
        for number in range(1, 5):
            expected = training.tensors()
            handle = client.snapshot(number, must=True)
            assert not client._engine._all_copied(), "in the background"
            client.fence()
            replayed(training)
            told(client)
            assert handle.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, number][0], expected)


def test_nothing_of_the_trainers_is_kept_alive(daemon: RankDaemonDouble) -> None:
    """Its counters are looked at again at the next snapshot, if it is still there then."""
    with Client.connect("job", socket=daemon.path) as client:
        training = Training(200)
        client.register(model=training.model, optimizer=training.optimizer)
        client.restore()
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        until(lambda: client._engine.idle, what="the end of the capture")
        weight = weakref.ref(training.model[0].weight)
        training.model[0].weight = nn.Parameter(torch.zeros(200, 200))
        training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
        training.optimizer.state.clear()
        gc.collect()
        assert weight() is None
        client.snapshot(2)


def test_wait_captures_no_step_late_that_a_graph_may_have_left(daemon: RankDaemonDouble) -> None:
    training = Training(200)
    daemon.granting = "asked"
    with restored(daemon, training) as client:
        training.step()
        for group in training.optimizer.param_groups:
            group["capturable"] = True
        for number in (1, 2):
            assert client.snapshot(number).status.startswith("skipped")
        replayed(training)
        assert client.wait("sealed", 5).startswith("skipped")
    assert daemon.held == {}


def test_an_optimizer_that_was_captured_by_a_graph_is_not_skipped(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hook ran once, under capture."""
    training = Training(200, capturable=torch.empty(0).is_cuda)  # which no other device has, and a graph needs
    with restored(daemon, training) as client:
        training.step()
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_initialized", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            training.step()
        for number in range(1, 7):
            expected = training.tensors()
            until(lambda: len(client._session.grants), what="a grant")
            handle = client.snapshot(number)
            replayed(training)
            assert UNSEEN not in handle.status
            if handle.taken and handle.wait("sealed", 30) == "durable":
                assert_same(daemon.held[1, number][0], expected)
        assert len(daemon.held) >= 3 and client.health().problems == []
