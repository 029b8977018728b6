"""Pacers for tests that already know what they want: fed with rows until their loop has found a rate."""

from __future__ import annotations

from ckptd.core.pacing.slowdown import HOLD_PARTS, Pacing, hold_s
from ckptd.protect.pacer import Pacer

LOADED_S = 9.0  # seconds of a step beside traffic: far too many, so the rate falls to the floor


def limited(rate: float, *, held: bool = False) -> Pacer:
    """One whose loop stands at ``rate`` bytes a second, and stays there; ``held``: in the moment of a hold."""
    pacing, period = Pacing(floor_bytes_s=rate), HOLD_PARTS * hold_s(1.0)
    walls = [10 * period, 10 * period] if held else [10.9 * period]
    pacer = Pacer("aimd", pacing, wall=lambda: walls[-1])
    now = pacer._clock()
    for kind, seconds in (("quiet", 1.0), ("loaded", LOADED_S)) * 2:
        for _ in range(40):
            pacing.step("job/0", kind, seconds, now, rate)  # type: ignore[arg-type]
    pacing.step("job/0", "unclear", 1.0, now, rate)
    assert pacing.rate == rate
    if held:  # a period without quiet rows came before
        pacing.order(now, 9 * period + 3 * hold_s(1.0), 0.0)
        pacing.order(now, 9 * period + 1.0, 0.0)
    pacer.look(at_once=True)
    return pacer
