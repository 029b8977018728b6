"""Captures from an accelerator: a side stream copies, the training stream waits for it, the host never does (design D6)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ckptd.core.failpoint import failpoint
from ckptd_client.accelerator import Accelerator, of
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
        self, accelerator: Accelerator, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView]
    ) -> None:
        self._accelerator, self._slots = accelerator, slots
        self._sources: list[tuple[Tensor, Copy]] = [(copy.source, copy) for copy in late]
        self._sources += _packed(early)
        self._ready, self._done = accelerator.event(), accelerator.event()
        self._ready.record(accelerator.training())
        self._held, self._samples = held, OnDevice(())
        self._compared: list[tuple[Copy, Tensor]] = []  # and whether they differ, on the device

    @classmethod
    def of(cls, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView]) -> Batch | None:
        """None without copies. Raises RuntimeError for several devices and for one that is not supported."""
        devices = {copy.source.device for copy in (*early, *late, *held)}
        if not devices:
            return None
        if len(devices) > 1:
            raise RuntimeError(f"tensors on {' and '.join(sorted(map(str, devices)))}: one device per rank is supported")
        return cls(of(devices.pop()), early, late, held, slots)

    def enqueue(self) -> None:
        for slot in self._slots:
            _pin(slot.segment, self._accelerator)
        with self._accelerator.aside() as side, torch.no_grad():
            samples = OnDevice(self._held)  # what it brings to the device need not wait for training
            side.wait_event(self._ready)
            for source, copy in self._sources:
                failpoint("capture.tensor")
                copy.target_tensor().copy_(as_bits(source), non_blocking=True)
            samples.compare()
            self._done.record(side)
        self._samples = samples

    def hold_back(self) -> None:
        self._accelerator.training().wait_event(self._done)

    def compare(self, copies: Sequence[Copy]) -> None:
        now = self._accelerator.event()
        now.record(self._accelerator.training())
        with self._accelerator.aside() as side, torch.no_grad():
            side.wait_event(now)
            self._compared = [(copy, copy.difference()) for copy in copies]
            self._done.record(side)

    def done(self) -> bool:
        return bool(self._done.query())

    def finish(self) -> tuple[list[Copy], list[Copy]]:
        self._done.synchronize()
        self._sources.clear()
        with self._accelerator.aside():
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


def _pin(segment: Segment, accelerator: Accelerator) -> None:
    """Register the mapping, once, so that copies into it run beside the kernels. Without it they are right but slow."""
    if segment.pinned:
        return
    segment.pinned = True
    registration = accelerator.registration
    for at in range(0, segment.nbytes, PIN_PIECE_BYTES):
        registration.register(segment.address + at, min(PIN_PIECE_BYTES, segment.nbytes - at))
        segment.before_unmap.append(partial(registration.unregister, segment.address + at))
