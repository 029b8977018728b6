"""Listens for training ranks: sessions of the unix socket find their job (design D2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.daemon.drain import Drain
from ckptd.daemon.forget import Forget
from ckptd.daemon.job import JobShell
from ckptd.daemon.services import Services, log
from ckptd.wire import rank as wire
from ckptd.wire.complaints import Complaints
from ckptd.wire.names import job_key
from ckptd.wire.rank_link import RankLink, RankSession

JOBS_PER_USER_MAX = 512  # known here; each is looked at ten times a second, also long after its ranks are gone


class RankListener:
    """``job`` makes one where ``jobs`` has none of that name."""

    def __init__(
        self, services: Services, jobs: Mapping[str, JobShell], job: Callable[[str], JobShell], drain: Drain, forget: Forget
    ) -> None:
        self._services, self._known, self._job, self._drain, self._forget = services, jobs, job, drain, forget
        self._faults = Complaints()
        self._jobs: dict[RankSession, str] = {}  # by name: a job that was forgotten meanwhile begins anew

    def start(self, path: Path) -> None:
        self._link = RankLink(
            path, self._on_open, self._on_message, self._on_close, mode=self._services.config.socket_mode,
            connections_max=self._services.config.connections_max,
        )  # fmt: skip
        self._link.start()

    def users(self) -> set[int]:
        """Whose ranks are connected. From any thread."""
        return {session.uid for session in tuple(self._jobs)}

    def stop(self) -> None:
        self._link.stop()
        self._faults.close()

    def _on_open(self, session: RankSession) -> None:
        log.debug("connection from pid %d uid %d", session.pid, session.uid)

    def _on_message(self, session: RankSession, message: Any, fds: list[int]) -> None:
        """Raises ValueError for garbage: the link closes that one connection."""
        job = self._jobs.get(session)
        if isinstance(message, wire.DrainAsk):
            self._drain.on_ask(session, message)
        elif isinstance(message, wire.ForgetAsk):
            self._forget.on_ask(session, message)
        elif job is not None:
            self._to_job(session, job, message, fds)
        elif isinstance(message, wire.Hello):
            self._hello(session, message)
        else:
            raise ValueError("the first frame must be Hello")

    def _to_job(self, session: RankSession, job: str, message: Any, fds: list[int]) -> None:
        try:
            self._job(job).ranks.on_message(session, message, fds)
        except ValueError:
            raise
        except Exception as error:
            self._failed(session, job, message, error)
            raise ValueError(f"{type(message).__name__} could not be handled") from error

    def _failed(self, session: RankSession, job: str, message: Any, error: Exception) -> None:
        """A fault of ours, but whoever may connect can bring it about as often as he likes: one trace per uid and minute."""
        what = f"{type(message).__name__} of a rank of {job}"
        self._faults.say(f"uid {session.uid}", f"{what} failed: {error!r}", error)
        self._services.health.event("internal", f"{type(message).__name__} of a rank: {type(error).__name__}: the log has more")

    def _hello(self, session: RankSession, message: wire.Hello) -> None:
        if message.version != wire.PROTOCOL_VERSION:
            hint = "install the same ckptd version on both sides"
            session.send(
                wire.Refused(f"protocol version {message.version}, ours is {wire.PROTOCOL_VERSION}", "", hint)
            )
            return
        try:
            key = job_key(session.uid, message.job)
        except CkptdError as error:
            session.send(wire.Refused(error.what, error.where, error.hint))
            return
        if key not in self._known and sum(shell.uid == session.uid for shell in self._known.values()) >= JOBS_PER_USER_MAX:
            hint = "`ckptd forget` those that are over, or end some"
            session.send(wire.Refused(f"uid {session.uid} has {JOBS_PER_USER_MAX} jobs here already", key, hint))
            return
        self._jobs[session] = key
        session.send(
            wire.Welcome(wire.PROTOCOL_VERSION, dataclasses.asdict(self._services.node), self._policy())
        )

    def _policy(self) -> dict[str, Any]:
        config = self._services.config
        return {
            "replicas": config.replicas,
            "own_slots": config.own_slots,
            "fence_timeout_s": config.fence_timeout_s,
            "audit_every": config.audit_every,
            "join_timeout_s": config.join_timeout_s,
            "restore_timeout_s": config.restore_timeout_s,
            "durable": bool(config.storage_root),
            "pacing": config.pacing,
            "release": True,
        }

    def _on_close(self, session: RankSession, reason: str) -> None:
        job = self._jobs.pop(session, None)
        if job is not None:
            self._job(job).ranks.on_close(session, reason)
            if job not in self._jobs.values():
                self._services.forget_if_empty(job)
