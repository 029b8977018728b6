"""snapshot() with a scripted daemon: what is captured, when it is skipped, and that it never hurts training (P5)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ckptd_client import CkptdError, Client, tree
from ckptd_client.session import LARGER, NO_GRANT_YET
from torch import nn

from ckptd.core import failpoint
from ckptd.wire import rank as wire
from tests.node.client_training import (
    Training,
    all_copied,
    assert_same,
    connected,
    copying,
    first_snapshot,
    restored,
    stepped,
    stored,
)
from tests.node.rank_daemon_double import Peer, RankDaemonDouble, _objects
from tests.waiting import until


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


NOT_YET = f"skipped: {NO_GRANT_YET}"


def test_a_snapshot_holds_exactly_what_was_there_when_it_was_called(daemon: RankDaemonDouble) -> None:
    training = Training()
    with connected(daemon, training) as client:
        assert client.restore() is None
        for step in range(1, 6):
            training.step()
            expected = training.tensors()
            handle = client.snapshot(step, {"loss": step}, must=True)
            assert handle.status in ("capturing", "captured", "durable")
            training.step()
            assert handle.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, step][0], expected)
    layouts = {held[0].layout.layout_id for held in daemon.held.values()}
    assert len(layouts) == 1
    daemon.wait_for(lambda: daemon.messages(wire.Goodbye))
    assert daemon.messages(wire.Goodbye)[0].finished


def test_a_step_is_an_integer_of_any_kind(daemon: RankDaemonDouble) -> None:
    training = Training()
    with restored(daemon, training) as client:
        for step in (np.int64(1), torch.tensor(2)):
            training.step()
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"
        for wrong in (3.0, "3", None):
            with pytest.raises(TypeError, match="integer"):
                client.snapshot(wrong)
        with pytest.raises(TypeError, match="integer"):
            client.restore(step="3")  # type: ignore[arg-type]
    assert sorted(daemon.held) == [(1, 1), (1, 2)]


def test_a_job_name_that_is_not_usable_is_refused_at_once(daemon: RankDaemonDouble) -> None:
    """It was refused by the daemon, and read as no daemon at all."""
    for name in ("a/b", "", ".hidden"):
        with pytest.raises(CkptdError, match="job name is not usable") as caught:
            Client.connect(name, socket=daemon.path)
        assert "letters, digits" in caught.value.hint


def test_a_layout_that_outgrows_its_slots_is_skipped_once_and_the_slots_grow(
    daemon: RankDaemonDouble,
) -> None:
    with stepped(daemon, state_bytes=1000) as (client, training):
        until(lambda: len(client._session.grants) == 3, what="all grants")
        client.register(more=nn.Linear(600, 600))
        assert client.snapshot(1).status.startswith(f"skipped: {LARGER}: a snapshot needs ")
        assert any("the slot has" in text for text in client.health().problems)
        training.step()
        until(
            lambda: client.snapshot(client._session.called + 1, must=True).taken, what="slots of the new size"
        )
        assert client.wait("sealed", 30) == "durable"
        assert client.health().ok
    assert daemon.messages(wire.Resize)


def test_must_waits_for_the_larger_slots(tmp_path: Path) -> None:
    """It was "skipped: no memory" at once, with each growth, whatever memory there was."""
    with (
        RankDaemonDouble(tmp_path / "d.sock", granting="asked") as daemon,
        stepped(daemon, state_bytes=1000) as (client, training),
    ):
        for step, width in enumerate((600, 900), start=1):
            client.register(**{f"more{step}": nn.Linear(width, width)})
            handle = client.snapshot(step, must=True)
            assert handle.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, step][0], stored(daemon.held[1, step][0]) | training.tensors())
            training.step()
        assert client.health().ok
        assert not client.health().facts["lost"]


def test_must_does_not_wait_for_a_step_that_the_other_ranks_have_left(tmp_path: Path) -> None:
    """P5: they have captured it, and wait for this rank in their next collective."""
    with RankDaemonDouble(tmp_path / "d.sock", granting="asked") as daemon, stepped(daemon, state_bytes=1000) as (client, _):
        gave_up = daemon._on_gaveup

        def go_on(peer: Peer, message: wire.GaveUp, fds: list[int]) -> None:
            daemon.on_asked = False
            gave_up(peer, message, fds)
            daemon.grant(message.step + 1)

        daemon._on_gaveup = go_on  # type: ignore[method-assign]
        client.register(more=nn.Linear(600, 600))
        began = time.monotonic()
        assert client.snapshot(1, must=True).status == f"skipped: {LARGER}: the other ranks went on meanwhile"
        assert time.monotonic() - began < 20.0


@pytest.mark.parametrize("told", ["", "no memory: rank 0 on double: 0 of 3 slots"])
def test_must_waits_for_larger_slots_within_its_bound_and_says_what_is_so(told: str, tmp_path: Path) -> None:
    """P5, P15."""
    with (
        RankDaemonDouble(tmp_path / "d.sock", granting="asked") as daemon,
        stepped(daemon, state_bytes=1000, must_timeout_s=1.0) as (client, _),
    ):
        daemon._on_resize = lambda *_: None  # type: ignore[method-assign]
        daemon.waits = told
        client.health()
        client.register(more=nn.Linear(600, 600))
        began = time.monotonic()
        status = client.snapshot(1, must=True).status
        assert 0.5 < time.monotonic() - began < 5.0
        assert status.startswith(f"skipped: {told or LARGER}")
        assert 1 < len(daemon.messages(wire.GaveUp)) < 20


def test_a_daemon_without_memory_is_named_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    why = "no memory: rank 0 on double: 0 of 3 slots"
    with RankDaemonDouble(tmp_path / "d.sock", slots=0, granting="never") as daemon:
        training = Training()
        with connected(daemon, training) as client, caplog.at_level(logging.WARNING, "ckptd"):
            client.restore()
            daemon.waits = why
            client.health()  # else it is told unasked
            for step in (1, 2, 3):
                training.step()
                assert client.snapshot(step).status == f"skipped: {why}"
            assert client.health().facts["lost"]["skipped: no memory"]["count"] == 3
            assert any("no memory" in text for text in client.health().problems)
    assert len(caplog.records) == 1


def test_nothing_is_captured_twice_without_an_optimizer_step(daemon: RankDaemonDouble) -> None:
    with stepped(daemon) as (client, _):
        until(lambda: len(client._session.grants) == 3, what="all grants")  # one that comes after the call is for that step alone
        assert client.snapshot(1, must=True).taken
        assert client.snapshot(2).status == "skipped: no optimizer step since the last snapshot"
        kept = client.snapshot(2, keep=True)
        assert kept.taken, kept.status
        assert client.wait("durable", 30) == "durable"
    assert daemon.messages(wire.SealedSlot)[-1].keep


def test_a_step_that_goes_backwards_fails_and_says_so(daemon: RankDaemonDouble) -> None:
    with stepped(daemon) as (client, training):
        assert client.snapshot(5, must=True).wait("sealed", 30) in ("sealed", "durable")
        training.step()
        assert client.snapshot(4).status.startswith("failed: step went backwards")
        assert any("steps must grow" in text for text in client.health().problems)
        assert client.snapshot(6, must=True).wait("sealed", 30) in ("sealed", "durable")
        assert client.health().ok, "one that counts is behind it: what it says is over"


def test_a_step_before_the_restored_one_is_taken_and_told(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """A program that forgot to set its counter. It is captured all the same: unprotected nobody is better off."""
    with stepped(daemon) as (client, _):
        assert client.snapshot(5, must=True).wait("sealed", 30) in ("sealed", "durable")
    for steps, told in (((5, 6), 0), ((1, 2), 1)):
        caplog.clear()
        training = Training()
        with restored(daemon, training) as client:
            for step in steps:
                training.step()
                assert client.snapshot(step, must=True).wait("sealed", 30) in ("sealed", "durable")
        assert caplog.text.count("count on from what restore() returned") == told


def test_wait_captures_nothing_late(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """P1: it took what was there by then, as averaged weights, a scheduler's next rate or an epoch's end, under the old number."""
    daemon.granting = "asked"
    with stepped(daemon) as (client, training):
        handle = client.snapshot(9)
        nn.init.zeros_(training.model[0].weight)
        assert client.wait(level="durable", timeout=30) == handle.status == NOT_YET and daemon.held == {}
        assert f"step 9 is {NOT_YET}; snapshot(9, must=True) waits for its turn" in caplog.text
        assert client.snapshot(9, must=True).wait("durable", 30) == client.wait("durable", 30) == "durable"


def test_wait_never_gives_an_older_step_for_the_newest_call(tmp_path: Path) -> None:
    """P2: step 1 is durable, step 2 was skipped or failed: nobody may hear "durable", also once training has moved on."""
    with RankDaemonDouble(tmp_path / "d.sock") as daemon:
        training, notes = Training(), dict[str, object]()
        with connected(daemon, training) as client:
            client.register(notes=notes)
            first_snapshot(client, training, "durable")
            daemon.granting = "never"
            for grant in list(daemon._grant_steps):
                daemon.take_back(grant)
            until(lambda: not len(client._session.grants))
            training.step()
            assert client.snapshot(2).status == client.wait("durable", 30) == NOT_YET
            training.step()
            assert client.wait("durable", 30) == NOT_YET
            daemon.granting, notes["bad"] = "asked", object()
            status = client.snapshot(3, must=True).status
            training.step()
            assert client.wait("durable", 30) == status and status.startswith("failed: type")


def test_wait_returns_a_status_at_its_timeout_and_levels_may_fall(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """P2: a level that falls is told as fallen. P15: a wait that ends otherwise is in the log, once, and no other."""
    daemon.durable, daemon.level = False, 0
    daemon.policy["replicas"] = 1
    with stepped(daemon) as (client, _):
        handle = client.snapshot(1, must=True)
        began = time.monotonic()
        assert client.wait("durable", timeout=0.3) == "sealed"
        assert handle.wait("durable", timeout=0.0) == "sealed"
        assert 0.2 < time.monotonic() - began < 3
        daemon._tell(wire.Level(1, 1, handle.grant, 1, 1, False))
        until(lambda: handle.status == "protected")
        daemon._tell(wire.Level(1, 1, handle.grant, 0, 1, False))
        until(lambda: handle.status == "protected 0/1, degraded")
        daemon._tell(wire.Level(1, 1, handle.grant, 0, 1, True))
        assert handle.wait("durable", 30) == "durable"
        with pytest.raises(ValueError, match="level"):
            client.wait("forever")
        said = [text for text in caplog.messages if "ended otherwise" in text]
        assert said == ["ckptd job job: wait('durable') ended otherwise: step 1 is sealed"]


def test_a_word_about_another_capture_of_the_step_is_not_about_this_one(daemon: RankDaemonDouble) -> None:
    """P2: ranks of one node hear what is said of a step that one of them took twice."""
    daemon.durable, daemon.level = False, 0
    daemon.policy["replicas"] = 1
    with stepped(daemon) as (client, _):
        handle = client.snapshot(1, must=True)
        assert handle.wait("sealed") == "sealed"
        for other in (handle.grant - 1, handle.grant + 1):
            daemon._tell(wire.Level(1, 1, other, -1, 0, False, "rank 1 missed it"))
        daemon._tell(wire.Level(1, 1, handle.grant, 1, 1, False))
        until(lambda: handle.status == "protected")
        assert client._session.grants.took(1)


def test_leaving_with_an_exception_does_not_wait(daemon: RankDaemonDouble) -> None:
    daemon.durable, daemon.level = False, -1
    training = Training()
    began = time.monotonic()

    def interrupted() -> None:
        with restored(daemon, training) as client:
            training.step()
            client.snapshot(1, must=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < 5
    daemon.wait_for(lambda: daemon.messages(wire.Goodbye))
    assert not daemon.messages(wire.Goodbye)[0].finished


def test_a_foreign_type_that_appears_later_is_a_status_not_an_exception(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    training, notes = Training(), {"fine": 1}
    with connected(daemon, training) as client:
        client.register(notes=notes)
        client.restore()
        training.step()
        notes["bad"] = object()  # type: ignore[assignment]
        with caplog.at_level(logging.WARNING, "ckptd"):
            assert client.snapshot(1, must=True).status.startswith("failed: type: ")
            training.step()
            assert client.snapshot(2, must=True).status.startswith("failed: type: ")
        assert [record.message for record in caplog.records if "notes.bad" in record.message] != []
        assert len(caplog.records) == 1  # one warning
        assert any("notes.bad" in text for text in client.health().problems)
        del notes["bad"]
        training.step()
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"
        assert client.health().ok


def test_a_parameter_that_nobody_registered_is_named(daemon: RankDaemonDouble) -> None:
    training = Training()
    stray = nn.Parameter(torch.zeros(2, 5))
    training.optimizer.add_param_group({"params": [stray]})
    with connected(daemon, training) as client:
        with pytest.raises(Exception, match="belongs to no registered module"):
            client.restore()
        assert client.snapshot(1).status.startswith("failed: optimizer (AdamW, group 1) holds a parameter of shape [2, 5]")


def test_a_full_socket_drops_news_and_keeps_what_counts(daemon: RankDaemonDouble) -> None:
    """A daemon that reads nothing for a while: calls are dropped, the seal waits in the queue and arrives."""
    with stepped(daemon) as (client, _):
        with daemon.changed:  # the double's threads stand still
            for step in range(1, 20_000):
                client._session.link.send_or_drop(wire.Skipped(step, "x" * 2000))
            began = time.monotonic()
            handle = client.snapshot(30_000)
            assert time.monotonic() - began < 1
            assert handle.taken
        assert handle.wait("sealed", 20) == "durable"


def test_fused_optimizers_and_batchnorm_do_not_bump_versions_so_nothing_rests_on_them(
    daemon: RankDaemonDouble,
) -> None:
    training = Training(fused=True)
    training.step()
    norm, weight = training.model[1], training.model[0].weight
    assert isinstance(norm, nn.BatchNorm1d)
    with restored(daemon, training) as client:
        versions = weight._version, norm.running_mean._version  # type: ignore[union-attr]
        before = weight.detach().clone(), norm.running_mean.clone()  # type: ignore[union-attr]
        training.step()
        changed = not torch.equal(before[0], weight), not torch.equal(before[1], norm.running_mean)  # type: ignore[arg-type]
        assert changed == (True, True)
        print("versions grew by", weight._version - versions[0], norm.running_mean._version - versions[1])  # type: ignore[union-attr]
        expected = training.tensors()
        client.snapshot(1, must=True)
        training.step()
        client.wait("sealed", 30)
        assert_same(daemon.held[1, 1][0], expected)


def test_an_audit_finds_a_write_that_escapes_the_fence(daemon: RankDaemonDouble) -> None:
    """Weights written without any optimizer (SAM, schedule-free, swaps) between snapshot and fence."""
    daemon.policy["audit_every"] = 1
    training = Training(width=300)
    with restored(daemon, training) as client:
        training.step()
        handle = client.snapshot(1, must=True)
        all_copied(client)
        training.model[0].weight.data.add_(1)
        training.step()
        assert handle.wait("sealed", 30) == "void: hidden write: model.0.weight"
        assert handle.wait("sealed", 1) == "void: hidden write: model.0.weight", "whoever asks once more is told the same"
        assert any("hidden write" in text for text in client.health().problems)
        expected = training.tensors()  # from now on this owner is copied before snapshot() returns
        failpoint.arm("capture.tensor:sleep=0.2")
        handle = client.snapshot(2, must=True)
        training.model[0].weight.data.add_(1)
        assert handle.wait("sealed", 30) == "durable"
        found = stored(daemon.held[1, 2][0])
        assert torch.equal(found["model.0.weight"], expected["model.0.weight"])


def test_what_failed_stays_that_for_whoever_waits_for_it(daemon: RankDaemonDouble) -> None:
    """P15: the daemon answers that no memory holds any of it; "a daemon was lost" was told then, and none was."""
    training = Training()
    with restored(daemon, training) as client:
        training.model.register_buffer("table", torch.zeros(4, dtype=torch.complex128))
        training.step()
        handle = client.snapshot(1, must=True)
        said = [handle.wait("sealed", 1), client.wait("sealed", 1), handle.wait("sealed", 1)]
        assert all(text.startswith("failed") and "complex128" in text for text in said), said
        assert not any("no memory holds" in text for text in client.health().problems)


def test_an_audit_of_the_last_step_does_not_wait_for_an_optimizer(daemon: RankDaemonDouble) -> None:
    daemon.policy["audit_every"] = 1
    training = Training()
    with connected(daemon, training) as client:
        first_snapshot(client, training, "durable")
        assert daemon.held[1, 1]
        until(lambda: client._engine.idle, what="compared and handed over, though no step came after it")


@pytest.mark.writes_what_is_read
def test_the_fence_gives_up_at_its_timeout_and_training_goes_on(daemon: RankDaemonDouble) -> None:
    """P5: bounded, whatever the capture does; the step is void everywhere."""
    daemon.policy["fence_timeout_s"] = 0.3
    training = Training(width=1200)
    with restored(daemon, training) as client:
        training.step()
        failpoint.arm("capture.tensor:sleep=2")
        handle = client.snapshot(1, must=True)
        copying(client)  # else the training thread may copy all of it before the engine's thread sleeps
        began = time.monotonic()
        training.step()
        assert time.monotonic() - began < 1.5
        failpoint.arm("")
        until(lambda: handle.status == "void: fence timeout")
        until(lambda: "fence timeout" in daemon.voided.values(), what="the daemon to hear it")
        assert any("fence_timeout_s" in text for text in client.health().problems)
        training.step()
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    assert (1, 1) not in daemon.held


def test_snapshot_returns_at_once_and_hides_behind_compute(daemon: RankDaemonDouble) -> None:
    training = Training(width=2000)  # 16 MB and three times that of state
    with restored(daemon, training) as client:
        training.step()
        failpoint.arm("capture.tensor:sleep=0.1")
        began = time.monotonic()
        client.snapshot(1, must=True)
        assert time.monotonic() - began < 0.3
        failpoint.arm("")
        assert client.wait("sealed", 30) == "durable"


def test_values_and_tensors_under_any_names(daemon: RankDaemonDouble) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(
            w=weight,
            opt=optimizer,
            progress={"epoch": 3, "seen": {1, 2}},
            seed=[5],
            nested={"deep": {"t": weight * 2}},
        )
        client.restore()
        weight.sum().backward()
        optimizer.step()
        client.snapshot(1, must=True)
        assert client.wait("sealed", 30) == "durable"
    held = daemon.held[1, 1][0]
    assert {f.key for f in held.layout.fragments} == {"w", "opt.w.momentum_buffer", "nested.deep.t"}
    objects = _objects(held)
    assert set(objects) == {"opt.groups", "progress", "seed", "rng", "$meta"}
    assert tree.decode(objects["progress"]) == {"epoch": 3, "seen": {1, 2}}


class Compared(torch.optim.SGD):
    """A class with __eq__ has no hash unless it says so."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and self.param_groups == other.param_groups


def test_an_optimizer_without_a_hash_steps_and_is_captured(daemon: RankDaemonDouble) -> None:
    """P5: its step() raised TypeError once any client was connected."""
    training = Training()
    training.optimizer = Compared(training.model.parameters(), lr=0.1, momentum=0.9)
    with restored(daemon, training) as client:
        training.step()
        expected = training.tensors()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        assert_same(daemon.held[1, 1][0], expected)


def test_two_threads_never_wait_for_each_other(daemon: RankDaemonDouble) -> None:
    """The optimizer of another thread fences too; a snapshot in mid-copy is no deadlock."""
    training, other = Training(), Training()
    with restored(daemon, training) as client:
        training.step()
        failpoint.arm("capture.tensor:sleep=0.05")
        client.snapshot(1, must=True)
        thread = threading.Thread(target=other.step)
        thread.start()
        training.step()
        thread.join(10)
        assert not thread.is_alive()
        assert client.wait("sealed", 30) == "durable"
