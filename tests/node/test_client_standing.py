"""Is a thread still in the call that it was in, and does it work there? (P1)"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

import pytest
from ckptd_client import standing

from tests.waiting import until


@pytest.mark.parametrize("works", [True, False])
def test_a_writer_that_gets_no_processor_is_no_sleeper(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """Of a write under way that had got next to nothing of a processor in 0.2 s it was said that it is over, and the
    snapshot was torn."""
    monkeypatch.setattr(standing, "BUSY_MIN", 10.0)  # more than there is
    monkeypatch.setattr(standing, "OBSERVED_MIN_S", 0.0)
    over, there = threading.Event(), threading.Event()

    def work() -> None:
        there.set()
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 3_000_000)  # one call without the GIL, for a second or more

    def sleep() -> None:
        there.set()
        over.wait()

    call: Callable[[], None] = work if works else sleep
    thread = threading.Thread(target=call)
    thread.start()
    there.wait()
    assert thread.ident is not None
    ident, seen = thread.ident, []

    def same_call() -> bool:
        then = standing.standing(ident)
        assert then is not None
        time_s = time.monotonic() + 0.02
        until(lambda: time.monotonic() > time_s)
        seen.append(standing.may_be_in_the_same_call(then))
        return seen[-1] is works

    until(same_call)
    over.set()
    thread.join()
