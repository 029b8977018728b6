"""Saves and loads of exactly what is handed over, for frameworks that ask for both by themselves: saving() and open()."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from ckptd_client import dtypes, fence
from ckptd_client.boxes import Blob, Box, Boxes
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import Owner
from ckptd_client.handles import LEVELS, NOT_SAVED, Handle, reached

if TYPE_CHECKING:
    from ckptd_client.client import Client

SAVING_TIMEOUT_S = 600.0
GIVE_UP_S = 5.0  # a rank that has nothing to save waits for its grant, to say so
OWNER = "$explicit"
Row = tuple[str, Sequence[int], Sequence[int], Tensor]  # (key, offsets, sizes, where it goes to)


class Saving:
    """What ``saving()`` is filled with."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.items: list[Box | Blob] = []
        self._lock = threading.Lock()
        self._over = False

    def add(self, *items: Box | Blob) -> None:
        """From any thread, until the block is left."""
        with self._lock:
            if self._over:
                raise CkptdError("the saving() block has been left", where=f"step {self.step}")
            self.items += items

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


class Opened:
    """One step, as ``open()`` found it. tensors: key -> (dtype, shape); blobs: name -> bytes, or what was registered under that
    name; of what each rank had for itself, in another world, {rank: that}."""

    def __init__(self, client: Client, step: int, opening: _Opening, blobs: dict[str, Any]) -> None:
        assert opening.catalogue is not None, "something was offered"
        self._client, self.step, self._catalogue = client, step, opening.catalogue
        found = self._catalogue.tensors.items()
        self.tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {
            key: (dtypes.TORCH[dtype], shape) for key, (dtype, shape, _) in found
        }
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
            boxes, converted = self._boxes(rows)
        except Exception:
            self._fill([])  # the other ranks are not left alone: they read, and this one raises
            raise
        self._fill(boxes)
        with torch.no_grad():
            for out, found in converted:
                out.copy_(found)

    def _fill(self, boxes: list[Box]) -> None:
        keys = {box.key for box in boxes}
        self._client._fill(Boxes(OWNER, lambda loading: boxes), self.step, None, keys.__contains__)

    def _boxes(self, rows: Iterable[Row]) -> tuple[list[Box], list[tuple[Tensor, Tensor]]]:
        boxes: list[Box] = []
        converted: list[tuple[Tensor, Tensor]] = []
        for key, offsets, sizes, out in rows:
            source = self._catalogue.source_of(key)
            if source is None:
                raise CkptdError(f"not in step {self.step}", where=key)
            dtype, shape = self.tensors[source]
            target = out.detach()
            if target.dtype != dtype:
                target = torch.empty(tuple(sizes), dtype=dtype, device=out.device)
                converted.append((out.detach(), target))
            boxes.append(Box(source, target, shape, offsets, sizes))
            boxes[-1].placed()
        return boxes, converted


class Explicit:
    """A client's part of it."""

    _named: dict[str, Client]

    def _as_client(self) -> Client:
        return self  # type: ignore[return-value]

    @contextmanager
    def saving(
        self, step: int, level: str = "durable", name: str | None = None, timeout: float = SAVING_TIMEOUT_S
    ) -> Iterator[Saving]:
        """A snapshot of what the block adds to it, and of nothing else: ``with client.saving(step) as save: save.add(Box(...),
        Blob(...))``. All ranks of the job take part, in whatever thread. It is captured at the end of the block, which is left
        when ``level`` is reached.

        name: a job of its own, NAME.name, which other saves and ``snapshot()`` have nothing to do with; without it this client
        registers nothing. Steps grow; ``restore()`` or ``open(step=)`` goes back. Raises CkptdError on all ranks with the reason
        when the level is not reached within ``timeout`` seconds.
        """
        if level not in LEVELS:
            raise ValueError(f"level is one of {LEVELS}, not {level!r}")
        target, save = self._target(name), Saving(step)
        with target._explicit_lock:
            target._continue()
            try:
                yield save
            except BaseException as error:
                target._not_saved(step, f"{type(error).__name__} on rank {target._rank}")
                raise
            target._save(save.end(), step, level, time.monotonic() + timeout)

    def open(
        self, step: int | None = None, source: str | None = None, name: str | None = None, allow_fresh: bool = False
    ) -> Opened | None:
        """The newest recoverable step, or ``step``, for all ranks the same one: its tensors by name and shape, and what is no
        tensor. ``Opened.read()`` brings what each rank wants of it. As ``restore()`` it makes the job go on from there. None: it
        is proven that the job has none. name: as of ``saving``. Raises CkptdError on all ranks, as restore() does."""
        target = self._target(name)
        with target._explicit_lock:
            return target._open(step, source, allow_fresh)

    # --- on the client whose job it is --------------------------------------------------------------------------
    def _target(self, name: str | None) -> Client:
        client = self._as_client()
        client._check_here()
        if name is None:
            client._registry.be_bare()
            return client
        if name not in client._named:
            link = client._session.link
            made = type(client).connect(f"{client.job}.{name}", link.path, required=True, must_timeout_s=client._must_timeout_s)
            made._registry.be_bare()
            client._named[name] = made
        return client._named[name]

    @property
    def _rank(self) -> int:
        world = self._as_client()._session.world
        return world.rank if world is not None else 0

    def _continue(self) -> None:
        """A first save goes on from what the job has."""
        client = self._as_client()
        if not client._registry.began:
            self._open(None, None, False)

    def _open(self, step: int | None, source: str | None, allow_fresh: bool) -> Opened | None:
        blobs: dict[str, Any] = {}
        opening = _Opening(OWNER, lambda loading: (), blobs.update)
        names = _Names(opening)
        found = self._fill(opening, step, source, names, allow_fresh)
        return Opened(self._as_client(), found, opening, blobs) if found is not None else None

    def _fill(
        self, boxes: Boxes, step: int | None, source: str | None, only: Callable[[str], bool], allow_fresh: bool = False
    ) -> int | None:
        client = self._as_client()
        registry = client._registry
        registry.owners = {OWNER: Owner(OWNER, "boxes", boxes)}
        registry.version += 1
        try:
            return client._restore(step, source, only, False, allow_fresh)
        finally:
            registry.owners = {}

    def _save(self, items: list[Box | Blob], step: int, level: str, deadline: float) -> None:
        client = self._as_client()
        boxes = Boxes(OWNER, lambda loading: items)
        boxes.ask(loading=False)
        client._registry.owners = {OWNER: Owner(OWNER, "boxes", boxes)}
        client._registry.version += 1
        try:
            newest = max(client._session.called, -1 if client.last_restore["step"] is None else client.last_restore["step"])
            if step <= newest:
                hint = "open(step=...) goes back; another name= keeps both"
                raise CkptdError(f"step {step} is not later than step {newest}, which the job has", where=client.job, hint=hint)
            handle = client.snapshot(step, must=True)
            status = client.wait(level, max(0.0, deadline - time.monotonic()))
        finally:
            client._registry.owners = {}
        if not _has(client, handle, level):
            raise CkptdError(f"step {step} was not saved: {status}", where=client.job, hint="; ".join(client.health().problems[:3]))

    def _not_saved(self, step: int, why: str) -> None:
        """The other ranks hear it: this rank takes its grant, and gives it up."""
        session = self._as_client()._session
        session.call(step, fence.steps(), asks=True)
        grant = session.take(step, GIVE_UP_S)
        if grant is not None:
            session.give_up(grant.number, step, f"{NOT_SAVED}: {why}")
        else:
            session.link.send_or_drop(wire.Skipped(step, why))


class _Names:
    """Whatever is offered, and no tensor."""

    def __init__(self, opening: _Opening) -> None:
        self._opening = opening

    def __call__(self, key: str) -> bool:
        catalogue = self._opening.catalogue
        return catalogue is not None and key in catalogue.objects


def _has(client: Client, handle: Handle, level: str) -> bool:
    last = client._last or handle
    return last.step == handle.step and reached(last.fact, level, client._session.attainable)
