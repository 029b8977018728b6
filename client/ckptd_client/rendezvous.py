"""The ranks find each other's daemons through the job's own store (design D10): msgpack bytes, never pickled objects.

Rank 0 offers a random attempt, every rank answers under it, rank 0 publishes all answers. A rank that answered a stale offer
moves on to the newer one, and believes only a publication that holds its own token; so nothing depends on counters that
could run apart, nor on a store that is empty at the start.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ckptd.core.errors import CkptdError
from ckptd_client.world import World

POLL_S = 0.02
POLL_PATIENT_S = 0.25  # in the background: nobody waits
LATE_S = 15.0  # after which it is told who is waited for, and as often again
SHOWN_MAX = 16  # ranks


class NoDaemon(CkptdError):
    """Some rank has no daemon; every rank raises this."""


def rank_and_size() -> tuple[int, int]:
    """Of the job. Raises CkptdError when the launcher promises more ranks than are connected."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    promised = int(os.environ.get("WORLD_SIZE", "1"))
    if promised > 1:
        raise CkptdError(
            f"WORLD_SIZE is {promised}, but torch.distributed is not initialised",
            hint="call init_process_group before restore() and the first snapshot()",
        )
    return 0, 1


def meet(
    job: str,
    node: dict[str, Any] | None,
    trouble: str,
    deadline: float,
    given_up: Callable[[], bool] | None = None,
    *,
    late: Callable[[str], None] = lambda who: None,
    declared: str = "",
    placed: str = "",
    claims: Mapping[str, str] | None = None,
) -> World:
    """Every rank calls it. ``node``: this rank's daemon (NodeInfo), or None with the ``trouble``; then all ranks raise
    CkptdError, as they do at ``deadline`` (monotonic seconds). ``given_up``: checked while waiting. ``late``: told
    which ranks are waited for. ``declared``: a name of what this rank declares to be copies, ``placed`` of the boxes that
    it has. ``claims``: what it registered (claims.py)."""
    rank, size = rank_and_size()
    mine: dict[str, Any] = {"node": node, "trouble": trouble, "token": secrets.token_hex(8), "declared": declared, "placed": placed}
    mine["claims"] = dict(claims or {})
    if size == 1:
        attempt: str = secrets.token_hex(16)
        answers: list[dict[str, Any]] = [mine]
    else:
        store = c10d.PrefixStore(f"ckptd/{job}", c10d._get_default_store())
        patience = POLL_S if given_up is None else POLL_PATIENT_S
        attempt, answers = _Table(store, rank, size, mine, patience, deadline, given_up, late).sit()
    troubles = {r: answer["trouble"] for r, answer in enumerate(answers) if answer["node"] is None}
    if troubles:
        ranks = ", ".join(map(str, troubles))
        there = "start `ckptd run` on every node; one that its keeper or systemd starts again finds its memory, any other none"
        raise NoDaemon(
            f"no daemon for rank {ranks}: {next(iter(troubles.values()))}", where=job,
            hint=f"{there}; allow_fresh=True trains without a checkpoint",
        )  # fmt: skip
    _check_identities(job, [answer["node"] for answer in answers])
    alike = tuple(r for r, answer in enumerate(answers) if answer["declared"] == declared)
    together = tuple(r for r, answer in enumerate(answers) if answer["placed"] == placed)
    met = _world(rank, attempt, [answer["node"] for answer in answers])
    return replace(met, alike=alike, placed=placed, together=together, claims=tuple(answer["claims"] for answer in answers))


def _check_identities(job: str, of_rank: list[dict[str, Any]]) -> None:
    """Two daemons of one name would each wait for the other's ranks. Every rank sees the same answers, so all raise."""
    seen: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, node in enumerate(of_rank):
        first, other = seen.setdefault(node["node"], (rank, node))
        if _host(other) != _host(node):  # not the port: a daemon that was just started again has another
            raise CkptdError(
                f"two daemons call themselves {node['node']}: {other['control']} of rank {first}, {node['control']} of"
                f" rank {rank}", where=job, hint="give each node a node_id and a state_dir of its own",
            )  # fmt: skip


def _host(node: dict[str, Any]) -> str:
    return str(node["control"]).rpartition(":")[0]


def _world(rank: int, attempt: str, of_rank: list[dict[str, Any]]) -> World:
    nodes = list({node["node"]: node for node in of_rank}.values())
    return World(rank, len(of_rank), tuple(node["node"] for node in of_rank), tuple(nodes), attempt)


class _Table:
    def __init__(
        self, store: Any, rank: int, size: int, mine: dict[str, Any], patience_s: float, deadline: float,
        given_up: Callable[[], bool] | None, late: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._store, self._rank, self._size, self._mine = store, rank, size, mine
        self._patience_s, self._deadline, self._given_up, self._late = patience_s, deadline, given_up, late
        self._told_at = time.monotonic() + LATE_S

    def sit(self) -> tuple[str, list[dict[str, Any]]]:
        return self._host() if self._rank == 0 else self._guest()

    def _host(self) -> tuple[str, list[dict[str, Any]]]:
        attempt = secrets.token_hex(16)
        self._store.set("offer", attempt)
        answers = [self._mine]
        for rank in range(1, self._size):
            self._until(lambda at=f"{attempt}/{rank}": self._store.check([at]), attempt)  # type: ignore[misc]
            answers.append(msgpack.unpackb(self._store.get(f"{attempt}/{rank}")))
        self._store.set(f"{attempt}/all", msgpack.packb(answers))
        return attempt, answers

    def _guest(self) -> tuple[str, list[dict[str, Any]]]:
        """Rank 0 may be at its next meeting already. It publishes one before it offers the next: so once an offer is read,
        an older meeting that is still not published never will be."""
        answered: list[str] = []
        found: list[Any] = []

        def look() -> bool:
            offered = self._store.get("offer").decode() if self._store.check(["offer"]) else ""
            for attempt in answered:
                if self._is_ours(attempt, found):
                    answered.append(attempt)
                    return True
            if offered and offered not in answered:
                self._store.set(f"{offered}/{self._rank}", msgpack.packb(self._mine))
                answered.append(offered)
            return False

        self._until(look, lambda: answered[-1] if answered else "")
        return answered[-1], found

    def _is_ours(self, attempt: str, found: list[Any]) -> bool:
        """Has rank 0 published this meeting? An earlier one under the same attempt holds another token of ours."""
        if not self._store.check([f"{attempt}/all"]):
            return False
        found[:] = msgpack.unpackb(self._store.get(f"{attempt}/all"))
        return len(found) == self._size and bool(found[self._rank]["token"] == self._mine["token"])

    def _until(self, true: Callable[[], bool], attempt: str | Callable[[], str]) -> None:
        """``check`` never waits, unlike ``wait`` and ``get``, which would hold the store's lock against the trainer."""
        while not true():
            if self._given_up is not None and self._given_up():
                raise CkptdError("the client was closed while it waited for the other ranks")
            now = time.monotonic()
            at = attempt() if callable(attempt) else attempt
            if now > self._deadline:
                raise CkptdError("not all ranks came to restore() in time", where=f"missing {self._absent(at)}")
            if now > self._told_at:  # only rank 0 asks who: a thousand others would ask for a thousand ranks each
                self._late(self._absent(at) if self._rank == 0 else "rank 0, or whom it waits for")
                self._told_at = now + LATE_S
            time.sleep(self._patience_s)

    def _absent(self, attempt: str) -> str:
        missing = [rank for rank in range(1, self._size) if not self._store.check([f"{attempt}/{rank}"])] if attempt else []
        more = f" and {len(missing) - SHOWN_MAX} more" if len(missing) > SHOWN_MAX else ""
        return "ranks " + ", ".join(map(str, missing[:SHOWN_MAX])) + more if missing else "rank 0"
