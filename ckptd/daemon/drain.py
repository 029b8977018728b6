"""`ckptd drain`: this node is to go, and hands away what only it holds (core/protocol/machine/leaving.py decides nothing else).

Asked through the rank socket, where the kernel says who asks (SO_PEERCRED). The status page could not know as well: it is TCP, the
caller's uid is read from /proc, and any web page may send a POST to it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ckptd.core.protocol import events as ev
from ckptd.daemon.job import JobShell
from ckptd.daemon.services import Services, log
from ckptd.observe.report import DrainJob, DrainReport
from ckptd.protect.settle import Answers
from ckptd.wire import rank as wire
from ckptd.wire.peer import DrainOrder, DrainReply
from ckptd.wire.rank_link import RankSession

ON, OFF, LOOK = "on", "off", "look"
JOBS_TOLD_MAX = 32  # so that the answer fits a frame
TEXTS_TOLD_MAX = 4  # reasons and snapshots of one job
PEER_ANSWER_TIMEOUT_S = 3.0
REQUESTS_MAX = 64


class Drain:
    """Forgotten with the process: a daemon that restarts stays."""

    def __init__(self, services: Services, jobs: Mapping[str, JobShell]) -> None:
        self._services, self._jobs = services, jobs
        self._on = False
        self._answers: Answers[dict[str, Any]] = Answers()

    # --- here ---------------------------------------------------------------------------------------------------
    def begin(self, who: str) -> None:
        if not self._on:
            log.info("draining asked_by=%s", who)
        self._on = True
        self.tick()

    def cancel(self, who: str) -> None:
        if self._on:
            log.info("draining called off asked_by=%s", who)
        self._on = False
        self.tick()

    def tick(self) -> None:
        """Also for jobs that came, or began anew, meanwhile."""
        for shell in list(self._jobs.values()):
            if shell.machine.leaving.going != self._on:
                shell.feed(ev.DrainAsked(self._on))

    def done(self) -> bool:
        return all(job["done"] for job in self._all_jobs())

    def tell_end(self) -> None:
        for job in self._all_jobs():
            if not job["done"]:
                log.warning("job=%s drained=no slots=%d bytes=%d", job["job"], job["slots"], job["bytes"])
        if self.done():
            log.info("drained: nothing on this node is needed any more")

    def report(self) -> DrainReport:
        return {"node": self._services.node.node, "draining": self._on, "jobs": self._all_jobs()[:JOBS_TOLD_MAX]}

    def _all_jobs(self) -> list[DrainJob]:
        """Those that hold something, the unfinished ones first."""
        held = [_job(name, shell) for name, shell in sorted(self._jobs.items()) if shell.machine.slots.sealed]
        return sorted(held, key=lambda job: job["done"])

    # --- who asks -----------------------------------------------------------------------------------------------
    def on_ask(self, session: RankSession, message: wire.DrainAsk) -> None:
        """Raises ValueError for what no `ckptd drain` says."""
        if message.want not in (ON, OFF, LOOK):
            raise ValueError("drain: on, off or look")
        if session.uid not in (0, os.geteuid()):
            where = f"uid {session.uid}"
            session.send(wire.Refused("only root and the daemon's own user may drain a node", where, "use sudo"))
        elif message.node in ("", self._services.node.node):
            self._obey(message.want, f"uid {session.uid}")
            session.send(_frame(self.report()))
        else:
            self._services.spawn(self._elsewhere(session, message), f"drain {message.node}")

    async def _elsewhere(self, session: RankSession, message: wire.DrainAsk) -> None:
        """Passed on to another daemon that this one has a link to."""
        if len(self._answers) >= REQUESTS_MAX:
            session.send(wire.Refused("too many questions to other nodes are open", message.node, "ask again"))
            return
        request = secrets.token_hex(8)
        try:
            with self._answers.to(_key(message.node, request)) as answer:
                self._services.send(message.node, "", DrainOrder(request, message.want))
                session.send(_frame(await asyncio.wait_for(answer, PEER_ANSWER_TIMEOUT_S)))
        except (asyncio.TimeoutError, TimeoutError):
            hint = "name a node of a job that this node is a member of, or run `ckptd drain` on that node"
            session.send(wire.Refused(wire.NO_ANSWER, message.node, hint))

    def on_message(self, node: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, DrainOrder):
            if message.want in (ON, OFF, LOOK):
                self._obey(message.want, node)
                self._services.send(node, "", DrainReply(message.request, dict(self.report())))
        elif isinstance(message, DrainReply):
            self._answers.came(_key(node, message.request), message.body)
        else:
            return False
        return True

    def _obey(self, want: str, who: str) -> None:
        if want == ON:
            self.begin(who)
        elif want == OFF:
            self.cancel(who)


def _key(node: str, request: str) -> str:
    """Only the node that was asked answers."""
    return f"{node} {request}"


def _job(name: str, shell: JobShell) -> DrainJob:
    said = shell.machine.leaving.view()
    return {
        "job": name,
        "leaving": said["leaving"],
        "known": said["known"],
        "done": said["known"] and not said["slots"],
        "slots": said["slots"],
        "bytes": said["bytes"],
        "stuck": said["stuck"],
        "reasons": said["reasons"][:TEXTS_TOLD_MAX],
        "falls": said["falls"][:TEXTS_TOLD_MAX],
    }


def _frame(body: Mapping[str, Any]) -> wire.DrainState:
    return wire.DrainState(str(body.get("node", "")), bool(body.get("draining")), list(body.get("jobs", [])))
