"""Chunks in idle spans: GEMINI's algorithm 2 and the gate made of it."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.pacing.windows import (
    ALPHA_S,
    GAMMA,
    PHASE_STEPS_MAX,
    PROFILE_STEPS_MIN,
    Schedule,
    gaps,
    partition,
)

LINE = 1e6  # bytes/s


def by_hand(
    spans: list[float], size: int, copies: int, chunk: int, alpha: float, line: float, mu: float
) -> list[int]:
    """The pseudo-code of the paper, word for word, with the guard that its published code lacks: sizes only."""
    out, remain, ident = [], size, 0
    for t in [*spans, math.inf]:
        span = mu * t
        while span > 0:
            s = chunk if span >= alpha + chunk / line else max(0, int((span - alpha) * line))
            s = min(remain, s)
            if s <= 0:
                break
            remain -= s
            span -= alpha + s / line
            out.append(s)
            if remain == 0:
                if ident < copies - 1:
                    ident, remain = ident + 1, size
                else:
                    return out
    raise AssertionError


INPUTS = (
    st.lists(st.floats(0, 2), max_size=8), st.integers(1, 5_000_000), st.integers(1, 3), st.integers(50_000, 1_000_000),
    st.floats(0, 0.01), st.floats(0.1, 1.0),
)  # fmt: skip


@given(*INPUTS)
def test_it_is_the_papers_algorithm(
    spans: list[float], size: int, copies: int, chunk: int, alpha: float, mu: float
) -> None:
    found = partition(spans, size, copies, chunk, alpha, LINE, mu)
    assert [nbytes for _, nbytes in found] == by_hand(spans, size, copies, chunk, alpha, LINE, mu)


@given(*INPUTS)
def test_all_is_sent_and_no_span_is_overfilled(
    spans: list[float], size: int, copies: int, chunk: int, alpha: float, mu: float
) -> None:
    found = partition(spans, size, copies, chunk, alpha, LINE, mu)
    assert sum(nbytes for _, nbytes in found) == copies * size
    assert all(0 < nbytes <= chunk for _, nbytes in found)
    assert [index for index, _ in found] == sorted(index for index, _ in found)
    took: dict[int, float] = defaultdict(float)
    for index, nbytes in found:
        took[index] += alpha + nbytes / LINE
    for index, span in enumerate(spans):
        assert took[index] <= mu * span + 1e-9


def test_what_does_not_fit_is_left_for_the_end_of_the_step() -> None:
    found = partition([0.1, 0.1], 1_000_000, 1, 50_000, 0.0, LINE, 1.0)
    assert sum(nbytes for index, nbytes in found if index < 2) == 200_000
    assert sum(nbytes for index, nbytes in found if index == 2) == 800_000


def test_what_fits_does_not_prolong_the_step() -> None:
    found = partition([0.5, 0.5], 600_000, 1, 100_000, 0.001, LINE, 0.8)
    assert max(index for index, _ in found) < 2


@pytest.mark.parametrize("span", [0.0, 1e-9, 0.001])
def test_a_span_too_short_for_a_transfer_stays_empty(span: float) -> None:
    """The published code loops for ever here."""
    assert partition([span], 10, 1, 10, 0.01, LINE, 1.0) == [(1, 10)]


def test_nothing_to_send() -> None:
    assert partition([1.0], 0, 1, 10, 0.0, LINE, 1.0) == []
    assert partition([1.0], 10, 0, 10, 0.0, LINE, 1.0) == []


# --- gaps -----------------------------------------------------------------------------------------------------------
def test_gaps_are_free_in_all_steps() -> None:
    steps = [(1.0, [(0.2, 0.4), (0.7, 0.8)]), (1.1, [(0.25, 0.45), (0.65, 0.8)])]
    assert gaps(steps) == [(0.0, 0.2), (0.45, 0.65), (0.8, 1.0)]


def test_a_step_of_another_shape_does_not_count() -> None:
    usual = (1.0, [(0.2, 0.4)])
    assert gaps([usual, usual, (9.0, [(0.2, 0.4), (1, 2), (3, 4)])]) == [(0.0, 0.2), (0.4, 1.0)]


def test_short_gaps_and_none_at_all() -> None:
    assert gaps([]) == []
    assert gaps([(1.0, [(0.0, 1.0)])]) == []
    assert gaps([(1.0, [(0.0, 0.5), (0.505, 1.0)])]) == []


# --- the gate -------------------------------------------------------------------------------------------------------
def profiled(steps: int = PROFILE_STEPS_MIN) -> Schedule:
    """Steps of 1 s: the wire is training's from 0.5 s on. The newest began at 100 s."""
    schedule = Schedule()
    for index in range(steps):
        schedule.observe(100.0 - steps + index, 1.0, [(0.5, 1.0)])
    return schedule


def test_no_profile_no_window() -> None:
    assert not Schedule().known(100.0)
    assert not profiled(PROFILE_STEPS_MIN - 1).known(100.0)
    assert profiled().known(100.0)


def test_where_a_step_is_must_be_known() -> None:
    schedule = profiled()
    assert schedule.known(100.0 + PHASE_STEPS_MAX - 0.1)
    assert not schedule.known(100.0 + PHASE_STEPS_MAX + 0.1)
    assert not schedule.known(99.0)


def test_the_gate_opens_in_the_gap_and_shuts_before_its_end() -> None:
    schedule = profiled()
    allotted = int((GAMMA * 0.5 - ALPHA_S) * LINE)
    assert schedule.allows(100.0, LINE) == (allotted, 0.0)
    left, pause = schedule.allows(100.0 + GAMMA * 0.5 + 0.01, LINE)
    assert left == 0
    assert pause == pytest.approx(1.0 - GAMMA * 0.5 - 0.01)
    assert schedule.allows(100.7, LINE)[0] == 0
    assert schedule.allows(101.0, LINE)[0] == allotted


def test_an_allotment_is_used_once_per_step() -> None:
    schedule = profiled()
    allotted = schedule.allows(100.0, LINE)[0]
    schedule.took(100.0, allotted - 10)
    assert schedule.allows(100.1, LINE) == (10, 0.0)
    schedule.took(100.1, 10)
    left, pause = schedule.allows(100.2, LINE)
    assert left == 0
    assert pause == pytest.approx(0.8)
    assert schedule.allows(101.05, LINE)[0] == allotted


def test_capacity_is_what_the_gaps_carry() -> None:
    assert profiled().capacity_bytes_s(LINE) == pytest.approx((GAMMA * 0.5 - ALPHA_S) * LINE, rel=0.01)
    assert Schedule().capacity_bytes_s(LINE) == 0.0
