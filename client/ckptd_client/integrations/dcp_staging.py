"""``dcp.async_save`` without the copy of everything that it makes in the trainer's memory first:
``dcp.async_save(state, storage_writer=CkptdStagingWriter(client, step))``.

DCP makes its plan in a thread of its own, behind ``stage()``. So the state goes there as it is, the bytes are copied once, from
where training has them into the daemon's memory, and the thread that called async_save is held until they are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, ItemsView, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptd.core.errors import CkptdError
from ckptd_client import accelerator
from ckptd_client.client import Client
from ckptd_client.explicit import SAVING_TIMEOUT_S, Saving
from ckptd_client.integrations.dcp import CkptdStorageWriter, no_process

HOLD_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.05  # does the thread that saves still run?


class _Hold:
    """Of the thread that called async_save, for as long as what it saves must not be written."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits = self._released = self._over = False
        self._thread: threading.Thread | None = None  # that saves
        self._save: Saving | None = None

    @property
    def over(self) -> bool:
        """Nobody saves under it any more."""
        return self._over or (self._thread is not None and not self._thread.is_alive())

    def wait(self, timeout_s: float) -> None:
        """By the thread that trains, until its state may be written: whatever ends this, nothing is captured behind it."""
        deadline = time.monotonic() + timeout_s
        try:
            with self._changed:
                self._waits = True
                self._changed.notify_all()
                while not (self._released or self.over) and time.monotonic() < deadline:
                    self._changed.wait(LOOK_EVERY_S)
        finally:
            with self._changed:
                late, self._released, save = not self._released, True, self._save
            if late and save is not None:
                save.give_up(f"training went on, as it was not complete in memory within {timeout_s:g} s")

    def begins(self) -> None:
        """By the thread that saves."""
        self._thread = threading.current_thread()

    def reads(self, save: Saving, timeout_s: float) -> None:
        """Before anything is captured. Raises CkptdError: the state may have been written since async_save was called."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._waits or self._released, timeout_s)
            if self._released or not came:
                hint = "hold_timeout= is for all ranks to plan and to copy" if came else "this torch calls no synchronize_staging()"
                raise CkptdError("training went on before anything was copied", hint=hint)
            self._save = save

    def release(self) -> None:
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def ends(self) -> None:
        self._over = True
        self.release()


class _Staged(dict[str, Any]):
    """The state as it is. DCP asks for its items where it saves it."""

    def __init__(self, state: dict[str, Any], hold: _Hold) -> None:
        super().__init__(state)
        self._hold = hold

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._hold.begins()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Before torch moves what is trained into shared memory."""
        self._hold.ends()
        raise no_process()


class CkptdStagingWriter(CkptdStorageWriter, AsyncStager):
    """A writer that is its own stager, whatever planner there is. async_save returns when the step lies complete in the memory of
    all ranks' nodes, with nothing in it that training writes then, or has failed; the future ends at ``level``. hold_timeout: after
    so many seconds training goes on in any case, and a step that some rank has not copied by then fails on all of them. One save at
    a time. ``dcp.save`` with it is as with a CkptdStorageWriter."""

    def __init__(
        self, client: Client, step: int | None = None, *, level: str = "durable", name: str | None = None,
        timeout: float = SAVING_TIMEOUT_S, hold_timeout: float = HOLD_TIMEOUT_S,
    ) -> None:  # fmt: skip
        super().__init__(client, step, level=level, name=name, timeout=timeout)
        self._hold_timeout_s = hold_timeout
        self._hold: _Hold | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Raises CkptdError: the save before is still under way."""
        if self._held() is not None:
            raise CkptdError("this writer's save before is under way", hint="wait for its future, or make a writer for each save")
        if accelerator.in_use():
            torch.accelerator.synchronize()  # what is under way belongs to this state, and the thread that saves has other streams
        self._hold = _Hold()
        return _Staged(state_dict, self._hold)

    def synchronize_staging(self) -> None:
        """Returns when what async_save was given may be written."""
        if self._hold is not None:
            self._hold.wait(self._hold_timeout_s)

    def close(self) -> None:
        """Nothing is kept."""

    def _held(self) -> _Hold | None:
        return self._hold if self._hold is not None and not self._hold.over else None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        hold = self._held()
        try:
            return super().write_data(plan, planner)
        finally:
            if hold is not None:
                hold.ends()

    @contextmanager
    def _saving(self, sealed: Callable[[], None] | None = None) -> Iterator[Saving]:
        hold = self._held()
        with super()._saving(hold.release if hold is not None else sealed) as save:
            if hold is not None:
                hold.reads(save, self._hold_timeout_s)
            yield save
