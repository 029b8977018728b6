"""A step of a running job, as a source of exports, read beside its training (ckptd_client.open): from the memory of peers, or a
spare slot, as long as nobody who trains lacks that, and then from the same step's copy on storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch
from ckptd_client.dtypes import TORCH
from ckptd_client.reader import ALL, Reading, open_job
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box, contains
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.export.source import Entry
from ckptd.persist.strided import slabs, window

WINDOW_BYTES = 256 << 20  # of a tensor at a time: a daemon brings and verifies whole chunks for any part of them
SMALL_BYTES = 1 << 20  # tensors that are brought together, so that thousands of them are not as many questions
TOGETHER_BYTES = 8 << 20
TOGETHER_MAX = 4096
HINT = "export it again: of the newest step then; replicas, or own_slots beyond two, keep what is read for longer"
T = TypeVar("T")


class Held(NamedTuple):
    """What was brought last, of one tensor."""

    box: Box
    values: Tensor


class Live:
    """``identity`` is None: a job that was forgotten may come to the same step again, with other values."""

    identity = None

    def __init__(self, job: str, step: int | None, socket: str | os.PathLike[str] | None) -> None:
        """Raises CkptdError: no daemon, no such job or step."""
        self._job, self._socket = job, socket
        self.notes: list[str] = []
        self._reading = open_job(job, step, socket=socket)
        self._durable = False
        self.step, self._catalogue = self._reading.step, self._reading.catalogue
        self.where = f"{job}, step {self.step}"
        self.objects, self.aliases = self._catalogue.objects.keys(), self._catalogue.aliases
        self._at = {key: number for number, key in enumerate(self._catalogue.tensors)}
        self._keys = list(self._at)
        self._held: dict[tuple[str, int | None], Held] = {}
        self._blobs: dict[str, dict[int, bytes]] = {}

    def tensors(self) -> list[Entry]:
        """What its first owner says of a tensor is what the catalogue has. Whether that is all of it shows when it is read."""
        return [Entry(key, dtype, shape, role, self._owner(key)) for key, (dtype, shape, role) in self._catalogue.tensors.items()]

    def _owner(self, key: str) -> int | None:
        return self._catalogue.owners_of(key)[0] if self._catalogue.is_per_rank("t", key) else None

    def blobs(self, name: str) -> bytes | dict[int, bytes]:
        found = self._blobs[name] = self._ask(lambda reading: reading.blobs(name))
        if not self._catalogue.is_per_rank("o", name):
            return found[ALL]
        return {rank: blob for rank, blob in found.items() if rank != ALL}

    # --- tensors ------------------------------------------------------------------------------------------------
    def read(self, key: str, box: Box, dest: memoryview, rank: int | None = None) -> None:
        held = self._held.get((key, rank))
        if held is None or not contains(held.box, box):
            self._held.clear()  # its memory first
            self._held = self._brought(key, box, rank)
            held = self._held[key, rank]
        out = torch.frombuffer(dest, dtype=held.values.dtype).view(box.sizes)
        out.copy_(held.values[window(held.box, box)])

    def _brought(self, key: str, box: Box, rank: int | None) -> dict[tuple[str, int | None], Held]:
        boxes = {key: self._around(key, box)}
        boxes |= {other: Box.whole(self._shape(other)) for other in self._after(key, rank)}
        held = {name: Held(box, torch.empty(box.sizes, dtype=TORCH[self._dtype(name)])) for name, box in boxes.items()}
        rows = [(name, one.box.offsets, one.box.sizes, one.values) for name, one in held.items()]
        self._ask(lambda reading: reading.read(rows, rank))
        return {(name, rank): one for name, one in held.items()}

    def _around(self, key: str, box: Box) -> Box:
        whole = Box.whole(self._shape(key))
        return next((slab for slab in slabs(whole, whole, ITEMSIZE[self._dtype(key)], WINDOW_BYTES) if contains(slab, box)), box)

    def _after(self, key: str, rank: int | None) -> Iterator[str]:
        """Small ones that are likely to be asked for next."""
        left = TOGETHER_BYTES - self._nbytes(key)
        for other in self._keys[self._at[key] + 1 :][:TOGETHER_MAX]:
            nbytes = self._nbytes(other)
            if left < nbytes:
                return
            if 0 < nbytes <= SMALL_BYTES and self._owner(other) == rank:
                left -= nbytes
                yield other

    def _dtype(self, key: str) -> str:
        return self._catalogue.tensors[key][0]

    def _shape(self, key: str) -> tuple[int, ...]:
        return self._catalogue.tensors[key][1]

    def _nbytes(self, key: str) -> int:
        return Box.whole(self._shape(key)).volume * ITEMSIZE[self._dtype(key)]

    # --- where it is --------------------------------------------------------------------------------------------
    def _ask(self, call: Callable[[Reading], T]) -> T:
        try:
            return call(self._reading)
        except (CkptdError, OSError) as error:
            if self._durable:
                raise
            self._go_on(error)
        return call(self._reading)

    def _go_on(self, error: Exception) -> None:
        """Raises CkptdError: storage has no copy of what cannot be read from memory any more."""
        self._reading.close()
        what = f"step {self.step} cannot be read from memory any more ({_what(error)})"
        try:
            found = open_job(self._job, self.step, "durable", socket=self._socket)
        except CkptdError as none:
            raise CkptdError(f"{what}, and there is no copy on storage ({none.what})", where=self._job, hint=HINT) from error
        if not self._is_of(found):
            found.close()
            raise CkptdError(f"{what}, and the step {self.step} on storage is another one", where=self._job, hint=HINT) from error
        self._reading, self._durable = found, True
        self.notes.append(f"{what}: the rest is of its copy on storage")

    def _is_of(self, found: Reading) -> bool:
        """The same capture: a job that was forgotten may come to that step again, with other generators, times and places."""
        same = (found.epoch, found.world, found.tensors) == (self._reading.epoch, self._reading.world, self._reading.tensors)
        return same and all(found.blobs(name) == blobs for name, blobs in self._blobs.items())

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.close()


def _what(error: Exception) -> str:
    return error.what if isinstance(error, CkptdError) else str(error)
