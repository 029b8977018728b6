"""The pacing loop, closed around a small plant: a link that training and copies share (P5, P14)."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest

from ckptd.core.pacing.slowdown import (
    AT_DEADLINE,
    AT_FLOOR,
    HELD,
    HOLD_PARTS,
    HOLD_PARTS_FIRST,
    HOLD_S_MAX,
    MEASURING,
    NO_STEPS,
    PACED,
    WITHIN,
    Demand,
    Pacing,
    hold_s,
    needed_bytes_s,
)
from tests.core.plant import Plant, slowdown

LINE = 40e6
NEVER = 1e12


def without(**plant: float) -> list[float]:
    return Plant(transfer_bytes=0, rest_s=NEVER, **plant).train(300)  # type: ignore[arg-type]


def fed(
    pacing: Pacing, quiet: float, loaded: float, rows: int = 40, who: str = "job/0", now: float = 0.0
) -> None:
    """As many rows without traffic, then with it."""
    for _ in range(rows):
        pacing.step(who, "quiet", quiet, now, LINE)
    for _ in range(rows):
        pacing.step(who, "loaded", loaded, now, LINE)


# --- the loop, closed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [0.03, pytest.param(0.0, marks=pytest.mark.chaos), pytest.param(0.01, marks=pytest.mark.chaos)])
def test_the_slowdown_is_held_where_it_was_large(noise: float) -> None:
    base = without(noise=noise)
    unpaced = Plant(paced=False, noise=noise).train(300)
    assert slowdown(unpaced, base) > 0.15
    plant = Plant(noise=noise)
    learning = slowdown(plant.train(400), base)
    assert learning < 0.06  # it starts at the line's own speed and has to find the rate
    sent, since = plant.sent, plant.now
    assert slowdown(plant.train(1200), base) < plant.pacing.overhead_max
    assert (plant.sent - sent) / (plant.now - since) > 2 * plant.pacing.floor_bytes_s, (
        "it is not just at the floor"
    )


def test_what_our_presence_costs_each_step_leaves_the_slowdown_under_the_limit() -> None:
    """Steps are longer with a daemon beside them, with traffic or without: no comparison of steps shows that."""
    base = without()
    plant = Plant(compute_s=Plant.compute_s + 0.008 * statistics.fmean(base))
    plant.train(400)
    assert slowdown(plant.train(1200), base) < plant.pacing.overhead_max


def test_traffic_that_never_ends_has_a_baseline_all_the_same() -> None:
    """Captures follow each other without a pause: only holds show what a step takes without traffic."""
    base = without()
    plant = Plant(rest_s=0.0, transfer_bytes=NEVER)
    plant.train(400)
    assert slowdown(plant.train(1000), base) < plant.pacing.overhead_max


@pytest.mark.parametrize("every", [10, pytest.param(2, marks=pytest.mark.chaos)])
def test_what_captures_cost_is_not_traffics_to_spend(every: int) -> None:
    """Half of what is allowed goes on captures, which are never held back: with copies it is no more than allowed."""
    base = without()
    captures = {"capture_s": 0.01 * statistics.fmean(base) * every, "capture_every": every}
    assert slowdown(without(**captures), base) == pytest.approx(0.01, rel=0.1)
    plant = Plant(**captures)  # type: ignore[arg-type]
    plant.train(800)
    sent = plant.sent
    assert slowdown(plant.train(1500), base) < plant.pacing.overhead_max
    assert plant.pacing.captures == pytest.approx(0.01, abs=0.004)
    assert plant.sent > sent


@pytest.mark.parametrize("rest_s", [0.0, pytest.param(2.0, marks=pytest.mark.chaos)])
def test_a_job_that_captures_at_each_step_is_paced_too(rest_s: float) -> None:
    """No row without a capture: they are compared with each other."""
    captured = {"capture_s": 0.002}
    base = without(**captured)
    plant = Plant(rest_s=rest_s, **captured)  # type: ignore[arg-type]
    plant.train(800)
    assert slowdown(plant.train(1200), base) < plant.pacing.overhead_max
    assert plant.pacing.rate is not None


@pytest.mark.chaos
def test_steps_that_become_longer_are_a_new_baseline_not_a_slowdown() -> None:
    plant = Plant()
    plant.train(800)
    before = plant.rate
    assert before is not None
    plant.compute_s = 0.3  # a longer sequence, say: steps of 0.25 s take 0.5 s now
    plant.train(400)
    assert plant.pacing.baseline_s == pytest.approx(0.5, rel=0.05)
    base = without(compute_s=0.3)
    sent, since = plant.sent, plant.now
    assert slowdown(plant.train(800), base) < plant.pacing.overhead_max
    assert (plant.sent - sent) / (plant.now - since) > 2 * plant.pacing.floor_bytes_s


@pytest.mark.chaos
def test_steps_that_become_shorter_are_protected_too() -> None:
    plant = Plant(compute_s=0.3)
    plant.train(800)
    plant.compute_s = 0.05
    plant.train(400)
    assert plant.pacing.baseline_s == pytest.approx(0.25, rel=0.05)
    assert slowdown(plant.train(800), without()) < plant.pacing.overhead_max


def test_a_faster_link_is_used() -> None:
    plant = Plant()
    plant.train(800)
    before = plant.sent
    since = plant.now
    plant.train(400)
    slow = (plant.sent - before) / (plant.now - since)
    plant.link_bytes_s *= 8
    plant.reduce_bytes *= 8  # and by training: steps take as long as before
    plant.train(1500)
    before, since = plant.sent, plant.now
    plant.train(1000)
    assert (plant.sent - before) / (plant.now - since) > 3 * slow


@pytest.mark.chaos
def test_evaluations_are_no_evidence() -> None:
    base = without()
    plant = Plant(pause_every=25)
    plant.train(400)
    sent, since = plant.sent, plant.now
    assert slowdown(plant.train(1000), base) < plant.pacing.overhead_max
    assert (plant.sent - sent) / (plant.now - since) > 2 * plant.pacing.floor_bytes_s
    assert plant.pacing.baseline_s == pytest.approx(statistics.median(base), rel=0.02)


# --- the parts ------------------------------------------------------------------------------------------------------
def test_without_step_times_nothing_is_paced_and_it_says_so() -> None:
    order = Pacing().order(0.0, 100.0, 0.0)
    assert (order.rate, order.held, order.state) == (None, False, NO_STEPS)


def test_few_steps_are_no_evidence() -> None:
    pacing = Pacing()
    for _ in range(5):
        assert not pacing.step("job/0", "quiet", 1.0, 0.0, LINE)
        assert not pacing.step("job/0", "loaded", 2.0, 0.0, LINE)
    order = pacing.order(0.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0)
    assert (order.rate, order.state) == (None, MEASURING)


def test_traffic_that_costs_nothing_is_not_paced() -> None:
    pacing = Pacing()
    fed(pacing, 1.0, 1.005)
    order = pacing.order(0.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0)
    assert (order.rate, order.state) == (None, WITHIN)


def test_when_captures_cost_more_than_allowed_traffic_has_a_little_all_the_same() -> None:
    """P14: protection must come to an end. It is said what training loses in all."""
    pacing = Pacing()
    for _ in range(40):
        pacing.step("job/0", "quiet", 1.0, 0.0, LINE)
        pacing.step("job/0", "quiet", 1.1, 0.0, LINE, captured=True)
    fed(pacing, 1.0, 1.002, rows=16)
    assert pacing.for_traffic == pytest.approx(0.25 * pacing.overhead_max)
    assert pacing.rate is None, "as much as that it does not take"
    fed(pacing, 1.0, 1.01, rows=16)
    assert pacing.rate is not None
    assert pacing.slowdown == pytest.approx(0.01 + pacing.captures)
    assert pacing.captures > 0.02


def test_the_worst_rank_counts() -> None:
    pacing = Pacing()
    fed(pacing, 1.0, 1.0, who="job/0")
    fed(pacing, 1.0, 1.2, who="job/1")
    assert pacing.slowdown == pytest.approx(0.2)
    assert pacing.rate is not None
    pacing.forget("job/1")
    assert pacing.baseline_s == 1.0


def test_the_first_steps_of_a_rank_do_not_count() -> None:
    pacing = Pacing()
    for _ in range(5):
        pacing.step("job/0", "quiet", 100.0, 0.0, LINE)
    fed(pacing, 1.0, 1.0)
    assert pacing.baseline_s == 1.0


def test_decrease_is_multiplicative_increase_is_additive() -> None:
    pacing = Pacing(floor_bytes_s=1e3)
    fed(pacing, 1.0, 1.5, rows=8)
    fed(pacing, 1.0, 1.5, rows=8)
    first = pacing.rate
    assert first is not None
    fed(pacing, 1.0, 1.5, rows=8)
    assert pacing.rate == first / 8, "half of the time lost is far too much"
    fed(pacing, 1.0, 1.02, rows=8)
    assert pacing.rate == pytest.approx(first / 8 * 0.75)
    rates = [pacing.rate]
    for _ in range(3):
        fed(pacing, 1.0, 1.0, rows=16)
        rates.append(pacing.rate)
    grown = [b - a for a, b in pairwise(rates) if b > a]
    assert grown
    assert min(grown) >= LINE / 512


def test_it_never_falls_below_the_floor_and_says_when_it_is_there() -> None:
    pacing = Pacing(floor_bytes_s=1e6)
    for _ in range(30):
        fed(pacing, 1.0, 2.0, rows=16)
    order = pacing.order(0.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0)
    assert (order.rate, order.state) == (1e6, AT_FLOOR)


def test_a_deadline_comes_before_training() -> None:
    """P14: a copy is made in time whatever the steps say, also while everything would be held back."""
    pacing = Pacing()
    fed(pacing, 1.0, 2.0)
    assert pacing.order(0.0, 0.0, 30e6) == pacing.order(0.0, 500.0, 30e6)
    order = pacing.order(0.0, 0.0, 30e6)
    assert (order.rate, order.held, order.state) == (30e6, False, AT_DEADLINE)


def test_nothing_is_held_back_that_must_leave_soon() -> None:
    """Also while the loop knows nothing yet."""
    pacing = Pacing()
    for _ in range(20):
        pacing.step("job/0", "loaded", 1.0, 0.0, LINE)
    period = HOLD_PARTS_FIRST * hold_s(1.0)
    assert not pacing.order(0.0, 0.5 * period, 0.0).held
    assert pacing.order(0.0, period, 0.0).held
    assert not pacing.order(0.0, period, 0.6 * LINE).held


def test_needed_is_the_most_urgent_first() -> None:
    assert needed_bytes_s([], 0.0) == 0.0
    assert needed_bytes_s([Demand(100, 10.0)], 0.0) == 10.0
    assert needed_bytes_s([Demand(100, 10.0), Demand(100, 100.0)], 0.0) == 10.0
    assert needed_bytes_s([Demand(100, 10.0), Demand(1900, 100.0)], 0.0) == 20.0
    assert needed_bytes_s([Demand(100, -5.0)], 0.0) == 100.0


def test_training_that_stands_still_is_not_slowed_down() -> None:
    pacing = Pacing()
    fed(pacing, 1.0, 1.1, rows=8)
    fed(pacing, 1.0, 1.1, rows=8)
    assert pacing.order(1.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0).state == PACED
    assert pacing.order(100.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0).state == NO_STEPS
    pacing.pause()
    assert pacing.order(1.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0).rate is None
    pacing.goes_on(1.0)
    assert pacing.order(1.0, HOLD_PARTS * HOLD_S_MAX - 1, 0.0).state == PACED


def test_nodes_hold_together_by_the_clock_and_only_where_quiet_steps_are_missing() -> None:
    slow, fast = Pacing(), Pacing()
    fed(slow, 1.0, 2.0)
    fed(fast, 0.95, 2.0)
    length = hold_s(2.0)
    period = HOLD_PARTS * length
    for turn in range(1, 4):  # their rows went on without a quiet one
        held = {t for t in range(int(period)) if slow.order(0.0, turn * period + t, 0.0).held}
        assert held == {t for t in range(int(period)) if fast.order(0.0, turn * period + t, 0.0).held}
        assert held == (set(range(int(length))) if turn > 1 else held)
    for _ in range(20):
        slow.step("job/0", "quiet", 1.0, 0.0, LINE)
    assert not slow.order(0.0, 4 * period, 0.0).held
    assert fast.order(0.0, 4 * period, 0.0).state == HELD


@pytest.mark.parametrize("step", [0.001, 0.1, 0.3, 1.0, 2.0, 10.0, 1000.0])
def test_a_hold_is_a_power_of_two_and_bounded(step: float) -> None:
    length = hold_s(step)
    assert 0 <= length <= HOLD_S_MAX
    assert length == 0 or math.log2(length).is_integer()
