"""Python looks for garbage in cycles the more often, the more objects are made. A large state makes a million small ones that live
on: half of a restore of 20,000 tensors was that search, which found nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def searched_later() -> Iterator[None]:
    """For work of a second or so, not for waits: other threads make garbage, too."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
