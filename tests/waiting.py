"""Waiting in tests: on a condition, never on a number of seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_S = 0.01


def until(predicate: Callable[[], object], timeout: float = 30.0, what: str = "") -> object:
    """Return the predicate's first true value. Raises AssertionError naming ``what`` after ``timeout`` seconds."""
    pause = threading.Event()
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        pause.wait(POLL_S)
