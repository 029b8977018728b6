"""Pacing inside a daemon: who is listened to, what is shown, what ends it (P5, P13, P14)."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from ckptd.core.pacing.slowdown import MEASURING, NO_STEPS, OFF, WITHIN
from ckptd.observe.sight import ALL
from ckptd.wire import rank as wire
from tests.node.daemon_rig import Rank, Rig, rig
from tests.node.links import eventually


def rows(count: int, seconds: float = 0.2) -> list[list[float]]:
    """Steps that have just ended."""
    now = time.monotonic()
    return [[now - (count - i) * seconds, now - (count - i - 1) * seconds, 1.0, 0.0] for i in range(count)]


async def pacing_of(house: Rig) -> dict[str, Any]:
    return dict((await house.daemon.status.status(ALL))["pacing"])


async def joined(house: Rig) -> Rank:
    rank = house.rank()
    await rank.begin("a")
    return rank


async def test_a_rank_is_asked_for_its_step_times_and_status_shows_them() -> None:
    async with rig() as house:
        rank = house.rank()
        welcome, _ = await rank.heard(wire.Welcome)
        assert welcome.policy["pacing"] == "aimd"
        await rank.begin("a")
        assert (await pacing_of(house))["state"] == NO_STEPS
        rank.say(wire.Called(1, False, rows(30)))
        await eventually(lambda: house.daemon.services.pacer.pacing.baseline_s)
        told = await pacing_of(house)
        assert told["state"] == MEASURING
        assert told["step_s"] == pytest.approx(0.2)
        assert told["rate_bytes_s"] is None
        page = house.daemon.status._metrics(house.daemon.metrics.render)(ALL).decode()
        assert 'ckptd_pacing_state{state="measuring"} 1.0' in page
        assert "ckptd_pacing_rate_bytes -1.0" in page
        (shown,) = re.findall(r"^ckptd_pacing_step_seconds (\S+)$", page, re.M)
        assert float(shown) == pytest.approx(0.2)  # a difference of two clock readings


async def test_off_asks_nobody() -> None:
    async with rig(pacing="off") as house:
        rank = house.rank()
        welcome, _ = await rank.heard(wire.Welcome)
        assert welcome.policy["pacing"] == "off"
        assert (await pacing_of(house))["state"] == OFF


@pytest.mark.parametrize("times", [[[1.0]], [[2.0, 1.0, 1.0, 0.0]], [[0.0, 1.0, 1.0, 0.0]] * 65])
async def test_step_times_that_are_none_end_that_connection_alone(times: list[list[float]]) -> None:
    """P13: and nothing of them is kept."""
    async with rig() as house:
        rank = await joined(house)
        rank.say(wire.Called(1, False, times))
        await eventually(lambda: house.shell().local_slots.by_rank[0].session is None)
        assert not house.daemon.services.pacer.pacing.ranks
        other = house.rank("other")
        await other.begin("b")


async def test_a_rank_that_waits_or_goes_is_not_paced_for() -> None:
    async with rig() as house:
        rank = await joined(house)
        pacing = house.daemon.services.pacer.pacing
        await rank.sealed(3)
        rank.say(wire.Called(4, False, rows(30)))
        await eventually(lambda: house.daemon.services.pacer.state in (MEASURING, WITHIN))
        rank.waits(3, "protected")
        await eventually(lambda: house.daemon.services.pacer.state == NO_STEPS)
        rank.say(wire.Called(5))
        await eventually(lambda: house.daemon.services.pacer.state != NO_STEPS)
        assert pacing.ranks
        rank.say(wire.Goodbye(False))
        await eventually(lambda: not pacing.ranks)


async def test_a_new_epoch_begins_to_count_anew() -> None:
    async with rig() as house:
        rank = await joined(house)
        rank.say(wire.Called(1, False, rows(30)))
        pacing = house.daemon.services.pacer.pacing
        await eventually(lambda: pacing.ranks)
        await rank.begin("b")
        assert not pacing.ranks


async def test_a_copy_must_be_made_before_the_calls_use_up_the_slots() -> None:
    async with rig(own_slots=3, pacing_deadline_s=100.0) as house:
        rank = await joined(house)
        ranks = house.shell().ranks
        assert ranks.within_s() == 100.0
        for step in (10, 20, 30):
            rank.say(wire.Called(step))
            await eventually(lambda step=step: ranks.progress.get(0) == step)  # type: ignore[misc]
        assert ranks.cadence.seconds is not None
        assert ranks.within_s() == 2 * ranks.cadence.seconds
        calls, pace = list(ranks.cadence.calls), house.shell().meter.step_s
        for step in (20, 30):  # ranks of a node are a step apart, and say a step again
            rank.say(wire.Called(step))
            await eventually(lambda step=step: ranks.progress.get(0) == step)  # type: ignore[misc]
        assert (list(ranks.cadence.calls), house.shell().meter.step_s) == (calls, pace)
        for step in range(31, 60):  # at each step: as many as there can be
            rank.say(wire.Called(step))
        await eventually(lambda: ranks.progress.get(0) == 59)
        assert ranks.within_s() == 100.0


async def test_a_flush_must_be_done_before_the_next_one_is_due() -> None:
    """A user's durable steps fell 180 steps behind, for a flush had five minutes whatever cadence was asked for."""
    async with rig(flush_every_steps=10, flush_every_s=50.0, write_timeout_s=300.0) as house:
        rank = await joined(house)
        shell = house.shell()
        assert shell.durable.within_s() == 25.0, "how long a step takes is not known yet"
        for step in (1, 2, 3):
            rank.say(wire.Called(step))
            await eventually(lambda step=step: shell.ranks.progress.get(0) == step)  # type: ignore[misc]
        assert shell.meter.step_s is not None
        assert shell.durable.within_s() == pytest.approx(5 * shell.meter.step_s)


async def test_a_flush_that_nobody_asked_for_by_a_cadence_has_half_of_its_timeout() -> None:
    async with rig(flush_every_s=0.0, write_timeout_s=300.0) as house:
        await joined(house)
        assert house.shell().durable.within_s() == 150.0
