"""A machine that broke (an assertion of it failed, or worse) is made anew from what memory holds, as after a restart (P7).

Only its job notices: the ranks' connections are closed, and they come back to the new machine with the running epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.daemon.services import Services

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell

PAUSE_FIRST_S = 0.5  # before the new machine; doubled each time, in case the same happens again
PAUSE_MAX_S = 60.0


class Supervisor:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job
        self._due: float | None = None  # when the new machine begins; what happens until then is lost
        self._pause_s = PAUSE_FIRST_S

    def handle(self, event: ev.Event) -> list[ins.Instruction]:
        """What the machine says to it; nothing while there is none."""
        now = self._services.now()
        if self._due is not None:
            if now >= self._due and isinstance(event, ev.Tick):
                self._begin()
            return []
        try:
            return self._job.machine.handle(event, now)
        except Exception as error:
            self._services.went_wrong(f"the machine of {self._job.job} at {type(event).__name__}", error, self._job.job)
            self._due, self._pause_s = now + self._pause_s, min(2 * self._pause_s, PAUSE_MAX_S)
            self._job.let_go()
            return []

    def _begin(self) -> None:
        job = self._job
        self._due = None
        job.let_go()  # ranks that came while there was no machine said so to nobody
        job.machine = JobMachine(job.job, self._services.node, self._services.policy)
        job.begin()
        for slot in job.freed_for_revival():
            job.adopt(slot)
