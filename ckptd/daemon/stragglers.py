"""Ranks that have not called snapshot() within some steps of the others: nothing is captured until they do (D9)."""

from __future__ import annotations

from ckptd.daemon.services import Services

BEHIND_STEPS_MAX = 2  # that much is a matter of when each rank's word arrives
LOOK_EVERY_S = 1.0
KIND = "behind"
NAMED_MAX = 16  # ranks in one text


class Stragglers:
    """Looks at what the steward knows of all ranks; on other nodes it knows nothing and says nothing."""

    def __init__(self, services: Services, job: str) -> None:
        self._services, self._job = services, job
        self._looked_at = -1e9
        self._before: frozenset[int] = frozenset()

    def look(self, progress: dict[int, int]) -> None:
        """``progress``: rank -> newest step. A rank is named when it was behind at two looks in a row."""
        now = self._services.now()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        newest = max(progress.values(), default=-1)
        behind = frozenset(rank for rank, step in progress.items() if newest - step > BEHIND_STEPS_MAX)
        lasting, self._before = sorted(behind & self._before), behind
        if lasting:
            shown = ", ".join(f"{rank} (step {max(progress[rank], 0)})" for rank in lasting[:NAMED_MAX])
            more = f" and {len(lasting) - NAMED_MAX} more" if len(lasting) > NAMED_MAX else ""
            text = f"ranks behind the others, which are at step {newest}: {shown}{more}; does each call snapshot()?"
            self._services.health.report(KIND, text, job=self._job)
        else:
            self._services.health.clear(KIND, job=self._job)
