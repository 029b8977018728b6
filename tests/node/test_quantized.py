"""How near quantised rows come: the table of docs/INTEGRATIONS.md, made anew by an encoder of plain ranges and by ours."""

from __future__ import annotations

import numpy as np
import pytest

from ckptd.persist import quantized

ROWS, WIDTH = 2000, 64
NORMAL = {8: 0.005, 4: 0.08, 3: 0.17, 2: 0.32}
OUTLIERS = {8: 0.009, 4: 0.14, 3: 0.21, 2: 0.27}
PLAIN = {8: 0.009, 4: 0.16, 3: 0.36, 2: 0.69}  # of the outliers: ranges from the smallest to the largest value
SMALLER = {8: 3.6, 4: 6.4, 3: 8.0, 2: 10.7}  # the paper's: 4 to 13 times (Check-N-Run, section 6)


def rows(outliers: bool) -> np.ndarray:
    noise = np.random.default_rng(5)
    found = noise.standard_normal((ROWS, WIDTH), np.float32)
    return np.where(noise.random(found.shape) < 0.01, 25 * found, found).astype(np.float32) if outliers else found


def plain(x: np.ndarray, bits: int) -> np.ndarray:
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    step = (high - low) / ((1 << bits) - 1)
    return low + np.rint((x - low) / step) * step


def error(found: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(found - x) / np.linalg.norm(x))


@pytest.mark.parametrize("bits", quantized.BITS)
@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
def test_the_errors_that_the_docs_name(bits: int, outliers: bool) -> None:
    x = rows(outliers)
    frame = quantized.encode(x, bits)
    assert frame is not None
    found = np.frombuffer(quantized.decode(memoryview(frame), "F32", WIDTH, x.nbytes), np.float32).reshape(x.shape)
    assert error(found, x) == pytest.approx((OUTLIERS if outliers else NORMAL)[bits], rel=0.12)
    assert x.nbytes / len(frame) == pytest.approx(SMALLER[bits], rel=0.02)
    if outliers:
        assert error(plain(x, bits), x) == pytest.approx(PLAIN[bits], rel=0.12)
    assert error(found, x) <= 1.001 * error(plain(x, bits), x)
