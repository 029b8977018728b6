"""Joining the job: the ranks meet, then each tells its daemon (design D10). In the background at a first snapshot()."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd_client import rendezvous
from ckptd_client.accelerator import of_all
from ckptd_client.claims import claims_of
from ckptd_client.entries import State
from ckptd_client.plan import predicted_bytes
from ckptd_client.registry import Registry
from ckptd_client.session import IDLE, JOINING, Session
from ckptd_client.slices import declared_name, placed_name
from ckptd_client.troubles import Troubles
from ckptd_client.world import World

log = logging.getLogger("ckptd")
AGAIN_AFTER_S = 10.0  # a join that failed is tried anew, on all ranks, no sooner than this
POLL_S = 0.5
LAYOUT_SLACK = 1.02  # objects and alignment grow a little; a change of size costs a snapshot
RECORD_SLACK = 1.125  # the names of optimizer state that is not born yet are longer than what stands for them
FOREVER_S = 10 * 365 * 86400.0


class Joiner:
    def __init__(
        self, session: Session, registry: Registry, troubles: Troubles, state_bytes: int | None
    ) -> None:
        """``state_bytes``: payload of one snapshot of this rank, if the user knows better than the prediction."""
        self._session, self._registry, self._troubles = session, registry, troubles
        self._state_bytes = state_bytes
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._not_before = 0.0

    def now(self, state: State, ask: dict[str, Any], trouble: str, deadline: float) -> World:
        """For restore(): meet the others and join. Raises CkptdError on all ranks when one of them has no daemon."""
        self.give_up()
        session = self._session
        node = session.node if session.link.up else None
        world = self._meet(state, node, trouble, deadline)
        session.join(world, *self._bytes(state, world), ask, restoring=True)
        return world

    @property
    def under_way(self) -> bool:
        """A background join has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def may_start(self) -> bool:
        """No background join is under way, nor has one failed just now."""
        return not self.under_way and time.monotonic() >= self._not_before

    def in_background(self, state: State) -> None:
        """For a first snapshot() without restore(): returns at once. Ask ``may_start`` before."""
        self._given_up.clear()
        self._thread = threading.Thread(target=self._run, args=(state,), name="ckptd-join", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """The background join, if any, ends."""
        self._given_up.set()
        with self._session.changed:
            self._session.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, state: State) -> None:
        session = self._session
        try:
            with session.changed:
                while not session.link.up and not self._given_up.is_set():
                    session.changed.wait(POLL_S)
            deadline = time.monotonic() + FOREVER_S
            world = self._meet(state, session.node, session.link.trouble, deadline, self._given_up.is_set)
            session.join(world, *self._bytes(state, world), None, restoring=False)
            with session.changed:
                while session.phase == JOINING and not self._given_up.is_set():
                    session.changed.wait(POLL_S)
                joined = session.phase != IDLE
        except (CkptdError, RuntimeError) as error:  # RuntimeError: the job's store is gone
            joined = False
            if not self._given_up.is_set():
                self._troubles.report("join", f"not protected: {error}")
        if not joined:
            self._not_before = time.monotonic() + AGAIN_AFTER_S

    def _meet(
        self, state: State, node: dict[str, Any] | None, trouble: str, deadline: float, given_up: Callable[[], bool] | None = None
    ) -> World:
        claims = claims_of(self._registry, state)
        try:
            return rendezvous.meet(
                self._session.job, node, trouble, deadline, given_up, late=self._late, declared=declared_name(state),
                placed=placed_name(state), claims=claims,
            )  # fmt: skip
        finally:
            self._troubles.clear("meeting")

    def _late(self, who: str) -> None:
        self._troubles.report("meeting", f"not protected: waits for {who}, where restore() or a first snapshot() is still to come")

    def _bytes(self, state: State, world: World) -> tuple[int, int, int]:
        """(live part, frozen part, record) of one snapshot."""
        replicas = int(self._session.policy.get("replicas", 0))
        self._session.accelerator = of_all({entry.tensor.device for entry in state.entries})
        live, frozen, record = predicted_bytes(self._registry, state, world, replicas)
        if self._state_bytes is not None:
            return max(1, self._state_bytes - frozen), frozen, int(record * RECORD_SLACK)
        return int(live * LAYOUT_SLACK), frozen, int(record * RECORD_SLACK)
