"""Sending inside the communication-free spans of a step (GEMINI, SOSP '23, section 5.2 and algorithm 2).

Spans are (begin, end) in seconds from the begin of the step. What the rank marked as communication in some steps becomes the
gaps that were free in all of them; the gaps become an allotment of bytes each.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PROFILE_STEPS = 20  # as many as GEMINI's code profiles
PROFILE_STEPS_MIN = 8
SPANS_MAX = 64  # of one step; more are merged by the client
GAP_S_MIN = 0.010  # shorter gaps are not worth a wake-up (GEMINI's code: 10 ms)
GAMMA = 0.8  # share of a gap that is used: gaps vary (normalised deviation below 10 % in the paper)
ALPHA_S = 0.001  # start-up of one transfer
PHASE_STEPS_MAX = 4.0  # the begin of a step is carried forward over so many steps without news

Span = tuple[float, float]


def partition(
    spans: Sequence[float],
    nbytes: int,
    remote_copies: int,
    chunk: int,
    alpha_s: float,
    bytes_s: float,
    gamma: float,
) -> list[tuple[int, int]]:
    """Algorithm 2: chunks of ``nbytes`` bytes for each of the copies, as (index of the idle span, bytes), in order.

    spans: lengths of the idle spans in seconds, to which one without end is added: what does not fit goes at the end of the
    step (index len(spans)). chunk: R/p, the buffer of one transfer. A transfer of s bytes takes alpha + s / B seconds, and
    gamma of a span may be used. The published code ends never when a span is shorter than alpha; here it is left empty.
    """
    out: list[tuple[int, int]] = []
    left, copy = nbytes, 0
    if nbytes <= 0 or remote_copies <= 0:
        return out
    for index, span in enumerate([*spans, math.inf]):
        usable = gamma * span
        while usable > 0:
            fits = chunk if usable >= alpha_s + chunk / bytes_s else max(0, int((usable - alpha_s) * bytes_s))
            size = min(left, fits)
            if size <= 0:
                break
            left -= size
            usable -= alpha_s + size / bytes_s
            out.append((index, size))
            if left == 0:
                copy += 1
                if copy == remote_copies:
                    return out
                left = nbytes
    raise AssertionError("the last span has no end")


def gaps(steps: Iterable[tuple[float, Sequence[Span]]]) -> list[Span]:
    """What is free in all of the steps (seconds of the step, its communication), gap by gap: later begin, earlier end. Only the
    steps with the most usual number of gaps count."""
    free = [_complement(length, spans) for length, spans in steps]
    if not free:
        return []
    usual, _ = Counter(map(len, free)).most_common(1)[0]
    alike = [row for row in free if len(row) == usual]
    found = [(max(g[0] for g in column), min(g[1] for g in column)) for column in zip(*alike, strict=True)]
    return [(begin, end) for begin, end in found if end - begin > GAP_S_MIN]


def _complement(length: float, spans: Sequence[Span]) -> list[Span]:
    found, at = [], 0.0
    for begin, end in sorted(spans):
        if begin - at > GAP_S_MIN:
            found.append((at, min(begin, length)))
        at = max(at, end)
    if length - at > GAP_S_MIN:
        found.append((at, length))
    return found


@dataclass
class Schedule:
    """The gate of one node: how many bytes may go at a time, none outside of the gaps.

    A step's allotment is what algorithm 2 puts into its gaps when there is always more to send; the rest waits for the next
    step instead of prolonging this one (the paper's "lower f to amortise").
    """

    rows: deque[tuple[float, tuple[Span, ...]]] = field(default_factory=lambda: deque(maxlen=PROFILE_STEPS))
    begin: float = 0.0  # of the newest step that is known
    period_s: float = 0.0
    gaps: list[Span] = field(default_factory=list)
    _used: dict[int, int] = field(default_factory=dict)
    _turn: float = -1.0

    def observe(self, begin: float, length: float, spans: Sequence[Span]) -> None:
        """A step ended, and the next began, at ``begin + length``."""
        self.rows.append((length, tuple(spans)))
        self.begin = begin + length
        self.period_s = sorted(row[0] for row in self.rows)[len(self.rows) // 2]
        self.gaps = gaps(self.rows) if len(self.rows) >= PROFILE_STEPS_MIN else []

    def known(self, now: float) -> bool:
        """Is there a profile, and do we still know where in a step we are?"""
        return bool(self.gaps) and 0 <= now - self.begin < PHASE_STEPS_MAX * self.period_s

    def capacity_bytes_s(self, bytes_s: float) -> float:
        """What the gaps carry, averaged over a step."""
        return (
            sum(self._allotted(gap, bytes_s) for gap in self.gaps) / self.period_s if self.period_s else 0.0
        )

    def allows(self, now: float, bytes_s: float) -> tuple[int, float]:
        """(bytes that may go now, seconds until more may)."""
        phase = (now - self.begin) % self.period_s
        turn = now - phase
        if abs(turn - self._turn) > self.period_s / 2:
            self._turn, self._used = turn, {}
        for index, (begin, end) in enumerate(self.gaps):
            left = self._allotted((begin, end), bytes_s) - self._used.get(index, 0)
            if phase < begin:
                return 0, begin - phase
            if phase < begin + GAMMA * (end - begin) and left > 0:
                return left, 0.0
        return 0, self.period_s - phase + self.gaps[0][0]

    def took(self, now: float, nbytes: int) -> None:
        phase = (now - self.begin) % self.period_s
        for index, (begin, end) in enumerate(self.gaps):
            if begin <= phase < end:
                self._used[index] = self._used.get(index, 0) + nbytes

    @staticmethod
    def _allotted(gap: Span, bytes_s: float) -> int:
        return max(0, int((GAMMA * (gap[1] - gap[0]) - ALPHA_S) * bytes_s))
