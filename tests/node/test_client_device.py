"""The device batch's arithmetic, and the engine beside a device whose copies arrive when they are told to (D6)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from ckptd_client.capture import Engine
from ckptd_client.copying import Copy
from ckptd_client.device import _packed
from ckptd_client.entries import Owner
from ckptd_client.job import Job
from ckptd_client.segments import SlotView

from tests.node.client_training import bits_equal
from tests.waiting import until

OWNER = Owner("model", "module", None)


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


class Slow:
    """A device whose copies arrive when they are told to; it compares behind them, as a stream does."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies, self.asked = copies, False
        self.arrived = threading.Event()

    def enqueue(self) -> bool:
        """The copies are on their way."""
        return True

    def has_room(self) -> bool:
        return True

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
