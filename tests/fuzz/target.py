"""One parser under test, and what counts as a mistake of it (P10, P13)."""

from __future__ import annotations

import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, Literal

CPU_SECONDS_MAX = 2.0  # of one input of a few KiB: a hang
ALLOCATED_PER_BYTE_MAX = (
    512  # an empty dict is 64 bytes and one byte of msgpack; twice that while it is checked
)
ALLOCATED_MAX = 4 << 20  # beside that: tables, regular expressions, error texts

Form = Literal["binary", "msgpack", "json", "text"]


@dataclass(frozen=True)
class Target:
    """``parse`` returns a value or raises one of ``errors``, within bounds. ``samples`` are made by the real encoders.

    pack: the encoder. What it makes of an accepted value must be accepted again, and mean the same.
    summed: the bytes carry a checksum, so that nothing but the samples' values may be accepted.
    exact: only what ``pack`` writes is accepted, to the byte.
    allocated_max: bytes beside ALLOCATED_PER_BYTE_MAX for each byte of input, a limit that the parser names.
    """

    name: str
    parse: Callable[[bytes], Any]
    samples: Callable[[], list[bytes]]
    errors: tuple[type[Exception], ...]
    form: Form = "binary"
    pack: Callable[[Any], bytes] | None = None
    summed: bool = False
    exact: bool = False
    allocated_max: int = ALLOCATED_MAX

    @cached_property
    def valid(self) -> list[bytes]:
        return self.samples()

    @cached_property
    def values(self) -> list[Any]:
        return [self.parse(sample) for sample in self.valid]


@dataclass(frozen=True)
class Finding:
    kind: str  # "raised X", "hung", "allocated", "does not come back", "took damage"
    text: str
    data: bytes


class Hung(BaseException):
    """Not an Exception: no parser may catch it."""


def judge(target: Target, data: bytes, *, memory: bool = False) -> Finding | None:
    """Run the parser on ``data``; None when it kept to its contract. memory: also measure what it allocates (slow)."""
    try:
        with limited():
            value, peak = _measured(target, data) if memory else (_parse(target, data), 0)
            wrong = _believed(target, data, value) if value is not REFUSED else None
    except Hung:
        return Finding("hung", f"more than {CPU_SECONDS_MAX:g} s of CPU", data)
    except Exception as error:
        return Finding(f"raised {type(error).__name__}", f"{error!r:.300}", data)
    if peak > target.allocated_max + ALLOCATED_PER_BYTE_MAX * len(data):
        return Finding("allocated", f"{peak} bytes for {len(data)}", data)
    return Finding(*wrong, data) if wrong else None


REFUSED = object()


def _parse(target: Target, data: bytes) -> Any:
    try:
        return target.parse(data)
    except target.errors as error:
        str(error)  # it will be logged
        return REFUSED


def _measured(target: Target, data: bytes) -> tuple[Any, int]:
    tracemalloc.start()
    try:
        return _parse(target, data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _believed(target: Target, data: bytes, value: Any) -> tuple[str, str] | None:
    """What is wrong with having accepted ``data``."""
    if target.summed and value not in target.values:
        return "took damage", f"{value!r:.300}"
    if target.pack is None:
        return None
    packed = target.pack(value)
    if target.exact and packed != data:
        return "does not come back", f"{data[:100]!r} is written as {packed[:100]!r}"
    again = target.parse(packed)
    if target.pack(again) != packed:
        return "does not come back", f"{value!r:.200} became {again!r:.200}"
    return None


@contextmanager
def limited() -> Iterator[None]:
    """CPU time, not the clock: the machine may be busy. Works in the main thread, and where Python code runs."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
