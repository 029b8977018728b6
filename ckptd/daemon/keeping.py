"""Undoing a ``keep``, for any process of the job's user: its checkpoint may go with the next retention, which is begun at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.daemon.services import Services, log
from ckptd.persist.keeping import release
from ckptd.wire import rank as wire
from ckptd.wire.rank_link import RankSession

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell


class Keeping:
    def __init__(self, services: Services, job: JobShell) -> None:
        self._services, self._job = services, job

    def on_ask(self, session: RankSession, message: wire.Release) -> None:
        """The session's user is the job's: it was named under his id when he said Hello."""
        self._services.spawn(self._answer(session, message), f"release of step {message.step} of {self._job.job}")

    async def _answer(self, session: RankSession, message: wire.Release) -> None:
        try:
            outcome = await self._released(session, message)
            said = wire.Released(message.request, outcome)
        except CkptdError as error:
            said = wire.Released(message.request, "", error.what, error.where, error.hint)
        except OSError as error:
            said = wire.Released(message.request, "", str(error), self._job.job)
        session.send(said)

    async def _released(self, session: RankSession, message: wire.Release) -> str:
        storage, step, job = self._services.storage, message.step, self._job.job
        if storage is None:
            hint = "without a storage root nothing is kept (ckptd run --storage-root DIR)"
            raise CkptdError("this daemon has no storage", where=self._services.node.node, hint=hint)
        coming = self._coming(session, message)  # before the look at storage: it may be there a moment later
        outcome = await self._services.listed(release, storage, job, step, self._job.record, coming)
        if outcome == wire.RELEASED:
            log.info("job=%s step=%d is kept no more, says pid %d", job, step, session.pid)
            self._job.durable.retain()
        return outcome

    def _coming(self, session: RankSession, message: wire.Release) -> dict[SnapshotId, bool]:
        """What this node holds of the step; and what the rank has captured, which may still be on its way here."""
        found: dict[SnapshotId, bool] = {}
        records = [slot.record for slot in self._services.arena.slots.values() if slot.tenant.job == self._job.job]
        for record in records:
            if record is not None and record.snapshot.step == message.step:
                at = SnapshotId(*record.snapshot.at)
                found[at] = found.get(at, False) or record.keep
        ours = self._job.record
        if ours is not None and message.epoch == ours.number and self._job.local_slots.of_session(session) is not None:
            found[SnapshotId(message.epoch, message.step)] = True
        return found
