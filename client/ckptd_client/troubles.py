"""Why training is not protected at the moment: each kind of trouble is warned of once and named by health() (P5)."""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass, field
from typing import Any

from ckptd.core.grouped import SHOWN_MAX, grouped

SAID_MAX = 64  # different words of the daemon's that are passed on
CAUSES_MAX = 64  # for which snapshots did not count
REASON_CHARS_MAX, CUT = 200, " ..."  # of what the daemon is told of one of them

_CHANGING = re.compile(r" \[.*?\]|\d+")

log = logging.getLogger("ckptd")


def brief(reason: str) -> str:
    """For the daemon, cut between words where there are any."""
    if len(reason) <= REASON_CHARS_MAX:
        return reason
    begin, _, word = reason[: REASON_CHARS_MAX - len(CUT)].rpartition(" ")
    return (begin if len(begin) > len(word) else f"{begin} {word}".strip()) + CUT


@dataclass(frozen=True)
class HealthReport:
    """``ok``: nothing to worry about. ``problems``: sentences, ours and the daemon's. ``facts``: numbers."""

    ok: bool
    problems: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


class Troubles:
    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._now: dict[str, str] = {}
        self._warned: set[str] = set()
        self._said: set[str] = set()
        self._lost: dict[str, dict[str, Any]] = {}

    def report(self, kind: str, text: str) -> None:
        """Warns when this kind of trouble is new."""
        with self._lock:
            self._now[kind] = text
            new = kind not in self._warned
            self._warned.add(kind)
        if new:
            log.warning("ckptd job %s: %s", self._job, text)

    def pass_on(self, text: str, who: str = "the daemon says: ") -> None:
        """Warned of once, whatever its numbers are, and the place in brackets, which is another one with each try: what the daemon
        says is wrong with itself, and is the daemon's to keep."""
        words = _CHANGING.sub("#", text)
        with self._lock:
            new = words not in self._said and len(self._said) < SAID_MAX
            if new:
                self._said.add(words)
        if new:
            log.warning("ckptd job %s: %s%s", self._job, who, text)

    def clear(self, *kinds: str) -> None:
        with self._lock:
            over = [kind for kind in kinds if self._now.pop(kind, None) is not None]
            self._warned.difference_update(over)
        for kind in over:
            log.info("ckptd job %s: %s is over", self._job, kind)

    def lost(self, step: int, status: str) -> None:
        """This snapshot does not count. ``status``: its handle's, what became of it and the cause before the second colon."""
        cause = ":".join(status.split(":")[:2])
        with self._lock:
            before = self._lost.get(cause, {"count": 0})
            if before["count"] or len(self._lost) < CAUSES_MAX:
                self._lost[cause] = {"count": before["count"] + 1, "step": step, "status": status}

    def all_of(self, what: str, problems: list[str]) -> str:
        """For an error: ``problems`` by cause, as many as people read. All of them go to the log when there are more."""
        if len(problems) > SHOWN_MAX:
            log.error("ckptd job %s: %s, all %d:\n%s", self._job, what, len(problems), "\n".join(problems))
        return grouped(problems)

    def losses(self) -> dict[str, dict[str, Any]]:
        """Cause -> how often, and the newest: its step and status."""
        with self._lock:
            return {cause: dict(told) for cause, told in self._lost.items()}

    def problems(self) -> list[str]:
        with self._lock:
            return list(self._now.values())
