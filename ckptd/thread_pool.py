"""A pool of threads that nobody ever waits for without bound, in place of ThreadPoolExecutor.

Without memory a new thread dies in its bootstrap, before its first line, and threading.Thread.start() waits for its sign of life
for ever: the event loop, say, within run_in_executor. Here threads are started by _thread.start_new_thread, which waits for
nothing, and say themselves that they have begun. As long as one lives, the rest may fail to start: work waits in the queue.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, ParamSpec, TypeVar

BEGIN_S = 1.0  # a thread that has not begun by then counts as dead; so long a submit waits when none lives
RETRY_S = 0.1  # the same while somebody waits for the first one
TURNS_MIN = 5  # so often, however late it is by then
STUMBLED_S = 0.01  # pause of a worker that could not even take work
END_S = 5.0  # how long the end of the process waits for tasks
POLL_S = 0.01

start_thread = _thread.start_new_thread

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(Executor):
    """At most ``most`` threads, called ``{name}_{n}``, that are started when there is work and kept. ``ready``: see there.
    ``daemon``: the end of the process does not wait for their tasks. A pool that nobody holds any more ends when its work does."""

    def __init__(self, most: int, name: str, *, ready: int = 0, daemon: bool = False) -> None:
        self._shared = _Shared(most, name, daemon)
        # Takes no lock: the garbage collector may run it in the midst of anything.
        weakref.finalize(self, self._shared.let_go).atexit = False
        if ready:
            self.ready(ready)

    def ready(self, count: int) -> None:
        """Start threads until there are so many, ahead of any work. Raises NoThread: not one has begun in BEGIN_S."""
        if not self._shared.await_first(count):
            raise NoThread

    def refill(self) -> None:
        """Try again to start the threads that queued work lacks. As do submit and each worker that takes a task."""
        self._shared.grow()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises NoThread, with nothing left to run, when no thread lives and none has begun in BEGIN_S."""
        return self.ask(partial(fn, *args, **kwargs)).future

    def ask(self, call: Callable[[], T]) -> Task[T]:
        """As ``submit``, for whoever may take it back."""
        task = Task[T](call)
        self._shared.put(task)
        try:
            self._shared.grow()
            if self._shared.await_first():
                return task
        except MemoryError:
            pass  # as if none lived
        if not task.take_back():
            return task  # one began at the last moment and has taken it
        raise NoThread

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shared.close(cancel_futures)
        if wait:
            self._shared.empty.wait()


def together(pool: ThreadPool, calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """All of these calls: the first by this thread, the others by the pool; those that it has not begun when this thread is free
    by this thread as well, so a pool without a thread makes it slower and no more. Returns the futures, all done; neither returns
    nor raises while one of the calls runs."""
    asked: list[Task[T] | None] = [None] * len(calls)  # with room for all: what was submitted is never forgotten
    done: list[Future[T]] = []
    try:
        with contextlib.suppress(OSError, MemoryError, RuntimeError):  # no thread, or shut down: the rest is ours
            for index in range(1, len(calls)):
                asked[index] = pool.ask(calls[index])
        for theirs, call in zip(asked, calls, strict=True):
            done.append(here(call) if theirs is None or theirs.take_back() else theirs.future)
    finally:
        wait([theirs.future for theirs in asked if theirs is not None and not theirs.take_back()])
    return done


def here(call: Callable[[], T]) -> Future[T]:
    """By this thread, now: for whoever deals in futures and could not submit."""
    task = Task[T](call)
    task.run()
    return task.future


def at_work(wait_s: float = 0.0) -> list[str]:
    """Names of the threads in the midst of a task that the end of the process should wait for, after waiting for them for at most
    so long."""
    deadline = time.monotonic() + wait_s
    while True:
        names = [f"{shared.name}_{n}" for shared in _all_shared() if not shared.daemon for n in list(shared.busy)]
        if not names or time.monotonic() >= deadline:
            return sorted(names)
        time.sleep(POLL_S)


class NoThread(OSError):
    """This process has no memory for a thread, which says nothing of what the thread was to do."""

    def __init__(self) -> None:
        super().__init__(errno.ENOMEM, "no thread could be started")


class Task(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call: Callable[[], T] | None = call

    def take_back(self) -> bool:
        """True: nobody has begun it nor will, and what it holds is let go of, though it may stand in the queue still."""
        if not self.future.cancel():
            return False
        self._call = None
        return True

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        assert self._call is not None, "only what was cancelled has none"
        try:
            result = self._call()
        except BaseException as error:
            self.future.set_exception(error)
            del self  # the traceback holds this frame: no cycle through the future
        else:
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """It could not even be run. Whoever waits for it hears so."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class _Shared:
    """What the workers of a pool share. They hold this and not the pool, which may become garbage while they wait."""

    def __init__(self, most: int, name: str, daemon: bool) -> None:
        self.most, self.name, self.daemon = most, name, daemon
        self.closed = False
        self.empty = threading.Event()  # closed, and no worker lives
        # Sets of numbers, not counters: whatever fails between two of these lines, saying it again puts it right.
        self.alive: set[int] = set()
        self.busy: set[int] = set()
        self._starting: dict[int, float] = {}  # worker -> when
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()  # None: somebody should look whether we are closed
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._numbers = 0
        with _pools_lock:
            _pools.add(self)

    # --- whoever has work ---------------------------------------------------------------------------------------
    def put(self, task: Task[T]) -> None:
        with self._lock:
            if self.closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._queue.put(task)  # type: ignore[arg-type]  # a worker never looks at the result

    def close(self, cancel: bool) -> None:
        with self._lock:
            with contextlib.suppress(Empty):
                while cancel:
                    if (task := self._queue.get_nowait()) is not None:
                        task.take_back()
            self.let_go()
            if not self.alive:
                self.empty.set()

    def let_go(self) -> None:
        """The workers end when the work does."""
        self.closed = True
        self._queue.put(None)

    # --- threads come and go ------------------------------------------------------------------------------------
    def await_first(self, count: int = 1) -> bool:
        """True: at least one lives. False: none has begun in BEGIN_S, though it was tried again and again, and in TURNS_MIN turns:
        where the machine stood still nobody could."""
        if len(self.alive) >= count or not self.most:
            return bool(self.alive)
        deadline = time.monotonic() + BEGIN_S
        self.grow(count)
        turns = 0
        while not self.alive and (turns < TURNS_MIN or time.monotonic() < deadline):
            self._begun.wait(RETRY_S)
            self.grow(count, RETRY_S)
            turns += 1
        return bool(self.alive)

    def grow(self, count: int = 0, dead_after_s: float = BEGIN_S) -> None:
        """Start what queued work lacks, and up to ``count`` without any. That it fails is no matter: it is tried again."""
        with contextlib.suppress(MemoryError), self._lock:
            if self.closed:
                return
            now = time.monotonic()
            self._starting = {n: at for n, at in self._starting.items() if now - at < dead_after_s}
            coming = len(self.alive) + len(self._starting)
            idle = coming - len(self.busy)
            wanted = max(self._queue.qsize() - idle, count - coming)
            for _ in range(min(wanted, self.most - coming)):
                if not self._start(now):
                    break

    def _start(self, now: float) -> bool:
        number, self._numbers = self._numbers, self._numbers + 1
        try:
            start_thread(_worker, (self, number))
        except (RuntimeError, MemoryError):
            return False
        self._starting[number] = now
        return True

    def begin(self, number: int) -> bool:
        """A worker's first word. False: it is not wanted any more, as others began while it was taken for dead."""
        with contextlib.suppress(MemoryError):  # its name is a help in logs, no more
            threading.current_thread().name = f"{self.name}_{number}"
        with self._lock:
            self._starting.pop(number, None)
            if len(self.alive) >= self.most or (self.closed and not self.alive):
                return False
            self._begun.set()
            self.alive.add(number)  # last, for what raises before it must not leave one that only seems to live
            return True

    def end(self, number: int) -> None:
        with self._lock:
            self.alive.discard(number)
            if not self.alive:
                self._begun.clear()
                self.empty.set()

    def _pass_on(self) -> None:
        """The end of the pool to the next worker, which would wait for it for ever."""
        while True:
            try:
                self._queue.put(None)
                return
            except MemoryError:
                time.sleep(STUMBLED_S)

    def work(self, number: int) -> None:
        """Task after task until the pool is closed. A task's errors are its future's; others are of this loop."""
        while True:
            task: Task[object] | None = None
            try:
                self.busy.discard(number)
                task = self._queue.get()
                if task is None:
                    if self.closed:
                        self._pass_on()
                        return
                    continue
                self.busy.add(number)
                self.grow()
                task.run()
            except BaseException as error:  # no memory: the thread is worth more than what it stumbled over
                if task is None:
                    time.sleep(STUMBLED_S)
                else:
                    task.fail(error)


def _worker(shared: _Shared, number: int) -> None:
    if not shared.begin(number):
        return
    while True:
        try:
            shared.work(number)
            shared.end(number)
            return
        except BaseException:  # of its handling of errors: see work()
            time.sleep(STUMBLED_S)


# --- the end of the process, and its forks --------------------------------------------------------------------------
_pools: weakref.WeakSet[_Shared] = weakref.WeakSet()
_pools_lock = threading.Lock()


def _all_shared() -> list[_Shared]:
    with _pools_lock:
        return list(_pools)


def _finish() -> None:
    """Tasks under way end before the interpreter does, as with ThreadPoolExecutor; but what hangs does not keep the process."""
    deadline = time.monotonic() + END_S
    pools = _all_shared()
    for shared in pools:
        shared.let_go()
    for shared in pools:
        if shared.alive and not shared.daemon:
            shared.empty.wait(max(0.0, deadline - time.monotonic()))


def _forget() -> None:
    """A forked child has none of the threads."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


atexit.register(_finish)
os.register_at_fork(after_in_child=_forget)
