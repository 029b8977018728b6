"""Blocking code in simulated time: what a daemon's thread does with storage, one step after the other, between everything else.

The real code of ckptd/persist runs in a coroutine of its own, which costs a hundredth of a thread's turn: a step waits until the
simulated clock has come to it. A daemon that dies between two steps ends its coroutines there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.store import Store

STOPPED_S = 0.05  # until a stopped process is looked at again


class Killed(BaseException):
    """Its process is gone: nothing may catch it, nothing may still be done."""


class Steps:
    """One call. ``done``: hears its result, or the exception that it ended with, if its daemon still lives."""

    def __init__(
        self, host: Host, call: Callable[[], Any], done: Callable[[Any, Exception | None], None]
    ) -> None:
        self._host, self._life, self._store = host, host.life, host.world.store
        self._call, self._done = call, done
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self.dead = False
        self._coroutine = greenlet(self._run)

    def start(self) -> None:
        self._store.steps.add(self)
        self._go()

    def wait(self, seconds: float) -> None:
        """Of this coroutine, until the clock has come to it. Raises Killed."""
        if not self.dead:
            self._host.world.clock.after(seconds, self._resume)
            self._coroutine.parent.switch()
        if self.dead:
            raise Killed

    def end(self) -> None:
        """The world ends."""
        self.dead = True
        self._go()

    def _resume(self) -> None:
        if self._ended:
            return
        if self._host.life == self._life and self._host.paused:
            self._host.world.clock.after(STOPPED_S, self._resume)
            return
        self.dead = self._host.life != self._life
        self._go()

    def _go(self) -> None:
        """Let it run until it waits again, or ends."""
        self._store.running = self
        self._coroutine.switch()
        self._store.running = None
        if self._ended:
            self._store.steps.discard(self)
            if isinstance(self._error, Exception) and not isinstance(self._error, AssertionError):
                self._done(None, self._error)
            elif self._error is None:
                self._done(self._result, None)
            elif not isinstance(self._error, Killed):
                raise self._error

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._ended = True


def end_all(store: Store) -> None:
    for steps in list(store.steps):
        steps.end()
