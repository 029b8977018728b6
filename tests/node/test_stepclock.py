"""What a rank tells of its steps: the clock itself, and what of it comes to a daemon (P5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import torch
from ckptd_client.stepclock import CALLS, OTHERS_MAX, REPORT_S, StepClock

from ckptd.core.pacing.slowdown import ROW_S_MIN
from ckptd.core.pacing.traffic import CAPTURED, WAITED
from ckptd.core.pacing.windows import SPANS_MAX
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import decode_frame, encode_frame
from tests.node.client_training import Training, connected
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.short import short_folder
from tests.waiting import until


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Time:
    return Time()


@pytest.fixture
def clock(now: Time) -> StepClock:
    made = StepClock(now)
    made.on = True
    return made


def steps(
    clock: StepClock, now: Time, count: int, seconds: float, *, mark: int = 7, busy: bool = False
) -> list[bool]:
    due = []
    for _ in range(count):
        now.now += seconds
        due.append(clock.stepped(mark, busy))
    return due


def test_a_step_is_from_one_begin_of_the_optimizer_to_the_next(clock: StepClock, now: Time) -> None:
    steps(clock, now, 4, 0.5)
    rows, spans = clock.report()
    assert rows == [[100.5, 101.0, 1.0, 0.0], [101.0, 101.5, 1.0, 0.0], [101.5, 102.0, 1.0, 0.0]]
    assert spans is None
    assert clock.report() == (None, None)


def test_short_steps_come_together(clock: StepClock, now: Time) -> None:
    steps(clock, now, 1001, 0.001)
    rows, _ = clock.report()
    assert rows is not None
    assert all(end - begin >= ROW_S_MIN - 1e-9 for begin, end, _, _ in rows)
    assert sum(row[2] for row in rows) == pytest.approx(1000, abs=110)


def test_only_one_optimizer_of_several_counts(clock: StepClock, now: Time) -> None:
    for _ in range(5):
        steps(clock, now, 1, 0.5, mark=1)
        steps(clock, now, 3, 0.1, mark=2)
        steps(clock, now, 1, 0.2, mark=CALLS)
    rows, _ = clock.report()
    assert rows is not None
    assert [round(end - begin, 6) for begin, end, _, _ in rows] == [1.0] * 4


def test_an_optimizer_that_is_used_no_more_is_replaced(clock: StepClock, now: Time) -> None:
    steps(clock, now, 3, 0.5, mark=1)
    clock.report()
    steps(clock, now, OTHERS_MAX + 5, 0.2, mark=2)
    rows, _ = clock.report()
    assert rows is not None
    assert [row[1] - row[0] for row in rows] == pytest.approx([0.2] * len(rows))


def test_calls_count_where_there_is_no_optimizer(clock: StepClock, now: Time) -> None:
    steps(clock, now, 3, 0.5, mark=CALLS)
    assert clock.report()[0] == [[100.5, 101.0, 1.0, 0.0], [101.0, 101.5, 1.0, 0.0]]
    steps(clock, now, 2, 0.5, mark=3)
    assert clock.report()[0] == [[102.0, 102.5, 1.0, 0.0]]


def test_what_we_disturbed_is_marked(clock: StepClock, now: Time) -> None:
    steps(clock, now, 2, 0.5)
    clock.captures()
    steps(clock, now, 1, 0.5)
    steps(clock, now, 1, 0.5, busy=True)  # the fence holds the optimizer: it falls into the next row too
    steps(clock, now, 2, 0.5)
    clock.waits()
    clock.captures()
    steps(clock, now, 2, 0.5)
    rows, _ = clock.report()
    assert rows is not None
    assert [row[3] for row in rows] == [0.0, CAPTURED, CAPTURED, CAPTURED, 0.0, WAITED, 0.0]


def test_a_report_is_due_now_and_then_and_bounded(clock: StepClock, now: Time) -> None:
    assert not any(steps(clock, now, 1, 0.2))
    clock._told_at = now.now
    due = steps(clock, now, 20, 0.2)
    assert due.index(True) == pytest.approx(REPORT_S / 0.2, abs=1)
    steps(clock, now, 10 * wire.TIMES_MAX, 0.2)
    rows, _ = clock.report()
    assert rows is not None
    assert len(rows) == wire.TIMES_MAX
    assert rows[-1][1] == now.now


def test_off_it_does_nothing(now: Time) -> None:
    clock = StepClock(now)
    assert not any(steps(clock, now, 10, 1.0))
    with clock.communication():
        now.now += 1
    assert clock.report() == (None, None)


def test_communication_is_told_from_the_begin_of_the_step(clock: StepClock, now: Time) -> None:
    clock.each = True
    steps(clock, now, 1, 0.5)
    for _ in range(2):
        now.now += 0.1
        with clock.communication():
            now.now += 0.2
    due = steps(clock, now, 1, 0.1)
    rows, spans = clock.report()
    assert due == [True]
    assert rows == [[100.5, pytest.approx(101.2), 1.0, 0.0]]
    assert spans == [pytest.approx([0.1, 0.3]), pytest.approx([0.4, 0.6])]


def test_many_communications_are_merged(clock: StepClock, now: Time) -> None:
    clock.each = True
    steps(clock, now, 1, 0.5)
    for _ in range(3 * SPANS_MAX):
        with clock.communication():
            now.now += 0.01
    steps(clock, now, 1, 0.1)
    _, spans = clock.report()
    assert spans is not None
    assert len(spans) == SPANS_MAX
    assert spans[-1][1] == pytest.approx(0.01 * 3 * SPANS_MAX)


# --- the frame ------------------------------------------------------------------------------------------------------
def test_a_daemon_that_does_not_ask_for_step_times_gets_the_frame_it_knows() -> None:
    """A field that an older daemon does not know would end the connection."""
    assert msgpack.unpackb(encode_frame(wire.Called(3))) == ["Called", {"step": 3, "asks": False}]
    told = wire.Called(3, False, [[1.0, 2.0, 1.0, 0.0]], [[0.1, 0.2]])
    assert decode_frame(encode_frame(told), wire.TO_DAEMON) == told
    assert decode_frame(encode_frame(wire.Called(3)), wire.TO_DAEMON) == wire.Called(3)


def test_what_is_none_and_must_be_said_is_said() -> None:
    opened = wire.Opened(1, 1, None)
    assert decode_frame(encode_frame(opened), wire.TO_RANK) == opened


# --- a client and a daemon ------------------------------------------------------------------------------------------
@pytest.fixture
def daemon() -> Iterator[Callable[..., RankDaemonDouble]]:
    made: list[RankDaemonDouble] = []
    with short_folder() as root:

        def start(**policy: object) -> RankDaemonDouble:
            made.append(RankDaemonDouble(Path(root) / f"s{len(made)}", **policy).start())
            return made[-1]

        yield start
        for each in made:
            each.stop()


def told(daemon: RankDaemonDouble) -> list[list[float]]:
    with daemon.changed:
        frames = [m for _, m in daemon.seen if isinstance(m, wire.Called) and m.times]
    return [row for frame in frames for row in frame.times]


def train(client: object, training: Training, first: int, count: int, *, pause: float = 0.0) -> None:
    for step in range(first, first + count):
        end = time.monotonic() + pause
        until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        training.step()
        client.snapshot(step)  # type: ignore[attr-defined]


def test_steps_come_with_the_calls_and_captures_are_marked(daemon: Callable[..., RankDaemonDouble]) -> None:
    double, training = daemon(pacing="aimd", granting="never"), Training()
    with connected(double, training) as client:
        client.restore()
        began = time.monotonic()
        train(client, training, 1, 8, pause=0.12)
        rows = until(lambda: told(double), what="step times")
        assert isinstance(rows, list)
        assert all(began <= begin < end <= time.monotonic() for begin, end, _, _ in rows)
        assert all(steps >= 1 for _, _, steps, _ in rows)
        assert any(row[3] == 0.0 for row in rows[1:])
        double.granting = "always"
        client.snapshot(9, must=True)
        train(client, training, 10, 3, pause=0.12)
        until(lambda: any(row[3] == 1.0 for row in told(double)), what="a row with a capture")


def test_a_daemon_that_does_not_pace_hears_nothing(daemon: Callable[..., RankDaemonDouble]) -> None:
    for policy in ({}, {"pacing": "off"}):
        double, training = daemon(**policy), Training()
        with connected(double, training) as client:
            client.restore()
            train(client, training, 1, 5, pause=0.12)
            with client.communication():
                torch.ones(1).sum()
            assert client.wait("sealed", 30)
        assert told(double) == []


def test_a_job_that_rarely_calls_reports_all_the_same(daemon: Callable[..., RankDaemonDouble]) -> None:
    double, training = daemon(pacing="aimd"), Training()
    with connected(double, training) as client:
        client.restore()
        training.step()
        client.snapshot(1, must=True)
        end = time.monotonic() + 2.5 * REPORT_S
        while time.monotonic() < end:
            training.step()
        rows = until(lambda: told(double), what="step times without a call")
        assert isinstance(rows, list)
        with double.changed:
            assert {m.step for _, m in double.seen if isinstance(m, wire.Called)} == {1}
