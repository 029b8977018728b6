"""Threads that cannot be started: nobody waits for them without bound, and what lives goes on (P4, P5)."""

from __future__ import annotations

import _thread
import errno
import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest

from ckptd import thread_pool
from ckptd.thread_pool import ThreadPool, at_work, here, together
from ckptd.wire import tcp, tcp_listener
from ckptd.wire.bulk import CHUNK_BYTES, TransferError
from ckptd.wire.tcp import TcpTransport
from tests.node.bulk_peers import expect, transport
from tests.node.gates import Gates
from tests.waiting import until

BEGIN_S = 0.3
SLOW_S = 10.0  # a machine under load; "for ever" is longer


def no_thread(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def no_memory(*_: object) -> int:
    raise MemoryError


def dead_in_bootstrap(*_: object) -> int:
    """What a thread looks like that died before its first line: started, and never heard of."""
    return 0


FAILURES = [no_thread, no_memory, dead_in_bootstrap]


class Starts:
    """Whether threads can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._patch.setattr(thread_pool, "BEGIN_S", BEGIN_S)

    def fail(self, how: Callable[..., int]) -> None:
        self._patch.setattr(thread_pool, "start_thread", how)

    def work(self) -> None:
        self._patch.setattr(thread_pool, "start_thread", _thread.start_new_thread)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates()
    yield made
    made.open()


@pytest.mark.parametrize("how", FAILURES)
def test_with_one_thread_alive_work_goes_on(starts: Starts, how: Callable[..., int]) -> None:
    with ThreadPool(4, "few", ready=1) as pool:
        starts.fail(how)
        began = time.monotonic()
        futures = [pool.submit(pow, 2, n) for n in range(50)]
        assert [future.result(SLOW_S) for future in futures] == [2**n for n in range(50)]
        assert time.monotonic() - began < SLOW_S


@pytest.mark.parametrize("how", FAILURES)
def test_without_a_thread_a_submit_fails_in_time_and_leaves_nothing(starts: Starts, how: Callable[..., int]) -> None:
    starts.fail(how)
    pool, ran = ThreadPool(4, "none"), list[int]()
    began = time.monotonic()
    with pytest.raises(OSError, match="no thread could be started") as refused:
        pool.submit(ran.append, 1)
    assert BEGIN_S <= time.monotonic() - began < SLOW_S
    assert refused.value.errno == errno.ENOMEM
    with pytest.raises(OSError, match="no thread could be started"):
        pool.ready(2)
    starts.work()
    pool.submit(ran.append, 2).result(SLOW_S)
    pool.shutdown()
    assert ran == [2]


def test_a_crew_of_none_refuses_at_once() -> None:
    began = time.monotonic()
    with ThreadPool(0, "none") as pool, pytest.raises(OSError, match="no thread"):
        pool.submit(int)
    assert time.monotonic() - began < thread_pool.BEGIN_S


def test_time_in_which_the_machine_stood_still_is_nobodys_to_begin_in(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called a want of memory: a daemon did not start on a busy machine."""
    tries, clock = itertools.count(), time.monotonic
    starts.fail(lambda *args: _thread.start_new_thread(*args) if next(tries) else 0)
    jumps = itertools.count()
    monkeypatch.setattr(thread_pool, "time", SimpleNamespace(monotonic=lambda: clock() + (60.0 if next(jumps) else 0.0)))
    with ThreadPool(4, "few", ready=1) as pool:
        assert pool.submit(pow, 2, 3).result(SLOW_S) == 8


def test_a_submit_waits_for_the_first_thread(starts: Starts) -> None:
    """The first two tries die; a third, within the same submit, lives."""
    tries = []

    def third_time(function: Callable[..., object], args: tuple[object, ...]) -> int:
        tries.append(args)
        return _thread.start_new_thread(function, args) if len(tries) >= 3 else 0

    starts.fail(third_time)
    thread_pool.BEGIN_S = SLOW_S  # the fixture puts it back
    with ThreadPool(1, "late") as pool:
        assert pool.submit(int).result(SLOW_S) == 0
    assert len(tries) == 3


@pytest.mark.parametrize("how", FAILURES)
def test_queued_work_gets_its_threads_when_they_can_be_started_again(
    starts: Starts, gates: Gates, how: Callable[..., int]
) -> None:
    with ThreadPool(3, "again", ready=1) as pool:
        until(lambda: pool.submit(int).result(SLOW_S) == 0)
        starts.fail(how)
        futures = [pool.submit(gates.task, n) for n in range(3)]
        until(lambda: gates.inside == [0])
        starts.work()

        def all_inside() -> bool:
            pool.refill()  # what died counts as dead after BEGIN_S only
            return sorted(gates.inside) == [0, 1, 2]

        until(all_inside, SLOW_S)
        gates.open()
        assert [future.result(SLOW_S) for future in futures] == [0, 1, 2]


def test_a_worker_that_ends_its_task_looks_for_company(starts: Starts, gates: Gates) -> None:
    """Nobody submits anything any more: the one that lives starts the others."""
    first = threading.Event()
    with ThreadPool(3, "company", ready=1) as pool:
        starts.fail(no_thread)
        pool.submit(first.wait, 60)
        futures = [pool.submit(gates.task, n) for n in range(3)]
        assert not gates.inside
        starts.work()
        first.set()
        until(lambda: len(gates.inside) == 3, SLOW_S)
        assert sorted(gates.inside) == [0, 1, 2], "side by side, for none of them has ended"
        gates.open()
        assert [future.result(SLOW_S) for future in futures] == [0, 1, 2]


def test_those_taken_for_dead_are_too_many_when_they_begin_after_all(starts: Starts, gates: Gates) -> None:
    late: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def later(function: Callable[..., object], args: tuple[object, ...]) -> int:
        late.append((function, args))
        return 0

    starts.fail(later)
    pool = ThreadPool(2, "late")
    with pytest.raises(OSError, match="no thread"):
        pool.submit(int)
    starts.work()
    futures = [pool.submit(gates.task, n) for n in range(4)]

    def both() -> bool:
        pool.refill()  # what died counts as dead after BEGIN_S only, and none of these four may have come after that
        return len(gates.inside) == 2

    until(both)
    for function, args in late:
        function(*args)  # returns: it is not wanted
    assert len(gates.inside) == 2
    gates.open()
    assert [future.result(SLOW_S) for future in futures] == [0, 1, 2, 3]
    pool.shutdown()


@pytest.mark.parametrize("error", [ValueError("x"), MemoryError(), SystemExit(1), KeyboardInterrupt()])
def test_a_worker_survives_what_its_task_raises(error: BaseException) -> None:
    def fail() -> int:
        raise error

    with ThreadPool(1, "hardy") as pool:
        assert isinstance(pool.submit(fail).exception(SLOW_S), type(error))
        first = pool.submit(threading.get_ident).result(SLOW_S)
        pool.submit(fail)
        assert pool.submit(threading.get_ident).result(SLOW_S) == first


def test_a_worker_survives_what_its_own_loop_stumbles_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPool(1, "hardy", ready=1) as pool:
        assert pool.submit(int).result(SLOW_S) == 0
        grow, stumbles = thread_pool._Shared.grow, iter([True, True, False, True])

        def stumbling(shared: thread_pool._Shared, *args: object) -> None:
            if threading.current_thread().name == "hardy_0" and next(stumbles, False):
                raise MemoryError
            grow(shared, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(thread_pool._Shared, "grow", stumbling)
        results = [pool.submit(pow, 2, n) for n in range(5)]
        done = [future.exception(SLOW_S) for future in results]
        assert any(isinstance(error, MemoryError) for error in done), "the one that could not be run says so"
        assert pool.submit(pow, 2, 9).result(SLOW_S) == 512


def test_shutdown_ends_what_is_queued_and_nothing_comes_after(gates: Gates) -> None:
    pool = ThreadPool(1, "ending")
    futures = [pool.submit(gates.task, n) for n in range(3)]
    pool.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)
    gates.open()
    pool.shutdown()
    assert [future.result(0) for future in futures] == [0, 1, 2]


def test_shutdown_may_cancel_what_has_not_begun(gates: Gates) -> None:
    pool = ThreadPool(1, "ending")
    first = pool.submit(gates.task, 0)
    until(lambda: gates.inside)
    second = pool.submit(gates.task, 1)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    gates.open()
    pool.shutdown()
    assert first.result(0) == 0
    assert gates.inside == [0]


def test_a_crew_that_nobody_holds_lets_its_threads_go(gates: Gates) -> None:
    pool = ThreadPool(2, "garbage", ready=2)
    shared = weakref.ref(pool._shared)
    future = pool.submit(gates.task, 0)
    del pool
    gc.collect()
    gates.open()
    assert future.result(SLOW_S) == 0
    until(lambda: shared() is None, SLOW_S, "its workers to end")


def test_who_is_at_work(gates: Gates) -> None:
    with ThreadPool(2, "seen", ready=2) as pool, ThreadPool(1, "unseen", ready=1, daemon=True) as other:
        assert [name for name in at_work() if "seen" in name] == []
        name = pool.submit(lambda: (gates.task(0), threading.current_thread().name)[1])
        other.submit(gates.task, 1)
        until(lambda: len(gates.inside) == 2)
        seen = [each for each in at_work() if "seen" in each]
        gates.open()
        assert seen == [name.result(SLOW_S)]
        assert until(lambda: not any("seen" in each for each in at_work()), SLOW_S)


END = """
import logging, os, sys, threading
from ckptd import thread_pool, daemon

thread_pool.BEGIN_S = 20.0
daemon.THREADS_END_S = 0.5
idle = thread_pool.ThreadPool(2, "idle", ready=2)
idle.submit(int).result()
hangs = thread_pool.ThreadPool(1, "storage")
if sys.argv[1] == "hangs":
    hangs.submit(threading.Event().wait)
    while not thread_pool.at_work():
        pass
daemon._leave_stuck_threads(3)
print("nobody hangs")
"""


@pytest.mark.parametrize(("case", "status"), [("hangs", 3), ("idle", 0)])
def test_the_end_of_the_daemon_leaves_behind_what_hangs_and_names_nobody_else(case: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", END, case], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.strip() == ("left behind, they hang: storage_0" if case == "hangs" else "")
    assert ("nobody hangs" in ended.stdout) == (case == "idle")


def test_the_end_of_the_process_waits_for_tasks() -> None:
    script = (
        "import threading, sys; from ckptd.thread_pool import ThreadPool\n"
        "pool = ThreadPool(1, 'last')\n"
        "for n in range(3): pool.submit(lambda n=n: (threading.Event().wait(0.1), print(n, flush=True)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert ended.stdout.split() == ["0", "1", "2"], ended.stderr


# --- together -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("ready", [0, 1])
def test_together_everything_is_done_with_or_without_threads(starts: Starts, how: Callable[..., int], ready: int) -> None:
    pool = ThreadPool(4, "helpers", ready=ready)
    starts.fail(how)
    assert [future.result(0) for future in together(pool, [partial(pow, 2, n) for n in range(20)])] == [2**n for n in range(20)]
    pool.shutdown()
    assert [future.result(0) for future in together(pool, [partial(pow, 2, n) for n in range(3)])] == [1, 2, 4]


def test_together_takes_back_what_a_busy_crew_has_not_begun_and_keeps_nothing_of_it(gates: Gates) -> None:
    class Span:
        pass

    with ThreadPool(1, "busy") as pool:
        pool.submit(gates.task, 0)
        until(lambda: gates.inside)
        span = Span()
        kept = weakref.ref(span)
        done = together(pool, [partial(isinstance, span, Span) for _ in range(3)])
        assert [future.result(0) for future in done] == [True] * 3
        del span, done
        assert kept() is None
        gates.open()


def test_together_ends_after_all_that_it_began(gates: Gates) -> None:
    """The first fails at once; that is not known before the other, which is at work, has ended."""

    def fail_when_the_other_is_inside() -> int:
        until(lambda: gates.inside)
        threading.Timer(0.2, gates.open).start()
        raise ValueError

    with ThreadPool(1, "other") as pool:
        first, second = together(pool, [fail_when_the_other_is_inside, partial(gates.task, 7)])
        assert second.result(0) == 7
        assert isinstance(first.exception(0), ValueError)


def test_here_is_a_future_all_the_same() -> None:
    assert here(lambda: 5).result(0) == 5
    failed: Future[int] = here(partial(int, "x"))
    assert isinstance(failed.exception(0), ValueError)


# --- the bulk port --------------------------------------------------------------------------------------------------
@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports with the fewest threads: one that receives, none that helps to send."""
    monkeypatch.setattr(tcp_listener, "STREAMS_READY", 1)
    monkeypatch.setattr(tcp, "HELPERS_READY", 0)


@pytest.fixture
def pair(lonely: None) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    ends = transport("none"), transport("none")
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("how", FAILURES)
def test_bulk_goes_on_without_new_threads(
    pair: tuple[TcpTransport, TcpTransport], starts: Starts, how: Callable[..., int]
) -> None:
    receiver, sender = pair
    starts.fail(how)
    data = bytes(range(256)) * (CHUNK_BYTES // 64)
    for _ in range(2):
        buffer = bytearray(len(data))
        landing = receiver.expect(memoryview(buffer))
        sender.push(landing.ticket, [memoryview(data)], streams=4)
        assert landing.done.result(SLOW_S) == len(data)
        assert buffer == data
    until(lambda: receiver.connections == 0)


@pytest.mark.parametrize("how", FAILURES)
def test_a_gate_without_any_thread_is_busy_and_takes_the_same_ticket_later(
    monkeypatch: pytest.MonkeyPatch, starts: Starts, how: Callable[..., int]
) -> None:
    monkeypatch.setattr(tcp_listener, "STREAMS_READY", 0)
    receiver, sender = transport("none"), transport("none")
    landing = expect(receiver, 100)
    starts.fail(how)
    with pytest.raises(TransferError, match="too many connections"):
        sender.push(landing.ticket, [memoryview(bytes(100))])
    assert receiver.connections == 0
    starts.work()
    sender.push(landing.ticket, [memoryview(bytes(100))])
    assert landing.done.result(SLOW_S) == 100
    receiver.close()
    sender.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), ValueError()])
def test_the_gate_survives_its_connections(
    pair: tuple[TcpTransport, TcpTransport], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    receiver, sender = pair
    landing = expect(receiver, 100)

    def fail(*_: object) -> int:
        raise error

    for method in ("_prove", "_accept", "_employ"):
        with monkeypatch.context() as broken:
            broken.setattr(receiver._listener, method, fail)
            with pytest.raises(TransferError):
                sender.push(landing.ticket, [memoryview(bytes(100))], cancelled=_set_after(0.5))
    sender.push(landing.ticket, [memoryview(bytes(100))])
    assert landing.done.result(SLOW_S) == 100


def _set_after(seconds: float) -> threading.Event:
    event = threading.Event()
    threading.Timer(seconds, event.set).start()
    return event


def test_a_stream_without_memory_fails_the_transfer_at_once(
    pair: tuple[TcpTransport, TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = pair
    landing = expect(receiver, 100)
    monkeypatch.setattr("ckptd.wire.landing.Landing.claim", no_memory)
    with pytest.raises(TransferError):
        sender.push(landing.ticket, [memoryview(bytes(100))])
    with pytest.raises(TransferError, match="MemoryError"):
        landing.done.result(SLOW_S)
    until(lambda: receiver.connections == 0)


def test_closing_ends_streams_that_wait_for_a_thread(pair: tuple[TcpTransport, TcpTransport], starts: Starts) -> None:
    """One is at work, three are admitted and queued; none is left when close() returns, and each landing has settled."""
    receiver, sender = pair
    landings = [expect(receiver, 100) for _ in range(4)]
    hold = threading.Event()

    class Hold:
        def take(self, nbytes: int, stopped: Callable[[], bool]) -> int:
            until(lambda: hold.is_set() or stopped())
            return 0

        def sent(self, nbytes: int) -> None:
            pass

    with ThreadPool(4, "pushes", ready=4) as pushes:
        starts.fail(dead_in_bootstrap)
        futures = [pushes.submit(sender.push, each.ticket, [memoryview(bytes(100))], pace=Hold()) for each in landings]
        until(lambda: receiver.connections == 4)
        receiver.close()
        assert receiver.connections == 0
        assert all(isinstance(landing.done.exception(0), TransferError) for landing in landings)
        hold.set()
        assert all(isinstance(future.exception(SLOW_S), TransferError) for future in futures)
