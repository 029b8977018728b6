"""Saves and loads of exactly what is handed over, for frameworks that ask for both by themselves: saving() and open()."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from ckptd_client import dtypes, fence
from ckptd_client.boxes import Blob, Box, Boxes
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import Owner
from ckptd_client.handles import LEVELS, NOT_SAVED, reached
from ckptd_client.session import GRANTED_AHEAD, LARGER
from ckptd_client.troubles import brief

if TYPE_CHECKING:
    from ckptd_client.client import Client

SAVING_TIMEOUT_S = 600.0
MISSED_EACH_OTHER = f"skipped: {GRANTED_AHEAD}", f"skipped: {LARGER}"  # one rank took a grant that another one could not
OWNER = "$explicit"
NO_STEP = -1
Row = tuple[str, Sequence[int], Sequence[int], Tensor]  # (key, offsets, sizes, where it goes to)


class Saving:
    """What ``saving()`` is filled with."""

    def __init__(self, step: int, give_up: Callable[[int, str], None] = lambda step, reason: None) -> None:
        self.step = step
        self.items: list[Box | Blob] = []
        self._give_up = give_up
        self._lock = threading.Lock()
        self._over = False

    def add(self, *items: Box | Blob) -> None:
        """From any thread, until the block is left."""
        with self._lock:
            if self._over:
                raise CkptdError("the saving() block has been left", where=f"step {self.step}")
            self.items += items

    def give_up(self, reason: str) -> None:
        """From any thread: what was added is going to be written now. A capture that is not over by then is void on all ranks, and
        none follows it."""
        self._give_up(self.step, f"{NOT_SAVED}: {reason}")

    def end(self) -> list[Box | Blob]:
        with self._lock:
            self._over = True
            return self.items


class _Opening(Boxes):
    """All that is no tensor, whatever its name."""

    catalogue: Catalogue | None = None

    def offered(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        names = (name for name in catalogue.objects if not name.startswith("$"))
        self.blobs = [Blob(name, per_rank=catalogue.is_per_rank("o", name)) for name in names]

    def offers(self, name: str) -> bool:
        return self.catalogue is not None and name in self.catalogue.objects


class Opened:
    """One step, as ``open()`` found it. tensors: key -> (dtype, shape); blobs: name -> bytes, or what was registered under that
    name; of what each rank had for itself, in another world, {rank: that}."""

    def __init__(self, job: _Job, step: int, opening: _Opening, blobs: dict[str, Any]) -> None:
        assert opening.catalogue is not None, "something was offered"
        self._job, self.step, self._catalogue = job, step, opening.catalogue
        self.tensors = tensors_of(self._catalogue)
        self.blobs: Mapping[str, Any] = blobs

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        """There is nothing to be let go of: what is open is the job's newest step."""

    def read(self, rows: Iterable[Row]) -> None:
        """All ranks call it, each with its own rows, which may be none: (key, offsets, sizes, out), out of that shape; another
        dtype is converted. Raises CkptdError on all ranks when the step is not to be had any more; for rows that do not fit
        on the rank that asked for them, while the others read."""
        try:
            boxes, converted = boxes_of(rows, self._catalogue, self.step)
        except Exception:
            self._fill([])  # the other ranks are not left alone: they read, and this one raises
            raise
        self._fill(boxes)
        with torch.no_grad():
            for out, found in converted:
                out.copy_(found)

    def _fill(self, boxes: list[Box]) -> None:
        keys = {box.key for box in boxes}
        self._job.fill(Boxes(OWNER, lambda loading: boxes), self.step, None, keys.__contains__)



def tensors_of(catalogue: Catalogue) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {key: (dtypes.TORCH[dtype], shape) for key, (dtype, shape, _) in catalogue.tensors.items()}


def boxes_of(rows: Iterable[Row], catalogue: Catalogue, step: int) -> tuple[list[Box], list[tuple[Tensor, Tensor]]]:
    """What is to be filled; and, where rows want another dtype, what they want it in and what is filled for it. Raises CkptdError
    for rows that do not fit."""
    boxes: list[Box] = []
    converted: list[tuple[Tensor, Tensor]] = []
    for key, offsets, sizes, out in rows:
        source = catalogue.source_of(key)
        if source is None:
            raise CkptdError(f"not in step {step}", where=key)
        name, shape, _ = catalogue.tensors[source]
        _check_writable(key, out)
        target = out.detach()
        if target.dtype != dtypes.TORCH[name]:
            target = torch.empty(tuple(sizes), dtype=dtypes.TORCH[name], device=out.device)
            converted.append((out.detach(), target))
        boxes.append(Box(source, target, shape, offsets, sizes))
        boxes[-1].placed()
    return boxes, converted


def _check_writable(key: str, out: Any) -> None:
    """Raises CkptdError: nothing can be read into it."""
    if not isinstance(out, Tensor):
        hint = "a tensor; torch.from_numpy(array) shares its memory"
        raise CkptdError(f"a {type(out).__name__} to read into", where=key, hint=hint)
    strides = zip(out.stride(), out.shape, strict=True) if out.layout == torch.strided and not out.is_meta else [(0, 2)]
    if any(step == 0 < size - 1 for step, size in strides):
        raise CkptdError("a tensor that has no memory of its own for each element", where=key, hint="torch.empty(sizes)")


class _Job:
    """What one client saves and loads so, one call after the other. Raises CkptdError: it has registered something."""

    def __init__(self, client: Client) -> None:
        client._registry.be_bare()
        client._session.handed_over = True
        fence.leave(client)  # training goes on while this thread saves
        self.client, self._lock = client, threading.RLock()

    @contextmanager
    def saving(self, step: int, level: str, timeout_s: float, sealed: Callable[[], None] | None) -> Iterator[Saving]:
        engine = self.client._engine
        save = Saving(step, engine.give_up)
        with self._lock:
            self._check_later(step)
            engine.give_up(NO_STEP, "")
            try:
                yield save
                boxes = Boxes(OWNER, lambda loading: save.end())
                boxes.ask(loading=False)
            except BaseException as error:
                self._not_saved(step, f"{type(error).__name__}: {error}")
                raise
            with self._registered(boxes):
                self._save(save, level, time.monotonic() + timeout_s, sealed)

    def open(self, step: int | None, source: str | None, allow_fresh: bool) -> Opened | None:
        with self._lock:
            blobs: dict[str, Any] = {}
            opening = _Opening(OWNER, lambda loading: (), blobs.update)
            found = self.fill(opening, step, source, opening.offers, allow_fresh)
            return Opened(self, found, opening, blobs) if found is not None else None

    def fill(
        self, boxes: Boxes, step: int | None, source: str | None, only: Callable[[str], bool], allow_fresh: bool = False
    ) -> int | None:
        """All ranks restore this step, each into boxes of its own."""
        with self._lock, self._registered(boxes):
            return self.client._restore(step, source, only, False, allow_fresh)

    @contextmanager
    def _registered(self, boxes: Boxes) -> Iterator[None]:
        registry = self.client._registry
        registry.owners = {OWNER: Owner(OWNER, "boxes", boxes)}
        registry.version += 1
        try:
            yield
        finally:
            registry.owners = {}

    def _check_later(self, step: int) -> None:
        """A first save goes on from what the job has. Raises CkptdError: that is this far already, or farther."""
        client = self.client
        if not client._registry.began:
            self.open(None, None, False)
        restored = client.last_restore["step"]
        newest = max(client._session.called, -1 if restored is None else restored)
        if step <= newest:
            hint = "open(step=...) goes back; another name= keeps both"
            raise CkptdError(f"step {step} is not later than step {newest}, which the job has", where=client.job, hint=hint)

    def _save(self, save: Saving, level: str, deadline: float, sealed: Callable[[], None] | None) -> None:
        client, step = self.client, save.step
        handle = client.snapshot(step, must=True)
        if handle.status.startswith("skipped") and time.monotonic() < deadline:
            handle = client.snapshot(step, must=True)  # the other ranks come later
        first = "sealed" if sealed is not None else level
        try:
            status = client.wait(first, max(0.0, deadline - time.monotonic()))
            while status.startswith(MISSED_EACH_OTHER) and time.monotonic() < deadline:  # all of them wait for this very step
                handle = client.snapshot(step, must=True)
                status = client.wait(first, max(0.0, deadline - time.monotonic()))
        finally:
            if sealed is not None:
                save.give_up("what it was given may have been written since")
        last = client._last or handle
        if sealed is not None and last.step == step and reached(last.fact, "sealed", client._session.attainable):
            sealed()
            status = last.wait(level, max(0.0, deadline - time.monotonic()))
        if last.step != step or not reached(last.fact, level, client._session.attainable):
            raise CkptdError(f"step {step} was not saved: {status}", where=client.job, hint="; ".join(client.health().problems[:3]))

    def _not_saved(self, step: int, why: str) -> None:
        """The other ranks hear it: this rank asks for its grant as they do, and gives it up."""
        session, reason = self.client._session, brief(f"{NOT_SAVED}: {why}")
        session.call(step, fence.steps(), asks=True)
        with session.changed:
            grant = session.grants.refuse(step, reason)
        if grant is not None:
            session.link.send(wire.GaveUp(grant.number, step, reason))


class Explicit:
    """A client's part of it. ``_jobs``: by the name that a save is given."""

    _jobs: dict[str | None, _Job]

    def saving(
        self, step: int, level: str = "durable", name: str | None = None, timeout: float = SAVING_TIMEOUT_S,
        sealed: Callable[[], None] | None = None,
    ) -> AbstractContextManager[Saving]:  # fmt: skip
        """A snapshot of what the block adds to it, and of nothing else: ``with client.saving(step) as save: save.add(Box(...),
        Blob(...))``. All ranks of the job take part, in whatever thread. It is captured at the end of the block, which is left
        when ``level`` is reached.

        name: a job of its own, NAME.name, which other saves and ``snapshot()`` have nothing to do with; without it this client
        registers nothing. Steps grow; ``restore()`` or ``open(step=)`` goes back. Raises CkptdError on all ranks with the reason
        when the level is not reached within ``timeout`` seconds. sealed: called, in this thread, once the step lies complete in
        memory: what was added may be written from then on, and not before the block is left without it. Who cannot wait for
        either calls ``Saving.give_up``.
        """
        if level not in LEVELS:
            raise ValueError(f"level is one of {LEVELS}, not {level!r}")
        return self._job_of(name).saving(step, level, timeout, sealed)

    def open(
        self, step: int | None = None, source: str | None = None, name: str | None = None, allow_fresh: bool = False
    ) -> Opened | None:
        """The newest recoverable step, or ``step``, for all ranks the same one: its tensors by name and shape, and what is no
        tensor. ``Opened.read()`` brings what each rank wants of it. As ``restore()`` it makes the job go on from there. None: it
        is proven that the job has none. name: as of ``saving``. Raises CkptdError on all ranks, as restore() does."""
        return self._job_of(name).open(step, source, allow_fresh)

    def _job_of(self, name: str | None) -> _Job:
        client = cast("Client", self)
        client._check_here()
        if name not in self._jobs:
            if name is not None:
                path, patience_s = client._session.link.path, client._must_timeout_s
                client = type(client).connect(f"{client.job}.{name}", path, required=True, must_timeout_s=patience_s)
            self._jobs[name] = _Job(client)
        return self._jobs[name]

    def _close_named(self, finished: bool) -> None:
        for name, job in self._jobs.items():
            if name is not None:
                job.client.close(finished=finished)
