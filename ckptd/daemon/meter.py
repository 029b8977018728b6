"""What this node measures of a job, and the answer to "if it failed now": steps lost, seconds to restore (outlook.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.rates import CAPTURE, ENCODING, REPLICA, SEAL, Pace, Rates
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.situation import by_levels, situation, trained
from ckptd.core.redundancy.exposure import Exposure
from ckptd.core.redundancy.outlook import FAILURES, Outlook, left, outlooks
from ckptd.daemon.services import Services
from ckptd.observe.report import OutlookReport

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

PEAKS_MAX = 8  # newest moments at which a class of failure got a newer step to come back to
SECONDS_MAX = 1e9  # that a rank says something took: thirty years


def check_seconds(*told: float) -> None:
    """Raises ValueError for what no clock of a rank has measured: it is computed with on pages that everybody reads (D20)."""
    if not all(0.0 <= seconds <= SECONDS_MAX for seconds in told):
        raise ValueError(f"seconds that nobody measured: {told}")


class Meter:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self.rates, self._pace, self._exposure = Rates(), Pace(), Exposure()
        self._steps: dict[str, int] = {}  # failure -> step to come back to, when it was last looked at
        self._peaks: dict[str, deque[int]] = {}

    # --- measuring ----------------------------------------------------------------------------------------------
    def captured(self, nbytes: int, capture_s: float, seal_s: float) -> None:
        self.rates.moved(CAPTURE, nbytes, capture_s)
        self.rates.moved(SEAL, nbytes, seal_s)

    def replicated(self, nbytes: int, seconds: float) -> None:
        self.rates.moved(REPLICA, nbytes, seconds)

    def encoded(self, nbytes: int, seconds: float) -> None:
        self.rates.moved(ENCODING, nbytes, seconds)

    def decided(self, seconds: float) -> None:
        self.rates.decided(seconds)

    def restored(self, nbytes: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        self.rates.restored(nbytes, seconds)

    def stepped(self, step: int) -> None:
        """A local rank called snapshot() for this step."""
        self._pace.stepped(step, self._services.now())

    @property
    def step_s(self) -> float | None:
        """Seconds of one training step; None: not two steps yet."""
        return self._pace.seconds

    def begin(self) -> None:
        """A new epoch."""
        self._pace.restart()
        self._steps.clear()
        self._exposure.forget(self._is_gone, self._services.now())

    def told(self, do: ins.TellLevel) -> None:
        """What is certified of a snapshot has changed."""
        now, counts = self._services.now(), not do.void and not self._is_gone(do.snapshot)
        for cause, seconds in self._exposure.told(do.snapshot, do.level, do.wanted, now, counts=counts):
            self._services.metrics.protected_after(self._job.job, cause, seconds)
        self._exposure.forget(self._is_gone, now)
        self._look()

    def _look(self) -> None:
        """How far had training come when a newer step took the place of an older one? By levels, as this is asked often."""
        points = by_levels(self._job.machine)
        for failure in FAILURES:
            found = left(points, failure, "")
            step, before = found.snapshot.step if found is not None else -1, self._steps.get(failure, -1)
            if 0 <= before < step:
                peaks = self._peaks.setdefault(failure, deque(maxlen=PEAKS_MAX))
                peaks.append(max(0, trained(self._job.machine, points) - before))
            self._steps[failure] = step

    def _is_gone(self, snapshot: SnapshotId) -> bool:
        job = self._job
        return (
            snapshot in job.machine.levels.released
            or job.record is None
            or not job.record.is_candidate(snapshot)
        )

    # --- telling ------------------------------------------------------------------------------------------------
    def outlook(self) -> list[OutlookReport]:
        """One row per class of failure; none before the first epoch."""
        if self._job.record is None:
            return []
        return [self._report(outlook) for outlook in outlooks(situation(self._job.machine), self.rates)]

    def unprotected_s(self) -> float:
        return self._exposure.unprotected_s(self._services.now())

    def _report(self, outlook: Outlook) -> OutlookReport:
        worst = max([outlook.lost_steps, *self._peaks.get(outlook.failure, ())])
        estimate, step_s = outlook.estimate, self.step_s
        report: OutlookReport = {
            "failure": outlook.failure,
            "victim": outlook.victim,
            "exact": outlook.exact,
            "step": outlook.step,
            "source": outlook.source,
            "lost_steps": outlook.lost_steps,
            "lost_steps_worst": worst,
            "move_bytes": outlook.move_bytes,
            "phases": {phase: round(seconds, 6) for phase, seconds in estimate.phases.items()},
            "basis": list(estimate.basis),
            "not_measured": list(estimate.missing),
        }
        if step_s is not None:
            report["lost_s"] = round(outlook.lost_steps * step_s, 3)
            report["lost_s_worst"] = round(worst * step_s, 3)
        if estimate.seconds is not None:
            report["restore_s"] = round(estimate.seconds, 6)
        return report
