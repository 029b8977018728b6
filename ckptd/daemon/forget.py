"""`ckptd forget JOB`: the operator's word that a job that is over shall leave nothing, here and on its other nodes (D19).

Asked through the rank socket, as `ckptd drain` is: the kernel says who asks. A node that does not answer forgets when it comes
back: the tombstones of the others tell it (daemon/graveyard.py).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.events import ForgetOrdered
from ckptd.core.protocol.life import Tombstone
from ckptd.daemon.graveyard import Graveyard
from ckptd.daemon.job import JobShell
from ckptd.daemon.services import Services, log
from ckptd.persist.forget import forget_on_storage
from ckptd.persist.lineage import highest_epoch, newest_record
from ckptd.persist.names import check_job
from ckptd.protect.settle import Answers, ask
from ckptd.wire import rank as wire
from ckptd.wire.peer import ForgetOrder, ForgetReply
from ckptd.wire.rank_link import RankSession

PEER_ANSWER_TIMEOUT_S = 3.0
REQUESTS_MAX, REQUESTS_PER_USER_MAX = 64, 4  # orders under way
Refusal = tuple[str, float]  # why, and for how many seconds; 0: until its ranks are stopped
RUNS_HINT = "stop its ranks first; `ckptd status` shows it as orphaned or finished then"


class Forget:
    def __init__(self, services: Services, jobs: Mapping[str, JobShell], graveyard: Graveyard) -> None:
        self._services, self._jobs, self._graveyard = services, jobs, graveyard
        self._answers: Answers[ForgetReply] = Answers()
        self._under_way: Counter[int] = Counter()  # by user

    def on_ask(self, session: RankSession, message: wire.ForgetAsk) -> None:
        try:
            job = check_job(message.job if "/" in message.job else f"{session.uid}/{message.job}")
        except CkptdError:
            session.send(wire.Refused("not a job's name", message.job[:120], "name it as `ckptd status` does: NAME or UID/NAME"))
            return
        if session.uid not in (0, os.geteuid(), int(job.partition("/")[0])):
            where = f"uid {session.uid}"
            session.send(wire.Refused("only its owner, root and the daemon's own user may forget a job", where, "use sudo"))
        elif sum(self._under_way.values()) >= REQUESTS_MAX or self._under_way[session.uid] >= REQUESTS_PER_USER_MAX:
            session.send(wire.Refused("too many orders are under way", job, "ask again"))
        else:
            self._under_way[session.uid] += 1
            self._services.spawn(self._answer(session, job, message.storage), f"forget {job}")

    async def _answer(self, session: RankSession, job: str, storage: bool) -> None:
        try:
            session.send(await self._forget(job, storage, f"uid {session.uid}"))
        except CkptdError as error:
            session.send(wire.Refused(error.what, error.where, error.hint))
        finally:
            self._under_way[session.uid] -= 1
            self._under_way += Counter()  # who has none is not kept

    async def _forget(self, job: str, storage: bool, who: str) -> wire.Forgotten:
        """All nodes are asked before any of them forgets. Raises CkptdError."""
        epoch = await self._epoch(job, storage)
        nodes = await self._others(job)
        await self._order(job, epoch, nodes, look=True)
        deleted = 0
        if storage and self._services.storage is not None:
            on_flush = asyncio.get_running_loop().run_in_executor
            epoch, deleted = await on_flush(self._services.flush, forget_on_storage, self._services.storage, job, epoch)
        told, silent = await self._order(job, epoch, nodes, look=False)
        self._here(job, epoch)
        if job not in self._jobs:
            self._services.release(job)
        log.info("job=%s forgotten asked_by=%s storage=%s silent=%s", job, who, storage, " ".join(silent) or "none")
        if not self._graveyard.write():
            raise CkptdError("it is forgotten, but that is not written down", where=str(self._services.state.path),
                             hint="free space there: a restart of the daemon might bring it back")  # fmt: skip
        return wire.Forgotten(self._services.node.node, job, epoch, silent, deleted, [self._services.node.node, *told])

    async def _epoch(self, job: str, storage: bool) -> int:
        """The highest that is known of it. Raises CkptdError: there is no such job."""
        shell = self._jobs.get(job)
        known = max(self._graveyard.of(job).epoch, shell.machine.lifetime.newest() if shell is not None else 0)
        if storage and self._services.storage is None:
            raise CkptdError("this daemon has no storage", where=job, hint="leave out --storage, or ask a node that has one")
        if self._services.storage is not None and (storage or not known):
            known = max(known, await self._services.on_disk(highest_epoch, self._services.storage, job))
        if not known and (shell is None or not shell.all_slots()):
            raise CkptdError("no such job is known here", where=job, hint="`ckptd status` and `ckptd ls` show those that are")
        return known

    def _refusal(self, job: str, epoch: int) -> Refusal:
        shell = self._jobs.get(job)
        if shell is None:
            return "", 0.0
        lifetime = shell.machine.lifetime
        return (f"epoch {newest} has begun", 0.0) if (newest := lifetime.newest()) > epoch else lifetime.refusal()

    def _here(self, job: str, epoch: int) -> None:
        shell = self._jobs.get(job)
        if shell is not None:
            shell.feed(ForgetOrdered(epoch))
        else:
            self._graveyard.add(job, Tombstone(epoch, epoch).over(self._graveyard.of(job)))

    # --- the job's other nodes ----------------------------------------------------------------------------------
    async def _others(self, job: str) -> list[str]:
        """As we know them, else as storage does: a node that never had the job may be asked as well."""
        shell, services = self._jobs.get(job), self._services
        record = shell.record if shell is not None else None
        if record is None and services.storage is not None:
            with suppress(CkptdError):  # Its record is damaged: to forget it is a way out of that.
                record = await services.on_disk(newest_record, services.storage, job)
        known = self._graveyard.nodes.get(job, ())
        known += (*record.nodes, *record.holders) if record is not None else ()
        if shell is None:
            for info in known:
                services.connect(info, job)
        return [node for node in dict.fromkeys(info.node for info in known) if node != services.node.node]

    async def _order(self, job: str, epoch: int, nodes: list[str], *, look: bool) -> tuple[list[str], list[str]]:
        """Nodes that answer, and that do not. Raises CkptdError: others, or we, refuse."""
        answers = await asyncio.gather(*(self._ask(node, job, epoch, look) for node in nodes))
        told = list(zip(nodes, answers, strict=True))
        refused = [(f"{node}: {reply.reason}", reply.wait_s) for node, reply in told if reply is not None and reply.reason]
        if (own := self._refusal(job, epoch))[0]:
            refused.insert(0, own)
        if refused:
            waits = 1 + int(max(wait_s for _, wait_s in refused))
            hint = RUNS_HINT if any(not wait_s for _, wait_s in refused) else f"ask again in {waits} s, if no rank starts"
            what = "the job is not over" if look else "a start of it came while it was being forgotten, and goes on"
            raise CkptdError(f"{what}: {'; '.join(why for why, _ in refused)}", where=job, hint=hint)
        return [node for node, reply in told if reply is not None], [node for node, reply in told if reply is None]

    async def _ask(self, node: str, job: str, epoch: int, look: bool) -> ForgetReply | None:
        """None: no answer."""
        order = ForgetOrder(secrets.token_hex(8), epoch, look)
        with self._answers.to(f"{node} {order.request}") as answer:
            came = await ask(lambda: self._services.send(node, job, order), [answer], PEER_ANSWER_TIMEOUT_S)
            return answer.result() if came else None

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, ForgetOrder):
            why, wait_s = self._refusal(job, message.epoch)
            if not why and not message.look:
                self._here(job, message.epoch)
            self._services.send(node, job, ForgetReply(message.request, why, wait_s))
        elif isinstance(message, ForgetReply):
            self._answers.came(f"{node} {message.request}", message)
        else:
            return False
        return True
