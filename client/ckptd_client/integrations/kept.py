"""A library's own retention over ckptd's: what it would save is kept on storage, what it would delete is released."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from ckptd.core.errors import CkptdError
from ckptd_client.client import Client
from ckptd_client.handles import Handle

GONE_MAX = 8  # of the steps that were given up last: whoever is started again releases them once more


class Kept:
    """The newest ``limit`` of the steps that were saved; None: all. What is given up is released by rank 0 when the newest one is
    durable. All ranks save alike, so this is the same on each of them, and comes back with a restore where it is registered."""

    def __init__(self, client: Client, limit: int | None) -> None:
        self._client, self._limit = client, limit
        self.steps: list[int] = []  # the oldest first
        self._gone: list[int] = []
        self._due: list[int] = []  # not released yet
        self._newest: Handle | None = None
        self._failed = False  # since the newest save

    def save(self, step: int, stays: Collection[int] = ()) -> Handle:
        """A snapshot that retention leaves alone, waited for as ``must`` says. stays: steps that are not given up, whatever the
        limit. Never raises for a checkpoint's sake."""
        self.look()
        if step not in self.steps:
            self.steps.append(step)
        self._give_up(stays)
        self._newest, self._failed = self._client.snapshot(step, keep=True, must=True), False
        return self._newest

    def look(self) -> None:
        """Is the newest one durable by now? Cheap; call it between saves."""
        if self._due and not self._failed and self._newest is not None and self._newest.status == "durable":
            self._release()

    def finish(self, only: int | None = None) -> None:
        """Training has ended, and waited for what it saved. only: the one that is to be left, where it is among them. Where the
        newest one has not become durable nothing is given up."""
        if self._newest is not None and self._newest.status != "durable":
            return
        if only in self.steps:
            self._let_go([step for step in self.steps if step != only])
        self._release()

    def state_dict(self) -> dict[str, Any]:
        return {"kept": list(self.steps), "gone": list(self._gone)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What another release wrote has none of that."""
        self.steps, self._gone = list(state.get("kept", [])), list(state.get("gone", []))
        self._due, self._newest = list(self._gone), None

    def _give_up(self, stays: Collection[int]) -> None:
        if self._limit is None:
            return
        needed = {step for step in self.steps if step in stays} | {self.steps[-1]}
        left = len(self.steps) - max(self._limit, len(needed))
        self._let_go([step for step in self.steps if step not in needed][: max(0, left)])

    def _let_go(self, steps: list[int]) -> None:
        self.steps = [step for step in self.steps if step not in steps]
        self._gone = [*self._gone, *steps][-GONE_MAX:]
        self._due += steps

    def _release(self) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            self._due.clear()
        try:
            while self._due:
                self._client.release(self._due[0])
                del self._due[0]
        except CkptdError as error:  # training goes on, and it is tried again with the next save
            self._failed = True
            self._client._troubles.pass_on(f"a step that is to be kept no more stays: {error}", "")
