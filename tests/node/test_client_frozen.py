"""Frozen parameters with a scripted daemon: captured once into a slot of their own, and again when they change (D6)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ckptd_client import Client
from ckptd_client.entries import Owner
from ckptd_client.segments import SlotView
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ckptd.wire import rank as wire
from tests.node.client_training import Training, assert_same, connected, restored, stored
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until


def test_frozen_parameters_are_copied_once_and_again_when_they_change(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd_client import copying as copies
    from ckptd_client import device

    training, frozen = with_adapter()
    copied: list[str] = []
    run, one = copies.Copy.run, device.Batch._copy_one
    monkeypatch.setattr(copies.Copy, "run", lambda self, *at: (copied.append(self.key), run(self, *at))[1])
    monkeypatch.setattr(device.Batch, "_copy_one", lambda self, of, copy: (copied.append(copy.key), one(self, of, copy))[1])
    with restored(daemon, training) as client:

        def snapshot(step: int) -> int:
            training.step()
            expected = training.tensors()
            copied.clear()
            client.snapshot(step, must=True)
            assert client.wait("sealed", 30) == "durable"
            assert_same(daemon.held[1, step][0], expected)
            return copied.count("model.0.weight")

        times = [snapshot(step) for step in range(1, 8)]
        assert times == [1, 0, 0, 0, 0, 0, 0]
        layout = daemon.held[1, 7][0].layout
        assert layout.frozen_bytes >= frozen.nbytes, "it lies apart from what each snapshot captures"
        assert daemon.messages(wire.Join)[0].frozen_bytes == layout.frozen_bytes, "memory for it was asked for ahead"
        with torch.no_grad():
            frozen.mul_(2)
        assert snapshot(8) == 1
        frozen.data = torch.randn_like(frozen)
        assert snapshot(9) == 1
        assert snapshot(10) == 0
        assert len({message.frozen for message in daemon.messages(wire.SealedSlot)}) == 3, "each content has its slot"


def test_parameters_called_frozen_that_change_all_the_time_are_captured_with_the_others(
    daemon: RankDaemonDouble,
) -> None:
    """A teacher inside of the module, moved by hand after each step: no snapshot is lost to it, least of all one that must be."""
    training, teacher = with_frozen_module("teacher")
    with restored(daemon, training) as client:
        taken = []
        for number in range(1, 9):
            with torch.no_grad():
                teacher.weight.add_(1)
            expected = training.tensors()
            handle = client.snapshot(number, must=True)
            taken.append(handle.wait("sealed", 30) == "durable")
            if taken[-1]:
                assert_same(daemon.held[1, number][0], expected)
        assert all(taken)
        assert not daemon.held[1, 8][0].layout.frozen_bytes


def test_parameters_called_frozen_that_change_are_known_as_such_also_when_registered_again(daemon: RankDaemonDouble) -> None:
    """P14: what was registered first was told so each time, and every snapshot from then on was skipped."""
    training, teacher = with_frozen_module("teacher")
    with restored(daemon, training) as client:
        for number in range(1, 8):
            if number == 3:
                client.register(model=training.model, optimizer=training.optimizer)
            with torch.no_grad():
                teacher.weight.add_(1)
            handle = client.snapshot(number, must=True)
            handle.wait("sealed", 30)
        assert handle.status == "durable"
        assert_same(daemon.held[1, 7][0], training.tensors())


def test_a_frozen_parameter_written_behind_our_back_is_found_and_soon_captured_with_the_others(
    daemon: RankDaemonDouble, default_device: str
) -> None:
    """A momentum encoder: requires_grad=False, written through .data, which bumps no version. On a device snapshot() waits for no
    look at its bytes: it is found when the copies have been made, and the snapshot is void."""
    training, momentum = with_frozen_module("momentum")
    net = training.model

    def step() -> None:
        training.optimizer.zero_grad()
        net[2](net[1](net[0](torch.randn(4, 400)))).square().mean().backward()
        training.optimizer.step()
        momentum.weight.data.mul_(0.9).add_(net[0].weight.data, alpha=0.1)

    with restored(daemon, training) as client:
        results = []
        for number in range(1, 13):
            step()
            expected = training.tensors()
            handle = client.snapshot(number, must=True)
            results.append(handle.wait("sealed", 30))
            if handle.taken:
                assert_same(daemon.held[1, number][0], expected)
        assert results[0] == "durable"
        if default_device == "cpu":
            assert results[1] == "durable", "samples of its bytes show it"
            assert not any(status.startswith("void") for status in results)
        assert results.count("durable") >= 5 and results[-3:] == ["durable"] * 3, results


def with_adapter(width: int = 400) -> tuple[Training, torch.Tensor]:
    """A training whose first layer is frozen; its weight."""
    training = Training(width=width)
    training.model[0].requires_grad_(False)
    optimize_the_rest(training)
    return training, training.model[0].weight


def with_frozen_module(name: str) -> tuple[Training, nn.Linear]:
    """A training with a frozen layer more that nothing computes with; that layer."""
    training, layer = Training(width=400), nn.Linear(400, 400).requires_grad_(False)
    training.model.add_module(name, layer)
    optimize_the_rest(training)
    return training, layer


def optimize_the_rest(training: Training) -> None:
    training.optimizer = torch.optim.AdamW([p for p in training.model.parameters() if p.requires_grad])


def snapshot(client: Client, training: Training, daemon: RankDaemonDouble, step: int) -> None:
    """One more step, sealed, and as it was (P1)."""
    training.step()
    expected = training.tensors()
    client.snapshot(step, must=True)
    assert client.wait("sealed", 30) == "durable"
    assert_same(daemon.held[max(daemon.held)][0], expected)


def test_other_memory_under_the_same_address_is_another_content(daemon: RankDaemonDouble) -> None:
    """P1: an allocator gives what was let go to the next tensor of that size, and its versions begin at 0 again."""
    training, frozen = with_adapter()
    place = torch.empty(400, 400)

    def swap(value: float) -> None:
        frozen.data = from_dlpack(to_dlpack(place))  # type: ignore[attr-defined]
        place.fill_(value)

    swap(1.0)
    with restored(daemon, training) as client:
        for step in range(1, 4):
            snapshot(client, training, daemon, step)
        swap(2.0)
        snapshot(client, training, daemon, 4)
        found = stored(daemon.held[1, 4][0])["model.0.weight"]
        assert torch.equal(found, torch.full((400, 400), 2.0)), "not what lay there before"


def test_a_change_counts_once_however_long_its_memory_takes(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: gigabytes take seconds to come. Meanwhile snapshots are skipped, and the parameters stay frozen."""
    training, frozen = with_adapter()
    with restored(daemon, training) as client:
        snapshot(client, training, daemon, 1)
        with torch.no_grad():
            frozen.mul_(2)
        with monkeypatch.context() as without:
            without.setattr(daemon, "_give_frozen", lambda peer, nbytes: None)
            for step in range(2, 8):
                training.step()
                until(lambda: len(client._session.grants) > 0, what="a grant")
                assert client.snapshot(step).status.startswith("skipped")
        snapshot(client, training, daemon, 8)
        assert daemon.held[1, 8][0].layout.frozen_bytes


def test_restores_in_one_process_are_no_changes_of_what_is_frozen(daemon: RankDaemonDouble) -> None:
    """P8, P14: what was captured is compared with what was restored, and leaned on."""
    training, _ = with_adapter()
    with connected(daemon, training) as client:
        for number in range(1, 6):
            client.restore()
            for step in (2 * number, 2 * number + 1):
                snapshot(client, training, daemon, step)
                assert daemon.held[max(daemon.held)][0].layout.frozen_bytes
        assert len({message.frozen for message in daemon.messages(wire.SealedSlot)}) == 1, "captured once"


def test_a_restore_of_other_values_is_captured_anew(daemon: RankDaemonDouble) -> None:
    training, frozen = with_adapter()
    with restored(daemon, training) as client:
        snapshot(client, training, daemon, 1)
        with torch.no_grad():
            frozen.mul_(2)
        snapshot(client, training, daemon, 2)
        assert client.restore(step=1) == 1
        training.step()
        assert client.snapshot(2, must=True).wait("sealed", 30).startswith("void: model.0.weight is not what was kept")
        for step in (3, 4):
            snapshot(client, training, daemon, step)
            assert daemon.held[max(daemon.held)][0].layout.frozen_bytes


def test_the_daemon_is_told_when_nothing_is_frozen_any_more(daemon: RankDaemonDouble) -> None:
    """P8: a copy that no snapshot will lean on again does not stay for the rest of the run."""
    training, _ = with_adapter()
    with restored(daemon, training) as client:
        snapshot(client, training, daemon, 1)
        for parameter in training.model[0].parameters():
            parameter.requires_grad_(True)
        training.optimizer = torch.optim.AdamW(training.model.parameters())
        client.register(optimizer=training.optimizer)
        for step in range(2, 12):
            training.step()
            client.snapshot(step, must=True).wait("sealed", 30)
        told = [message for message in daemon.messages(wire.Resize) if message.frozen_bytes == wire.NOTHING_FROZEN]
        assert len(told) == 1
        assert client._engine.statics._held is None


def test_must_waits_once_for_a_grant_and_the_memory(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: both within must_timeout_s."""
    daemon.granting = "none"
    daemon.on_asked = False
    training, _ = with_adapter()
    monkeypatch.setattr(daemon, "_give_frozen", lambda peer, nbytes: None)
    with restored(daemon, training, must_timeout_s=2.0) as client:
        training.step()

        def late() -> None:
            with daemon.changed:
                daemon.grant(1)

        giver = threading.Timer(1.5, late)
        giver.start()
        began = time.monotonic()
        assert client.snapshot(1, must=True).status == "skipped: no memory"
        assert time.monotonic() - began < 3.0
        giver.join()


@pytest.fixture
def slow_look(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Comparing waits for the event."""
    from ckptd_client import copying as copies

    go, differs = threading.Event(), copies.Copy.differs
    monkeypatch.setattr(copies.Copy, "differs", lambda self, *at: (go.wait(20), differs(self, *at))[1])
    yield go
    go.set()


def kept_by(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The daemon has a frozen part of the rank's earlier life: all of this value."""
    held = daemon.held[1, 1][0]
    whole = held.layout.frozen
    content = bytearray(held.payload[held.layout.frozen_at :])
    for fragment in whole.fragments:
        data = torch.full((fragment.nbytes // 4,), value).cpu().numpy().tobytes()
        content[fragment.offset : fragment.offset + fragment.nbytes] = data
    give = daemon._give_frozen

    def first(peer: Any, nbytes: int) -> None:
        monkeypatch.setattr(daemon, "_give_frozen", give)
        daemon._slot_ids += 1
        size = len(content) + 4096
        fd = os.memfd_create("kept")
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, content, 4096)
        peer.frozen[daemon._slot_ids] = fd, len(content)
        peer.sealed_frozen.add(daemon._slot_ids)
        note = wire.Mapped(daemon._slot_ids, "kept", size, 4096, len(content), True, whole.layout_id)
        peer.sock.send(note, [fd])

    monkeypatch.setattr(daemon, "_give_frozen", first)


def again(daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, kept: float) -> tuple[Client, Training]:
    """A rank that starts again without a restore and finds this of its earlier life; its own parameters are 1."""
    training, frozen = with_adapter()
    with restored(daemon, training) as client:
        snapshot(client, training, daemon, 1)
    kept_by(daemon, monkeypatch, kept)
    daemon.held.clear()
    with torch.no_grad():
        frozen.fill_(1.0)
    client = connected(daemon, training)
    client.restore(allow_fresh=True)
    return client, training


def test_two_snapshots_that_lean_on_what_was_kept_of_another_model(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, slow_look: threading.Event
) -> None:
    """Both are void, and nobody is blamed for a hidden write."""
    client, training = again(daemon, monkeypatch, kept=7.0)
    with client:
        handles = []
        for step in (1, 2):
            training.step()
            handles.append(client.snapshot(step, must=True))
        slow_look.set()
        assert [handle.wait("sealed", 30)[:5] for handle in handles] == ["void:", "void:"]
        assert not any(owner.writes_unfenced for owner in client._registry.owners.values())
        for step in (3, 4):
            snapshot(client, training, daemon, step)
            assert daemon.held[max(daemon.held)][0].layout.frozen_bytes


@pytest.mark.writes_what_is_read
def test_a_frozen_parameter_that_becomes_what_was_kept_after_its_snapshot(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch, slow_look: threading.Event
) -> None:
    """P1: compared is what snapshot() saw, or nothing."""
    client, training = again(daemon, monkeypatch, kept=7.0)
    with client:
        training.step()
        handle = client.snapshot(1, must=True)
        with torch.no_grad():
            for parameter in training.model[0].parameters():
                parameter.fill_(7.0)
        slow_look.set()
        assert handle.wait("sealed", 30).startswith("void: model.0.weight was written while it was compared")
        assert not any(owner.writes_unfenced for owner in client._registry.owners.values())


def test_a_device_is_told_what_to_copy_while_a_frozen_part_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the fence waits until its copies are enqueued, by the thread that compares."""
    from ckptd_client import copying
    from ckptd_client.capture import Engine
    from ckptd_client.job import Job
    from ckptd_client.statics import mark_of

    said: list[str] = []
    ended = threading.Event()

    class Device:
        def enqueue(self) -> bool:
            said.append("enqueued")
            return True

        def has_room(self) -> bool:
            return True

        def hold_back(self) -> None:
            """Nothing to hold."""

        def done(self) -> bool:
            return True

        def compare(self, copies: Any) -> None:
            """Nothing is audited."""

        def finish(self) -> tuple[list[Any], list[Any]]:
            ended.set()
            return [], []

    segment: Any = type("Memory", (), {"pin": lambda self: None, "unpin": lambda self: None})()
    slot = SlotView(1, segment, 0, 0)

    def job(step: int, frozen: SlotView | None = None) -> Job:
        made: Any = None
        return Job(step, step, 0, slot, frozen, False, False, 1, made, made, 0, False, False)

    engine = Engine(lambda job: None, lambda job, reason: None)
    weight = torch.zeros(3 * copying.CHUNK_BYTES, dtype=torch.uint8)
    same = weight.to("cpu", copy=True)  # which waits for what makes it
    copy = copying.Copy("w", Owner("model", "module", None), weight, same.data_ptr(), weight.nbytes, 0)
    first, second = job(1, slot), job(2)
    first.unproven = [(copy, weight, mark_of(weight, weight))]
    second.device = Device()
    differs = copying.Copy.differs

    def look(self: copying.Copy, begin: int, length: int) -> bool:
        said.append("looked")
        if len(said) == 1:
            engine.submit(second)
        return differs(self, begin, length)

    monkeypatch.setattr(copying.Copy, "differs", look)
    engine.submit(first)
    assert ended.wait(20)
    engine.close()
    assert said == ["looked", "enqueued", "looked", "looked"]
