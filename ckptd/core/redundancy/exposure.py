"""How long a job stands without the protection that is wanted: time to full protection, of snapshots and of repairs (P2, P3).

Told what is certified, as a node hears it. *snapshot*: from complete to protected, for each one that gets there itself.
*repair*: from the moment at which nothing is protected any more, after something was, until something is again, be it the same
snapshot or a newer one.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.ids import SnapshotId

SNAPSHOT, REPAIR = "snapshot", "repair"
CAUSES = (SNAPSHOT, REPAIR)
TRACKED_MAX = 64  # snapshots


class Exposure:
    def __init__(self) -> None:
        self._rising: dict[SnapshotId, float] = {}  # complete, not protected yet -> since
        self._good: set[SnapshotId] = set()  # protected now
        self._fell_at: float | None = None
        self._began_at: float | None = None  # the first complete one, before anything was protected

    def told(
        self, snapshot: SnapshotId, level: int, wanted: int, now: float, *, counts: bool = True
    ) -> list[tuple[str, float]]:
        """What ended: (cause, seconds). counts: it may be restored (not void, of this lineage, its memory not released)."""
        ended: list[tuple[str, float]] = []
        if not counts or level < 0:
            self._gone(snapshot, now)
        elif wanted <= 0:  # nobody is left to hold a copy: nothing to wait for
            self._rising.pop(snapshot, None)
            self._good.discard(snapshot)
            self._fell_at = self._began_at = None
        elif level < wanted:
            self._lower(snapshot, now)
        else:
            ended = self._reached(snapshot, now)
        self._shrink()
        return ended

    def forget(self, is_gone: Callable[[SnapshotId], bool], now: float) -> None:
        """Their memory went for a newer one, or the lineage ended."""
        for snapshot in [s for s in (*self._good, *self._rising) if is_gone(s)]:
            self._gone(snapshot, now)

    def unprotected_s(self, now: float) -> float:
        """For how long nothing has had the protection that is wanted, since something did or since the first complete snapshot;
        0.0: something has it, or none is wanted."""
        since = self._fell_at if self._fell_at is not None else self._began_at
        return 0.0 if since is None else now - since

    def _reached(self, snapshot: SnapshotId, now: float) -> list[tuple[str, float]]:
        since = self._rising.pop(snapshot, None if snapshot in self._good else now)
        ended = [(SNAPSHOT, now - since)] if since is not None and self._fell_at is None else []
        if self._fell_at is not None:  # the time since then is the repair's
            ended.append((REPAIR, now - self._fell_at))
        self._good.add(snapshot)
        self._fell_at = self._began_at = None
        for older in [s for s in self._rising if s < snapshot]:
            del self._rising[older]  # nothing waits for it any more
        return ended

    def _lower(self, snapshot: SnapshotId, now: float) -> None:
        if snapshot in self._good:
            self._gone(snapshot, now)
            return
        self._rising.setdefault(snapshot, now)
        if not self._good and self._fell_at is None and self._began_at is None:
            self._began_at = now

    def _gone(self, snapshot: SnapshotId, now: float) -> None:
        self._rising.pop(snapshot, None)
        if snapshot not in self._good:
            return
        self._good.discard(snapshot)
        if not self._good and self._fell_at is None:
            self._fell_at = now

    def _shrink(self) -> None:
        while len(self._rising) > TRACKED_MAX:
            del self._rising[min(self._rising)]
        while len(self._good) > TRACKED_MAX:
            self._good.discard(min(self._good))
