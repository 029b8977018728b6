"""Captures from an accelerator: a side stream copies, the training stream waits for it, the host never does (design D6)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ckptd.core.failpoint import failpoint
from ckptd_client.copying import Copy
from ckptd_client.dtypes import as_bits
from ckptd_client.samples import OnDevice
from ckptd_client.segments import Segment, SlotView

PIN_PIECE_BYTES = 64 * 1024**3  # cudaHostRegister of one range of 512 GiB or more fails
PACK_ALIGN_BYTES = 64


class Batch:
    """All copies of one snapshot from one device.

    ``early``: cloned on the training stream now, as they may be written before the side stream gets to them; ``late``: the
    fence protects them; ``held``: frozen, in their slot already. Sources are referenced until the copies are done, so that
    their memory goes to nobody else.
    """

    def __init__(
        self, device: torch.device, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView]
    ) -> None:
        self._device, self._slots = device, slots
        self._side = _side_stream(device)
        self._sources: list[tuple[Tensor, Copy]] = [(copy.source, copy) for copy in late]
        with torch.cuda.device(device):
            self._sources += _packed(early)
            self._ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))
            self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._held, self._samples = held, OnDevice(())
        self._compared: list[tuple[Copy, Tensor]] = []  # and whether they differ, on the device

    @classmethod
    def of(cls, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView]) -> Batch | None:
        """None without copies. Raises RuntimeError for other accelerators than CUDA and for several devices."""
        devices = {copy.source.device for copy in (*early, *late, *held)}
        if not devices:
            return None
        if len(devices) > 1 or next(iter(devices)).type != "cuda":
            raise RuntimeError(
                f"tensors on {sorted(map(str, devices))}: one CUDA device per rank is supported"
            )
        return cls(devices.pop(), early, late, held, slots)

    def enqueue(self) -> None:
        for slot in self._slots:
            _pin(slot.segment)
        with torch.cuda.device(self._device), torch.cuda.stream(self._side), torch.no_grad():
            samples = OnDevice(self._held)  # what it brings to the device need not wait for training
            self._side.wait_event(self._ready)
            for source, copy in self._sources:
                failpoint("capture.tensor")
                copy.target_tensor().copy_(as_bits(source), non_blocking=True)
            samples.compare()
            self._done.record(self._side)
        self._samples = samples

    def hold_back(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def compare(self, copies: Sequence[Copy]) -> None:
        with torch.cuda.device(self._device):
            now: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            now.record(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side), torch.no_grad():
                self._side.wait_event(now)
                self._compared = [(copy, copy.difference()) for copy in copies]
                self._done.record(self._side)

    def done(self) -> bool:
        return bool(self._done.query())

    def finish(self) -> tuple[list[Copy], list[Copy]]:
        self._done.synchronize()
        self._sources.clear()
        with aside(self._device):
            sampled = self._samples.differing()
            compared = [copy for copy, differs in self._compared if bool(differs)]
        self._held, self._samples, self._compared = [], OnDevice(()), []
        return sampled, compared


def _packed(copies: Sequence[Copy]) -> list[tuple[Tensor, Copy]]:
    """Clones in one buffer, made by few kernels on the training stream."""
    if not copies:
        return []
    buffer = torch.empty(
        sum(_room(copy) for copy in copies), dtype=torch.uint8, device=copies[0].source.device
    )
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    packed: list[tuple[Tensor, Copy]] = []
    at = 0
    for copy in copies:
        bits = as_bits(copy.source)
        clone = buffer[at : at + copy.nbytes].view(bits.dtype).view(bits.shape)
        targets, sources = by_type.setdefault(bits.dtype, ([], []))
        targets.append(clone)
        sources.append(bits)
        packed.append((clone, copy))
        at += _room(copy)
    with torch.no_grad():
        for targets, sources in by_type.values():
            torch._foreach_copy_(targets, sources)
    return packed


def _room(copy: Copy) -> int:
    return -(-copy.nbytes // PACK_ALIGN_BYTES) * PACK_ALIGN_BYTES


_streams: dict[int, Any] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """What is done within waits for our own copies at most, never for the training stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_side_stream(device)):
        yield


def _side_stream(device: torch.device) -> Any:
    index = device.index if device.index is not None else torch.cuda.current_device()
    with _lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[index]


def _pin(segment: Segment) -> None:
    """Register the mapping, once, so that copies into it run beside the kernels. Without it they are right but slow."""
    if segment.pinned:
        return
    segment.pinned = True
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for at in range(0, segment.nbytes, PIN_PIECE_BYTES):
        cudart.cudaHostRegister(segment.address + at, min(PIN_PIECE_BYTES, segment.nbytes - at), 0)
        segment.before_unmap.append(partial(cudart.cudaHostUnregister, segment.address + at))
