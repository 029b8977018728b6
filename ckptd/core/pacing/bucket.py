"""A token bucket: so many bytes a second, no more than a burst at once, and a debt that is bounded by one request."""

from __future__ import annotations

SLICE_S = 0.02  # one send is worth this much of the rate, so that it spreads over a step instead of standing in its way
SLICE_BYTES_MIN = 4 * 1024
SLICE_BYTES_MAX = 1024 * 1024  # the longest that a paced send may hold the wire: 8 ms at 1 Gbit/s
BURST_S = 0.05  # unused tokens are kept for so long


class Bucket:
    """``rate``: bytes per second; None: everything may go at once. Times are seconds of any one clock.

    A request larger than the burst is let through when the bucket is full, and leaves a debt that later ones wait for; so the
    debt is never more than one request.
    """

    def __init__(self, now: float, rate: float | None = None, burst_s: float = BURST_S) -> None:
        self.rate, self._burst_s = rate, burst_s
        self._at = now
        self.tokens = self.burst_bytes

    @property
    def burst_bytes(self) -> float:
        return 0.0 if self.rate is None else max(float(SLICE_BYTES_MIN), self.rate * self._burst_s)

    def set(self, now: float, rate: float | None, burst_s: float = BURST_S) -> None:
        """Another rate from now on. Debts stay, what was saved beyond the new burst is gone."""
        self._refill(now)
        was_free, self.rate, self._burst_s = self.rate is None, rate, burst_s
        self.tokens = 0.0 if was_free else min(self.tokens, self.burst_bytes)

    def slice(self, nbytes: int) -> int:
        """How much of ``nbytes`` shall go as one piece."""
        if self.rate is None:
            return nbytes
        return min(nbytes, max(SLICE_BYTES_MIN, min(SLICE_BYTES_MAX, int(self.rate * SLICE_S))))

    def take(self, now: float, nbytes: int) -> float:
        """0: they may go, and are counted. Else nothing was taken, and seconds until it is worth asking again."""
        if self.rate is None:
            return 0.0
        self._refill(now)
        lacking = min(float(nbytes), self.burst_bytes) - self.tokens
        if lacking > 0:
            return lacking / self.rate
        self.tokens -= nbytes
        return 0.0

    def charge(self, nbytes: int) -> None:
        """They went without having been asked for; at most one burst of debt comes of it."""
        if self.rate is not None:
            self.tokens = max(self.tokens - nbytes, -self.burst_bytes)

    def _refill(self, now: float) -> None:
        if self.rate is not None:
            self.tokens = min(self.burst_bytes, self.tokens + max(0.0, now - self._at) * self.rate)
        self._at = now
