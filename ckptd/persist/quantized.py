"""Rows of a few bits per value: as near as that comes, and no nearer (Check-N-Run, Eisenman et al., NSDI 2022, section 5.2).

Each row (the last dimension: one vector of an embedding) has a smallest value and a step of its own, in float32; its numbers are
``round((value - smallest) / step)``. Where there are few of them, an outlier would cost all others of its row: the range is made
smaller greedily, from whichever end costs less, and the best range that was met is taken ("adaptive asymmetric").
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from ckptd.core.errors import CkptdError

BITS = (2, 3, 4, 8)
DEFAULT_BITS = 8
DTYPES = frozenset({"F32", "BF16", "F16"})
ADAPTIVE_BITS_MAX = 4  # with 8 a smaller range hardly helps
BINS, RATIO = 32, 0.5  # the range goes by so many parts at a time, until so much of it is gone
HEAD = struct.Struct("<B3x")  # bits of a number

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


@dataclass
class Loss:
    """What came of the tensors that one pattern is of: squares are sums over all values. left: pieces that stay as they are."""

    tensors: set[str] = field(default_factory=set)
    left: int = 0
    error: float = 0.0
    value: float = 0.0
    most: float = 0.0  # difference of one value

    @property
    def relative(self) -> float:
        """Of the 2-norm."""
        return (self.error / self.value) ** 0.5 if self.value else 0.0


class Quantizer:
    """``--quantize PATTERN=BITS``: which tensors are written in how many bits, and what that cost. From several threads."""

    def __init__(self, wanted: dict[str, int]) -> None:
        self.wanted = wanted
        self.losses = {pattern: Loss() for pattern in wanted}
        self._lock = threading.Lock()

    @staticmethod
    def parse(texts: Iterable[str]) -> Quantizer:
        """Raises CkptdError."""
        wanted: dict[str, int] = {}
        for text in texts:
            pattern, _, bits = text.rpartition("=") if "=" in text else (text, "", str(DEFAULT_BITS))
            if not pattern or bits not in map(str, BITS):
                hint = f"PATTERN=BITS, as in 'model.embed*=4': {', '.join(map(str, BITS))}"
                raise CkptdError(f"not to be quantised as: {text}", where="--quantize", hint=hint)
            wanted[pattern] = int(bits)
        return Quantizer(wanted)

    def bits(self, key: str, dtype: str) -> int | None:
        """None: as it is."""
        pattern = self.pattern(key) if dtype in DTYPES else None
        return None if pattern is None else self.wanted[pattern]

    def pattern(self, key: str) -> str | None:
        return next((pattern for pattern in self.wanted if fnmatchcase(key, pattern)), None)

    def encode(self, key: str, values: memoryview, dtype: str, width: int) -> bytes | None:
        """values: rows of ``width``. None: this cannot be (a value that is not finite, a range wider than float32), or saves
        nothing."""
        pattern = self.pattern(key)
        assert pattern is not None, "asked for, then told"
        if not values:
            return None
        x = to_float(values, dtype).reshape(-1, width)
        frame = encode(x, self.wanted[pattern])
        if frame is None or len(frame) >= len(values):
            with self._lock:
                self.losses[pattern].left += 1
            return None
        off = to_float(decode(memoryview(frame), dtype, width, len(values)), dtype).reshape(-1, width).astype(np.float64) - x
        with self._lock:
            loss = self.losses[pattern]
            loss.tensors.add(key)
            loss.error += float(np.square(off).sum())
            loss.value += float(np.square(x, dtype=np.float64).sum())
            loss.most = max(loss.most, float(np.abs(off).max(initial=0)))
        return frame

    def notes(self) -> list[str]:
        """Of what was written now."""
        found = []
        for pattern, loss in self.losses.items():
            if loss.tensors:
                many, bits = len(loss.tensors), self.wanted[pattern]
                off = f"relative error {loss.relative:.2g} (2-norm), one value {loss.most:.2g} at most"
                found.append(f"{pattern}: tensors in {bits} bits: {many}, {off}")
            if loss.left:
                found.append(f"{pattern}: pieces left as they are, with a value that is not finite, or no smaller: {loss.left}")
        return found


def size_of(rows: int, width: int, bits: int) -> int:
    """Bytes of a frame."""
    return HEAD.size + rows * (8 + -(-width * bits // 8))


def encode(x: Floats, bits: int) -> bytes | None:
    """x: [rows, width]. None: this cannot be."""
    if not x.size or not np.isfinite(x).all():
        return None
    with np.errstate(over="ignore", under="ignore"):
        return _encode(x, bits)


def _encode(x: Floats, bits: int) -> bytes | None:
    levels = (1 << bits) - 1
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    spread = high - low
    if not np.isfinite(spread).all() or ((spread > 0) & (spread < levels * np.finfo(np.float32).tiny)).any():
        return None
    if bits <= ADAPTIVE_BITS_MAX:
        low, high = _narrowed(x, low, high, levels)
    step = _step(low, high, levels)
    numbers = _numbers(x, low, step, levels).astype(np.uint8)
    if bits < 8:
        numbers = np.packbits(np.unpackbits(numbers[..., None], 2, bits, "little").reshape(len(x), -1), 1, "little")
    return b"".join((HEAD.pack(bits), low.tobytes(), step.tobytes(), numbers.tobytes()))


def decode(frame: memoryview, dtype: str, width: int, nbytes: int) -> memoryview:
    """The values' bytes, ``nbytes`` of them. Raises ValueError: it is no frame of so many."""
    if len(frame) < HEAD.size or dtype not in DTYPES or not width:
        raise ValueError("no quantised values")
    (bits,) = HEAD.unpack_from(frame)
    rows = nbytes // (_item(dtype) * width)
    packed = -(-width * bits // 8)
    if bits not in BITS or len(frame) != size_of(rows, width, bits):
        raise ValueError("quantised values of another number")
    low, step = np.frombuffer(frame, "<f4", 2 * rows, HEAD.size).reshape(2, rows, 1)
    numbers = np.frombuffer(frame, np.uint8, rows * packed, HEAD.size + 8 * rows).reshape(rows, packed)
    if bits < 8:
        spread = np.unpackbits(numbers, 1, width * bits, "little").reshape(rows, width, bits)
        numbers = np.packbits(spread, 2, "little").reshape(rows, width)
    with np.errstate(all="ignore"):
        return from_float(low + step * numbers.astype(np.float32), dtype)


def to_float(values: memoryview, dtype: str) -> Floats:
    if dtype == "BF16":
        return (np.frombuffer(values, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(values, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def from_float(x: Floats, dtype: str) -> memoryview:
    """The nearest of each, of two the even one."""
    if dtype == "F32":
        found: Any = np.ascontiguousarray(x)
    elif dtype == "F16":
        found = x.astype("<f2")
    else:
        raw = x.view(np.uint32)
        found = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype("<u2")
    view: memoryview = found.reshape(-1).view(np.uint8).data
    return view


def _item(dtype: str) -> int:
    return 4 if dtype == "F32" else 2


def _step(low: Floats, high: Floats, levels: int) -> Floats:
    """Of a row of equal values any number is right."""
    step = (high - low) / np.float32(levels)
    found: Floats = np.where(step > 0, step, np.float32(1))
    return found


def _numbers(x: Floats, low: Floats, step: Floats, levels: int) -> Floats:
    found: Floats = np.clip(np.rint((x - low) / step), 0, levels)
    return found


def _narrowed(x: Floats, low: Floats, high: Floats, levels: int) -> tuple[Floats, Floats]:
    """In parts of each row's range, whatever its size."""
    spread = _step(low, high, 1)
    y = (x - low) / spread

    def cost(bottom: Floats, top: Floats) -> Floats:
        step = _step(bottom, top, levels)
        found: Floats = np.square(bottom + step * _numbers(y, bottom, step, levels) - y).sum(1, keepdims=True)
        return found

    part = np.float32(1 / BINS)
    bottom, top = np.zeros_like(low), np.ones_like(high)
    best_bottom, best_top, best = bottom, top, cost(bottom, top)
    for _ in range(int(BINS * RATIO)):
        from_below, from_above = cost(bottom + part, top), cost(bottom, top - part)
        below = from_below < from_above
        bottom, top = np.where(below, bottom + part, bottom), np.where(below, top, top - part)
        better = np.minimum(from_below, from_above) < best
        best_bottom, best_top = np.where(better, bottom, best_bottom), np.where(better, top, best_top)
        best = np.where(better, np.minimum(from_below, from_above), best)
    return np.where(best_bottom > 0, low + spread * best_bottom, low), np.where(best_top < 1, low + spread * best_top, high)
