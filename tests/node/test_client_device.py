"""The device batch's own arithmetic and order, on a machine without a device: queues are lists that are run later (D6)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ckptd_client.capture import Engine
from ckptd_client.copying import Copy
from ckptd_client.device import Batch, _packed
from ckptd_client.entries import Owner
from ckptd_client.job import Job
from ckptd_client.segments import SlotView

from tests.node.client_training import bits_equal
from tests.waiting import until

OWNER = Owner("model", "module", None)


class Queue:
    """Stands for a stream: what is done on it is only noted."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Event:
    names: Iterator[str]
    log: list[str]

    def __init__(self) -> None:
        self.name = next(Event.names)

    def record(self, queue: Queue) -> None:
        Event.log.append(f"{self.name} marks {queue.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Event.log.append(f"host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    notes: list[str] = []
    training, side = Queue(notes, "training"), Queue(notes, "side")
    Event.names, Event.log = iter(("ready", "done", "now")), notes

    @contextlib.contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: training)
    monkeypatch.setattr("ckptd_client.device._side_stream", lambda device: side)
    monkeypatch.setattr("ckptd_client.device._pin", lambda segment: notes.append("pinned"))
    return notes


def copies(sources: list[torch.Tensor], memory: torch.Tensor) -> list[Copy]:
    found, at = [], 0
    for index, source in enumerate(sources):
        found.append(Copy(f"w{index}", OWNER, source, memory.data_ptr() + at, source.nbytes, index))
        at += -(-source.nbytes // 64) * 64
    return found


SOURCES: list[Any] = [
    torch.randn(3, 5), torch.tensor(2.0), torch.randn(40, 30).t(), torch.randint(0, 9, (7,)), torch.tensor([True]),
    torch.randn(33).to(torch.float8_e5m2), torch.randn(5).to(torch.bfloat16),
]  # fmt: skip


def test_clones_are_packed_bit_by_bit() -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    for (clone, copy), source in zip(_packed(copies(SOURCES, memory)), SOURCES, strict=True):
        assert copy.source is source
        assert bits_equal(clone, source.view(clone.dtype).contiguous())
        assert clone.data_ptr() % 8 == 0


def test_sources_wait_for_the_mark_and_are_held_until_the_bytes_are_out(log: list[str]) -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    made = copies(SOURCES, memory)
    slot: Any = SlotView(1, None, 0, 1 << 16)  # type: ignore[arg-type]
    batch = Batch(torch.device("cpu"), made[:3], made[3:], [], [slot])
    assert log == ["ready marks training"]
    before = made[0].source.clone()
    made[0].source.zero_()  # a buffer, after snapshot() has returned: the clone is what counts
    batch.enqueue()
    assert log[1:] == ["pinned", "side waits for ready", "done marks side"]
    assert not bits_equal(made[0].target_tensor().view(torch.float32), made[0].source)
    assert bits_equal(made[0].target_tensor().view(torch.float32), before)
    for copy in made[1:]:
        assert not any(copy.differs(begin, length) for begin, length in copy.chunks())
    batch.hold_back()
    assert log[-1] == "training waits for done"
    assert len(batch._sources) == len(made)
    batch.finish()
    assert batch._sources == []


def test_an_audit_is_made_behind_the_copies_beside_the_training_stream(log: list[str]) -> None:
    """What training has enqueued until then may be a hidden write; it goes on when all is compared, and no host waits."""
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    made = copies(SOURCES, memory)
    slot: Any = SlotView(1, None, 0, 1 << 16)  # type: ignore[arg-type]
    batch = Batch(torch.device("cpu"), [], made, [], [slot])
    batch.enqueue()
    log.clear()
    for index in (0, 2, 5):
        made[index].source.view(torch.uint8 if index == 5 else torch.int32).add_(1)
    batch.compare(made)
    batch.hold_back()
    assert log == ["now marks training", "side waits for now", "done marks side", "training waits for done"]
    assert batch.finish() == ([], [made[0], made[2], made[5]])
    assert batch.finish() == ([], [])


def test_frozen_tensors_are_sampled_beside_the_copies(log: list[str]) -> None:
    """Without this a write past the counters was in no snapshot of a device's frozen tensors; only a device ran it."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    held = copies([torch.randn(5000), torch.randn(6000)], memory)
    for copy in held:
        copy.run_at_once()
    held[1].source.add_(1)
    batch = Batch(torch.device("cpu"), [], [], held, [])
    batch.enqueue()
    assert batch.finish() == ([held[1]], [])
    assert batch.finish() == ([], [])


class Slow:
    """A device whose copies arrive when they are told to; it compares behind them, as a stream does."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies, self.asked = copies, False
        self.arrived = threading.Event()

    def enqueue(self) -> None:
        """The copies are on their way."""

    def hold_back(self) -> None:
        """The host goes on."""

    def compare(self, copies: Any) -> None:
        self.asked = list(copies) == self.copies

    def done(self) -> bool:
        return self.arrived.is_set()

    def finish(self) -> tuple[list[Copy], list[Copy]]:
        for copy in self.copies:
            copy.run_at_once()
        return [], [copy for copy in self.copies if any(copy.differs(*span) for span in copy.chunks())]


@pytest.mark.parametrize("waits", ["settle", "fence"])
def test_no_slot_is_compared_before_its_bytes_have_arrived(waits: str) -> None:
    """wait() after the last snapshot of a run; or the optimizer's next step."""
    ended: list[str] = []
    memory, weight = torch.zeros(1 << 16, dtype=torch.uint8), torch.ones(2000)
    found = copies([weight], memory)
    segment: Any = type("Memory", (), {"pin": lambda self: None, "unpin": lambda self: None})()
    made: Any = None
    slow = Slow(found)
    slot = SlotView(1, segment, 0, 0)
    job = Job(1, 1, 0, slot, None, False, False, 1, made, made, 0, False, True)
    job.fenced, job.device = found, slow
    engine = Engine(lambda job: ended.append("sealed"), lambda job, reason: ended.append(reason))
    engine.submit(job)
    if waits == "settle":
        engine.settle(time.monotonic() + 5)
    else:
        engine.fence(5)
    slow.arrived.set()
    until(lambda: ended, what="its end")
    engine.close()
    assert ended == ["sealed"]
    assert slow.asked


def test_one_cuda_device_per_rank() -> None:
    slot: Any = None
    assert Batch.of([], [], [], [slot]) is None
    elsewhere = Copy("w", OWNER, torch.empty(3, device="meta"), 0, 12, 0)
    with pytest.raises(RuntimeError, match="one CUDA device"):
        Batch.of([], [elsewhere], [], [slot])
