"""Simulated time: callbacks in the order of their moments, equal moments in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

AT_ONE_MOMENT_MAX = 20_000  # callbacks; more is a machine that goes round in a circle


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.events = 0

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, call, args))

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> bool:
        """Until that moment, or until ``enough`` (asked now and then) says so: True."""
        heap, since, moment = self._heap, self.events, self.now
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            if self.now > moment:
                since, moment = self.events, self.now
            assert self.events - since < AT_ONE_MOMENT_MAX, f"P14 going round in a circle at {self.now:.3f} s"
            self.events += 1
            call(*args)
            if enough is not None and not self.events & 63 and enough():
                return True
        self.now = max(self.now, until)
        return enough is not None and enough()
