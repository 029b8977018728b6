"""What a store, or the way to it, may have got wrong once is asked for once more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def twice(wrong: type[Exception], ask: Callable[[], T]) -> T:
    """Raises ``wrong`` where the second answer is no better, and anything else at once."""
    with suppress(wrong):
        return ask()
    return ask()
