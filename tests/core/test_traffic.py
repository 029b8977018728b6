"""Token bucket, intervals of traffic, medians of steps: what the pacing loop is made of."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.pacing.bucket import BURST_S, SLICE_BYTES_MAX, SLICE_BYTES_MIN, Bucket
from ckptd.core.pacing.steptimes import BASELINE_ROWS_MIN, CHANGE_ROWS, WARMUP_ROWS, Cadence, StepTimes
from ckptd.core.pacing.traffic import GUARD_S, INTERVALS_MAX, Intervals, Traffic

RATE = 1e6


# --- bucket ---------------------------------------------------------------------------------------------------------
def test_without_a_rate_everything_goes_at_once() -> None:
    bucket = Bucket(0.0)
    assert bucket.slice(1 << 30) == 1 << 30
    assert bucket.take(0.0, 1 << 30) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 1 << 20)), max_size=60), st.integers(16_384, 10**9)
)
def test_no_more_leaves_than_rate_and_burst_allow(asks: list[tuple[float, int]], rate: int) -> None:
    """Over any time since the start: rate x time + burst + one request's debt."""
    bucket, now, sent, largest = Bucket(0.0), 0.0, 0, 0
    bucket.set(now, float(rate))
    for pause, nbytes in asks:
        now += pause
        if bucket.take(now, nbytes) == 0.0:
            sent += nbytes
            largest = max(largest, nbytes)
        assert sent <= rate * now + bucket.burst_bytes + largest + 1


def test_who_waits_as_long_as_told_is_let_through() -> None:
    bucket = Bucket(0.0)
    bucket.set(0.0, RATE)
    assert bucket.take(1.0, 50_000) == 0.0
    pause = bucket.take(1.0, 50_000)
    assert pause == pytest.approx(0.05)
    assert bucket.take(1.0 + pause + 1e-9, 50_000) == 0.0


def test_a_large_request_leaves_a_debt_that_is_paid() -> None:
    bucket = Bucket(0.0)
    bucket.set(0.0, RATE)
    assert bucket.take(1.0, 4_000_000) == 0.0
    assert bucket.take(1.0, 1) == pytest.approx(4.0 - BURST_S, rel=0.01)


def test_a_rate_that_begins_finds_the_bucket_empty() -> None:
    bucket = Bucket(0.0)
    bucket.set(5.0, RATE)
    assert bucket.take(5.0, 10_000) > 0


def test_slices_spread_over_a_step() -> None:
    bucket = Bucket(0.0)
    for rate, expected in ((1e6, 20_000), (1e3, SLICE_BYTES_MIN), (1e12, SLICE_BYTES_MAX)):
        bucket.set(0.0, rate)
        assert bucket.slice(1 << 30) == expected
        assert bucket.slice(10) == 10


def test_what_went_unasked_is_at_most_a_burst_of_debt() -> None:
    bucket = Bucket(0.0)
    bucket.set(0.0, RATE)
    for _ in range(1000):
        bucket.charge(4096)
    assert bucket.take(0.0, 1) <= BURST_S + 0.01


# --- intervals ------------------------------------------------------------------------------------------------------
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 2)), max_size=30), st.floats(0, 100), st.floats(0, 20)
)
def test_covered_is_the_length_of_the_overlap(
    parts: list[tuple[float, float]], begin: float, length: float
) -> None:
    intervals, at, marks = Intervals(), 0.0, []
    for gap, lasts in parts:
        at += gap
        intervals.add(at, at + lasts)
        marks.append((at, at + lasts))
    end = begin + length
    points = sorted({begin, end, *(p for mark in marks for p in mark if begin < p < end)})
    expected = sum(
        b - a
        for a, b in pairwise(points)
        if any(x <= (a + b) / 2 <= y for x, y in marks)
    )
    assert intervals.covered(begin, end) == pytest.approx(expected, abs=1e-6)


def test_intervals_are_bounded() -> None:
    intervals = Intervals()
    for index in range(3 * INTERVALS_MAX):
        intervals.add(index / 100, index / 100 + 0.001)
    assert len(intervals._ends) <= INTERVALS_MAX


def test_a_step_is_loaded_quiet_or_neither() -> None:
    traffic = Traffic()
    traffic.began(10.0)
    traffic.ended(10.5, 1000, tail_s=0.05)
    assert traffic.kind(10.0, 10.4) == "loaded"
    assert traffic.kind(9.0, 9.9) == "quiet"
    assert traffic.kind(5.0, 10.1) == "unclear"  # for a moment at its end only
    assert traffic.kind(10.56, 11.0) == "unclear"  # the kernel may still be sending
    assert traffic.kind(10.56 + GUARD_S, 11.0) == "quiet"


def test_a_send_under_way_counts_before_it_returns() -> None:
    traffic = Traffic()
    traffic.began(10.0)
    assert traffic.kind(10.0, 20.0) == "loaded"
    assert traffic.kind(20.0, 30.0) == "loaded"


def test_between_sends_that_overlap_there_is_no_hole() -> None:
    traffic = Traffic()
    traffic.began(10.0)
    traffic.began(11.0)
    traffic.ended(11.5, 1000, tail_s=0.05)
    traffic.ended(12.0, 1000, tail_s=0.05)
    assert traffic.kind(10.0, 10.9) == "loaded"


def test_a_step_beside_somebody_elses_replica_is_no_baseline_and_no_evidence() -> None:
    traffic = Traffic()
    traffic.received(10.0, 10.3)
    assert traffic.kind(9.5, 10.5) == "unclear"
    assert traffic.kind(11.0, 11.5) == "quiet"


def test_the_line_is_the_fastest_that_bytes_went() -> None:
    traffic = Traffic()
    for index in range(10):
        traffic.began(index * 0.1)
        traffic.ended(index * 0.1 + 0.1, 1_000_000, 0.05)
    assert traffic.line_bytes_s == pytest.approx(1e7, rel=0.05)
    for index in range(10):  # paced: slower, which says nothing of the line
        traffic.began(10 + index * 0.1)
        traffic.ended(10 + index * 0.1 + 0.1, 1_000, 0.05)
    assert traffic.line_bytes_s == pytest.approx(1e7, rel=0.05)


# --- steps ----------------------------------------------------------------------------------------------------------
def warm() -> StepTimes:
    times = StepTimes()
    for _ in range(WARMUP_ROWS):
        times.add("quiet", 100.0)
    return times


def test_slow_drift_is_followed() -> None:
    times = warm()
    for index in range(1000):
        times.add("quiet", 1.0 + index / 1000)
    assert times.baseline_s is not None
    assert times.baseline_s > 1.9


def test_another_regime_is_a_new_baseline_within_a_few_rows() -> None:
    times, chance = warm(), random.Random(3)
    for _ in range(200):
        times.add("quiet", chance.gauss(1.0, 0.02))
    for _ in range(max(CHANGE_ROWS, BASELINE_ROWS_MIN)):
        times.add("quiet", chance.gauss(1.5, 0.02))
    assert times.baseline_s == pytest.approx(1.5, rel=0.05)


def test_noise_is_no_other_regime() -> None:
    times, chance = warm(), random.Random(4)
    for _ in range(5000):
        times.add("quiet", chance.gauss(1.0, 0.05))
        if times.baseline_s is not None and times.seen > 100:
            assert times.baseline_s == pytest.approx(1.0, rel=0.06)


def test_a_pause_now_and_then_moves_nothing() -> None:
    times = warm()
    for index in range(64):
        times.add("quiet", 600.0 if index % 8 == 0 else 1.0)
        times.add("loaded", 600.0 if index % 8 == 0 else 1.1)
    assert times.slowdown == pytest.approx(0.1)


def test_cadence_is_for_jobs_that_mean_each_call() -> None:
    each, rare = Cadence(), Cadence()
    for index in range(20):
        each.called(index, index * 0.3)
        rare.called(index * 100, index * 30.0)
    assert each.seconds is None
    assert rare.seconds == pytest.approx(30.0)
