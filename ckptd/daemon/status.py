"""What `ckptd status` and `ckptd ls` show: this node and, through it, the jobs' other nodes."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, cast

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.life import Life
from ckptd.daemon.job import JobShell
from ckptd.daemon.services import Services
from ckptd.observe.http import Routes
from ckptd.observe.report import (
    ListReport,
    MemoryReport,
    PacingReport,
    RankReport,
    SnapshotReport,
    StatusReport,
)
from ckptd.observe.sight import Sight
from ckptd.persist.commits import list_stored
from ckptd.wire.peer import StatusAsk, StatusReply

PEER_ANSWER_TIMEOUT_S = 1.0
REQUESTS_MAX = 256
ALL_JOBS = ""
RANKS_TOLD_MAX = 1024  # of one job, to a peer


class Status:
    def __init__(
        self, services: Services, jobs: Mapping[str, JobShell], peers_up: Callable[[], Mapping[str, bool]]
    ) -> None:
        self._services, self._jobs, self._peers_up = services, jobs, peers_up
        self._started = services.now()
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def routes(self) -> Routes:
        health, metrics = self._services.health, self._services.metrics
        return Routes(
            metrics=self._metrics(metrics.render),
            health=lambda sight: health.to_dict(sight),
            status=self.status,
            ls=self.ls,
        )

    def _metrics(self, render: Callable[[Sight], bytes]) -> Callable[[Sight], bytes]:
        def fresh(sight: Sight) -> bytes:
            for job, shell in self._jobs.items():
                summary = shell.summary()
                self._services.metrics.lag(job, summary.get("lag", {}))
                self._services.metrics.degradation(job, summary.get("degradation", 0))
                self._services.metrics.outlook(job, shell.meter.outlook(), summary.get("unprotected_s", 0.0))
                self._services.metrics.ranks(job, sum(1 for s in shell.local_slots.by_rank.values() if s.session))
            lives = [shell.machine.lifetime.life.state for shell in self._jobs.values()]
            self._services.metrics.jobs({life.value: lives.count(life) for life in Life if life is not Life.FORGOTTEN})
            up = self._peers_up()
            self._services.metrics.peers(sum(up.values()), len(up))
            self._services.metrics.pacing(self._pacing())
            return render(sight)

        return fresh

    async def status(self, sight: Sight) -> StatusReport:
        node, config = self._services.node, self._services.config
        told = await self._ask_peers()
        memory = {node.node: self.memory()} | {peer: body.get("memory", {}) for peer, body in told.items()}
        up = self._peers_up()
        jobs = []
        for job, shell in sorted(self._jobs.items()):
            if sight.sees(job):
                report = shell.summary()
                report["ranks"] = _ranks(shell, report["ranks"], told)
                report["outlook"] = shell.meter.outlook()
                for peer in report.get("nodes", []):
                    if peer["node"] in memory:
                        peer["memory"] = memory[peer["node"]]
                    peer["up"] = peer["node"] == node.node or up.get(peer["node"], False)
                report["steward_up"] = all(peer["up"] for peer in report.get("nodes", []) if peer["node"] == report["steward"])
                jobs.append(report)
        return {
            "node": {
                "id": node.node,
                "version": version("ckptd"),
                "incarnation": node.incarnation,
                "pid": os.getpid(),
                "uptime_s": round(self._services.now() - self._started, 3),
                "domain": node.domain,
                "control": node.control,
                "bulk": node.bulk,
                "socket": str(config.socket),
            },
            "memory": self.memory(),
            "pacing": self._pacing(),
            "storage": {
                "root": str(config.storage_root or ""),
                "ok": not self._services.health.has("storage"),
                "reason": "",
            },
            "health": self._services.health.to_dict(sight),
            "peers": [{"node": peer, "up": is_up, "domain": ""} for peer, is_up in sorted(up.items())],
            "jobs": jobs,
        }

    def _pacing(self) -> PacingReport:
        return cast(PacingReport, self._services.pacer.report())

    def memory(self) -> MemoryReport:
        arena = self._services.arena
        by_kind = {"own": 0, "peer": 0, "scratch": 0}
        for slot in arena.slots.values():
            by_kind[slot.tenant.kind] += slot.capacity
        return {
            "budget_bytes": arena.budget_bytes,
            "used_bytes": arena.used_bytes,
            "own_bytes": by_kind["own"],
            "peer_bytes": by_kind["peer"],
            "scratch_bytes": by_kind["scratch"],
        }

    async def ls(self, sight: Sight) -> ListReport:
        """All jobs at once: where storage hangs each waits for it, and who asks waits no longer than for one."""
        seen = [(job, shell) for job, shell in sorted(self._jobs.items()) if sight.sees(job)]
        *ours, others = await asyncio.gather(*(self._ls_job(job, shell) for job, shell in seen), self._ls_others(sight))
        rows = [row for found, _ in (*ours, others) for row in found]
        return {"rows": rows, "errors": [error for _, errors in (*ours, others) for error in errors]}

    async def _ls_job(self, job: str, shell: JobShell) -> tuple[list[SnapshotReport], list[str]]:
        rows: list[SnapshotReport] = []
        errors: list[str] = []
        try:
            for row in await shell.durable.steps():
                where = [place for place in ("memory", "storage") if place in row["where"]]
                life = shell.machine.lifetime.life.state.value
                rows.append({**row, "job": job, "where": where, "life": life})  # type: ignore[typeddict-item]
        except (CkptdError, OSError) as error:
            errors.append(f"{job}: {error}")
        return rows, errors + _unsaid(job, shell)

    async def _ls_others(self, sight: Sight) -> tuple[list[SnapshotReport], list[str]]:
        """Of jobs that are forgotten here, or never were here: a new start would restore it."""
        storage, known = self._services.storage, frozenset(self._jobs)
        if storage is None:
            return [], []
        try:
            return await self._services.listed(
                lambda storage, _: list_stored(storage, lambda job: sight.sees(job) and job not in known), storage, ALL_JOBS
            )
        except (CkptdError, OSError) as error:
            return [], [f"storage: {error}"]

    def on_message(self, node: str, job: str, message: object) -> None:
        if isinstance(message, StatusAsk):
            self._services.send(node, job, StatusReply(message.request, self._told()))
        elif isinstance(message, StatusReply):
            waiting = self._asked.get(message.request)
            if waiting is not None and not waiting.done():
                waiting.set_result({"node": node, **message.body})

    def _told(self) -> dict[str, Any]:
        """What a peer's status shows of this node."""
        ranks = {job: shell.summary()["ranks"][:RANKS_TOLD_MAX] for job, shell in self._jobs.items()}
        return {"memory": dict(self.memory()), "ranks": ranks}

    async def _ask_peers(self) -> dict[str, dict[str, Any]]:
        """What each peer that answers in time says of itself."""
        asked = [peer for peer, up in self._peers_up().items() if up][:REQUESTS_MAX]
        waiting = dict(self._ask(peer) for peer in asked)
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=PEER_ANSWER_TIMEOUT_S)
        finally:
            for request in waiting:  # other callers wait for theirs
                del self._asked[request]
        answers = [future.result() for future in waiting.values() if future.done() and not future.cancelled()]
        return {str(answer["node"]): answer for answer in answers}

    def _ask(self, peer: str) -> tuple[str, asyncio.Future[dict[str, Any]]]:
        request = secrets.token_hex(8)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[request] = future
        self._services.send(peer, "", StatusAsk(request))
        return request, future


def _ranks(
    shell: JobShell, here: list[RankReport], told: Mapping[str, Mapping[str, Any]]
) -> list[RankReport]:
    """The job's ranks: ours, and what the nodes that they live on say of theirs, if they do."""
    homes = shell.record.ranks if shell.record is not None else ()
    others = [
        row
        for peer, body in told.items()
        for row in body.get("ranks", {}).get(shell.job, [])
        if 0 <= row.get("rank", -1) < len(homes) and homes[row["rank"]] == peer
    ]
    silent: list[RankReport] = [
        {"rank": rank, "node": node, "step": -1, "free_slots": 0, "up": False, "silent": True}
        for rank, node in enumerate(homes)
        if node not in told and node != shell.services.node.node
    ]
    return sorted([*here, *others, *silent], key=lambda row: row["rank"])


def _unsaid(job: str, shell: JobShell) -> list[str]:
    """A daemon that was started again has its memory back before a steward has said what it is part of: that is not nothing."""
    held = max(shell.machine.slots.sealed, default=None)
    if held is None or shell.levels:
        return []
    return [f"{job}: memory here holds a part of {held}, and no steward has said yet whether it is whole: look again soon"]
