"""Why training is not protected at the moment: each kind of trouble is warned of once and named by health() (P5)."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

SAID = "daemon's problems"  # the kind of what the daemon says is wrong with itself

log = logging.getLogger("ckptd")


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

    def report(self, kind: str, text: str) -> None:
        """Warns when this kind of trouble is new."""
        with self._lock:
            self._now[kind] = text
            new = kind not in self._warned
            self._warned.add(kind)
        if new:
            log.warning("ckptd job %s: %s", self._job, text)

    def clear(self, kind: str) -> None:
        with self._lock:
            if self._now.pop(kind, None) is None:
                return
            self._warned.discard(kind)
        log.info("ckptd job %s: %s is over", self._job, kind)

    def problems(self) -> list[str]:
        """Ours: what the daemon said while we waited is its own, and it is asked for it."""
        with self._lock:
            return [text for kind, text in self._now.items() if kind != SAID]
