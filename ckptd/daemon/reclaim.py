"""Memory of jobs that are over, for whoever lacks it (D19, P8): in the order of core/protocol/life.py,
at once, one line of log each.

What storage holds of a job is asked at that moment: without an answer nothing of it goes. Other users' need takes no snapshot
within the owner's share (``user_budget``). Without any need, what has expired goes as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol.events import SpareAsked
from ckptd.core.protocol.life import Order
from ckptd.daemon.job import JobShell
from ckptd.daemon.services import Services, log

LOOK_S = 1.0  # how often it is looked for what has expired
ASK_AGAIN_S = 30.0  # storage did not have it, or did not answer: it is asked again after this
MIB = 1 << 20

WHY = {
    Order.RELEASED: "slots of ranks that are gone",
    Order.FINISHED_DURABLE: "finished and durable",
    Order.ORPHANED_DURABLE: "orphaned and durable",
    Order.FINISHED_UNSTORED: "finished, there is no storage",
    Order.ORPHANED_LAST: "orphaned for long",
}


class Reclaim:
    def __init__(self, services: Services, jobs: Mapping[str, JobShell]) -> None:
        self._services, self._jobs = services, jobs
        self._loop = asyncio.get_running_loop()
        self._needs: dict[int, int] = {}  # uid -> bytes that it could not get
        self._at_work = False
        self._looked_at = 0.0
        self._asked: dict[str, float] = {}  # job -> when storage was asked for one that has expired

    # --- somebody lacks memory ----------------------------------------------------------------------------------
    def short(self, uid: int, nbytes: int) -> None:
        """A request was refused. From any thread; whoever asked tries again by itself, or is told (``LocalSlots.grow``)."""
        self._loop.call_soon_threadsafe(self._short, uid, nbytes)

    def _short(self, uid: int, nbytes: int) -> None:
        self._needs[uid] = max(nbytes, self._needs.get(uid, 0))
        if not self._at_work:
            self._at_work = True
            self._services.spawn(self._relieve(), "reclaim memory")

    async def _relieve(self) -> None:
        try:
            while self._needs:
                uid, nbytes = self._needs.popitem()
                if await self._free(uid, nbytes):
                    for shell in list(self._jobs.values()):
                        shell.local_slots.grow()
        finally:
            self._at_work = False

    async def _free(self, uid: int, nbytes: int) -> int:
        """Bytes that came free, for this user, until there are enough."""
        freed = self._spared(uid)
        for order in Order:
            for shell in self._longest_over(order):
                if freed >= nbytes:
                    return freed
                freed += await self._take(shell, order, uid)
        return freed

    def _spared(self, uid: int) -> int:
        """What was kept for who only reads goes before anything that a restore may want: this user's alone."""
        mine = [shell for shell in self._jobs.values() if shell.uid == uid]
        before = sum(shell.memory_bytes() for shell in mine)
        for shell in mine:
            shell.reads.spare()
        return before - sum(shell.memory_bytes() for shell in mine)

    def _longest_over(self, order: Order) -> list[JobShell]:
        found = [shell for shell in self._jobs.values() if order in shell.machine.lifetime.orders()]
        return sorted(found, key=lambda shell: shell.machine.lifetime.life.since)

    # --- nobody comes for it ------------------------------------------------------------------------------------
    def tick(self) -> None:
        now = self._services.now()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._asked = {job: at for job, at in self._asked.items() if job in self._jobs and now - at < ASK_AGAIN_S}
        for job, shell in self._jobs.items():
            if job not in self._asked and (orders := shell.machine.lifetime.expired()):
                self._asked[job] = now
                self._services.spawn(self._expire(shell, orders), f"expire {job}")

    async def _expire(self, shell: JobShell, orders: tuple[Order, ...]) -> None:
        for order in orders:
            await self._take(shell, order, shell.uid)

    # --- one job ------------------------------------------------------------------------------------------------
    async def _take(self, shell: JobShell, order: Order, uid: int) -> int:
        """What it spares, in bytes; ``uid``: for whom."""
        durable: tuple[SnapshotId, ...] = ()
        if order.asks_storage:
            answer = await shell.durable.durable_now()
            if answer is None or shell.dropped:
                return 0
            durable = answer
        before, most = shell.memory_bytes(), self._most(shell, order, uid)
        shell.feed(SpareAsked(order, durable, None if most is None else shell.fitting(most)))
        shell.local_slots.drop_idle(most)
        shell.frozen.tidy()
        freed = before - shell.memory_bytes()
        if freed > 0:
            age, state = shell.machine.lifetime.age(self._services.now()), shell.machine.lifetime.life.state.value
            text = f"{WHY[order]}, {state} for {age:.0f} s: {freed / MIB:.1f} MiB released"
            self._services.metrics.reclaimed(WHY[order], freed)
            log.info("job=%s %s", shell.job, text if uid == shell.uid else f"{text} for uid {uid}")
        return freed

    def _most(self, shell: JobShell, order: Order, uid: int) -> int | None:
        """What may go for this user: of another one's snapshots only what lies beyond his share. None: all."""
        if uid == shell.uid or order is Order.RELEASED:
            return None
        arena = self._services.arena
        return max(0, arena.used_by(shell.uid) - arena.share_bytes)
