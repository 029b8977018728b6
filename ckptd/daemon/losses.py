"""Snapshots that do not count, and why, where people look: the ranks' handles, health, the daemon's log (P15).

What keeps snapshots from being granted is the machine's to know. The ranks are told when it changes, so that ``snapshot()`` never
asks; in health it stands once it has lasted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ckptd.core.protocol.events import NO_MEMORY
from ckptd.core.protocol.machine.waiting import BUSY
from ckptd.daemon.services import Services, log
from ckptd.wire.complaints import Complaints
from ckptd.wire.rank import Health

if TYPE_CHECKING:
    from ckptd.daemon.local_slots import LocalSlots

LASTING_S = 5.0  # a cause that stands for less is a matter of a restart or a full queue
LOG_PERIOD_S = 600.0  # between two lines of the log about one cause; what came meanwhile is counted
KIND, NO_MEMORY_KIND = "waiting", "no_memory"
# A grant that comes back unused, in the client's words: as at nearly each end of a job, and no snapshot that was lost.
UNUSED = frozenset({"taken back", "the rank joins anew"})


class Losses:
    def __init__(self, services: Services, job: str, all_slots: LocalSlots) -> None:
        self._services, self._job, self._local_slots = services, job, all_slots
        self._said = Complaints(to=log, period_s=LOG_PERIOD_S)
        self.waits = ""  # why no snapshot is granted at the moment, and since when; "": one is
        self._cause, self._since, self._clock = "", 0.0, ""

    def look(self, text: str) -> None:
        """``text``: the machine's view of it (core/protocol/machine/waiting.py)."""
        cause = text.partition(":")[0]
        if cause != self._cause:
            self._cause, self._since = cause, self._services.now()
            self._clock = time.strftime("%H:%M:%S UTC", time.gmtime(self._services.wall()))
        self.waits = f"{text}, since {self._clock}" if text and cause != BUSY else text
        for own in self._local_slots.by_rank.values():
            if own.session is not None and own.told_waits != self.waits:
                own.told_waits = self.waits
                own.session.send(Health(0, True, [], {"waits": self.waits}))
        health = self._services.health
        lasting = self._services.now() - self._since >= LASTING_S
        known = cause == NO_MEMORY and health.has(NO_MEMORY_KIND, job=self._job)
        if cause in ("", BUSY) or known:
            health.clear(KIND, job=self._job)
        elif lasting:
            health.report(KIND, f"no snapshot is taken: {self.waits}", job=self._job)

    def lost(self, what: str, step: int, reason: str) -> None:
        """A line of the log per cause, then a count. ``what``: "skipped", "given up" or "void"."""
        which = f"snapshot of step {step}" if step >= 0 else "a grant before the first step"
        self.failed(what, reason.partition(":")[0], f"{which}: {reason}")

    def failed(self, what: str, cause: str, text: str) -> None:
        """The same of anything else that is tried again. ``cause``: nothing in it is another one with the next try."""
        self._said.say(f"job={self._job} {what}, {cause}", text)

    def close(self) -> None:
        self._said.close()
