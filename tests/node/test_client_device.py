"""The device batch's own arithmetic and order, on a machine without a device: queues are lists that are run later (D6)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ckptd_client.copying import Copy
from ckptd_client.device import Batch, _packed
from ckptd_client.entries import Owner
from ckptd_client.segments import SlotView

from tests.node.client_training import bits_equal

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
    Event.names, Event.log = iter(("ready", "done")), notes

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
    batch = Batch(torch.device("cpu"), made[:3], made[3:], [slot])
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


def test_one_cuda_device_per_rank() -> None:
    slot: Any = None
    assert Batch.of([], [], [slot]) is None
    elsewhere = Copy("w", OWNER, torch.empty(3, device="meta"), 0, 12, 0)
    with pytest.raises(RuntimeError, match="one CUDA device"):
        Batch.of([], [elsewhere], [slot])
