"""A training loop and a node's snapshot traffic on one link, to close the control loop around: no clock but its own.

A step is computation, then an all-reduce over the link. Traffic that has been let go lies in the card's queue; while both want
the link each gets half of it, as two TCP flows would.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

from ckptd.core.pacing.bucket import BURST_S, Bucket
from ckptd.core.pacing.slowdown import ROW_S_MIN, Pacing
from ckptd.core.pacing.traffic import Traffic

CHUNK = 4 << 20  # unpaced, one send
QUEUE_BYTES = 1 << 20  # of the socket
ORDER_EVERY_S = 0.1
TAIL_S = 0.05


@dataclass
class Plant:
    tick_s: float = 0.001
    link_bytes_s: float = 40e6
    compute_s: float = 0.05
    reduce_bytes: float = 8e6
    noise: float = 0.01  # standard deviation of the computation's time, as a share of the whole step
    pause_every: int = 0  # each so many steps an evaluation of pause_s
    pause_s: float = 5.0
    capture_s: float = 0.0  # what a capture adds to its step
    capture_every: int = 1  # steps
    transfer_bytes: float = 40e6  # one copy
    rest_s: float = 2.0  # between two copies
    paced: bool = True
    seed: int = 1
    pacing: Pacing = field(default_factory=Pacing)
    now: float = 1000.0
    steps: list[float] = field(default_factory=list)  # seconds of each, without pauses
    sent: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._bucket, self._traffic = Bucket(self.now), Traffic()
        self._queue, self._left, self._rest_until = 0.0, 0.0, self.now + 10.0
        self._order_at, self._held, self._open = 0.0, False, 0
        self._asks_at = 0.0  # nothing is let go before
        self._row_began, self._row_steps, self._captured = 0.0, 0, False

    @property
    def rate(self) -> float | None:
        return self._bucket.rate

    def train(self, steps: int) -> list[float]:
        """Seconds of each of the next steps."""
        first = len(self.steps)
        for _ in range(steps):
            self._step()
        return self.steps[first:]

    def _step(self) -> None:
        began, whole = self.now, self.compute_s + self.reduce_bytes / self.link_bytes_s
        jitter = abs(self._random.gauss(0.0, self.noise)) * whole
        captures = self.capture_s > 0 and len(self.steps) % self.capture_every == 0
        end = self.now + self.compute_s + jitter + (self.capture_s if captures else 0.0)
        while self.now < end:
            self._tick(0.0)
        left = self.reduce_bytes
        while left > 0:
            left -= self._tick(left)
        self.steps.append(self.now - began)
        if self.pause_every and len(self.steps) % self.pause_every == 0:
            pause = self.now + self.pause_s
            while self.now < pause:
                self._tick(0.0)
        self._report(began, captures)

    def _report(self, began: float, captures: bool) -> None:
        """Short steps come several to a row, as the client sends them."""
        if not self._row_steps:
            self._row_began, self._captured = began, False
        self._row_steps += 1
        self._captured |= captures
        took = self.now - self._row_began
        if took >= ROW_S_MIN:
            kind = self._traffic.kind(self._row_began, self.now)
            line = self._traffic.line_bytes_s
            self.pacing.step("job/0", kind, took / self._row_steps, self.now, line, captured=self._captured)
            self._row_steps = 0

    def _tick(self, reduce_left: float) -> float:
        """What the all-reduce got of the link."""
        self._send()
        room = self.link_bytes_s * self.tick_s
        ours = min(self._queue, room / 2 if reduce_left > 0 else room)
        self._queue -= ours
        self.sent += ours
        self.now += self.tick_s
        return min(reduce_left, room - ours)

    def _send(self) -> None:
        """One send at a time; it returns when the queue has room again."""
        if self._open and self._queue < QUEUE_BYTES:
            self._traffic.ended(self.now, self._open, TAIL_S)
            self._open = 0
        if self._open or not self._wants() or self.now < self._asks_at:
            return
        self._ask_order()
        piece = self._bucket.slice(min(CHUNK, int(self._left) + 1))
        pause = ORDER_EVERY_S if self._held else self._bucket.take(self.now, piece)
        self._asks_at = self.now + min(pause, ORDER_EVERY_S)
        if pause == 0:
            self._traffic.began(self.now)
            self._queue += piece
            self._left -= piece
            self._open = piece

    def _wants(self) -> bool:
        if self._left <= 0 and self._queue <= 0:
            if self._rest_until < 0:
                self._rest_until = self.now + self.rest_s
            elif self.now >= self._rest_until:
                self._left, self._rest_until = self.transfer_bytes, -1.0
        return self._left > 0

    def _ask_order(self) -> None:
        if not self.paced or self.now - self._order_at < ORDER_EVERY_S:
            return
        self._order_at = self.now
        order = self.pacing.order(self.now, self.now, 0.0)
        self._held = order.held
        if order.rate != self._bucket.rate:
            self._bucket.set(self.now, order.rate, BURST_S)


def slowdown(steps: list[float], without: list[float]) -> float:
    """Of the mean step: what training pays."""
    return statistics.fmean(steps) / statistics.fmean(without) - 1.0
