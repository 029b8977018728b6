"""Captures from an accelerator: a side stream copies, the training stream waits for it, the host never does (design D6)."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ckptd.core.failpoint import failpoint
from ckptd_client import graphs
from ckptd_client.accelerator import Accelerator, of_all
from ckptd_client.copying import Copy
from ckptd_client.digests import differing, digest
from ckptd_client.dtypes import as_bits
from ckptd_client.races import TRIES, goes_on_writing
from ckptd_client.samples import OnDevice
from ckptd_client.segments import Segment, SlotView, bytes_tensor
from ckptd_client.versions import counters

CLONE_BYTES_MAX = 64 * 1024**2  # what is larger is not cloned on the device: the training stream waits for its copy
CHUNK_BYTES = 64 * 1024**2  # of one copy: room that what is not contiguous takes on its way
WINDOW_BYTES = 1024**3  # on their way at once: what no stop can call back, and what holds the training stream up at most
PACK_ALIGN_BYTES = 64


class Batch:
    """All copies of one snapshot from one device.

    ``early``: cloned on the training stream now, or copied before it goes on, as they may be written before the side stream gets
    to them; ``late``: the fence protects them; ``held``: frozen, in their slot already; ``audited``: digested as they are copied.
    Sources are referenced until the copies are done, so that their memory goes to nobody else.
    """

    def __init__(
        self, accelerator: Accelerator, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView],
        audited: Sequence[Copy] = (),
    ) -> None:  # fmt: skip
        """Raises RuntimeError when the device does; nothing is on its way into a slot then."""
        self._accelerator, self._slots = accelerator, slots
        self._ready, self._done = accelerator.event(), accelerator.event()
        self._audited = frozenset(map(id, audited))
        self._digests: dict[int, Tensor] = {}  # of these, as they were copied
        self._ring = None if all(slot.segment.registered for slot in slots) else accelerator.ring()
        self._lock = threading.Lock()  # of what is enqueued
        self._sent: deque[tuple[torch.Event, int]] = deque()  # on their way: recorded behind so many bytes
        small = [copy for copy in early if copy.nbytes <= CLONE_BYTES_MAX]
        large = [copy for copy in early if copy.nbytes > CLONE_BYTES_MAX]
        self._sources: list[tuple[Tensor, Copy]] = [(copy.source, copy) for copy in late]
        self._sources += _packed(small)
        self._ready.record(accelerator.training())
        self._held, self._samples = held, OnDevice(())
        self._compared: list[tuple[Copy, Tensor]] = []  # and whether they differ, on the device
        self._large = [(copy.source, copy) for copy in large]
        self._rest: Iterator[int] = self._all()
        if large:
            try:
                self._copy_large()
            except Exception:
                with contextlib.suppress(RuntimeError):
                    self._done.synchronize()  # its slot is given back at once
                raise

    @classmethod
    def of(
        cls, early: list[Copy], late: list[Copy], held: list[Copy], slots: Sequence[SlotView], audited: Sequence[Copy] = (),
        unproven: Sequence[Copy] = (),
    ) -> Batch | None:  # fmt: skip
        """None where nothing lies on a device. ``unproven``: somebody else compares these on the side stream, which waits for
        training here, copies or not. Raises CkptdError for several devices."""
        accelerator = of_all({copy.source.device for copy in (*early, *late, *held, *unproven)})
        return None if accelerator is None else cls(accelerator, early, late, held, slots, audited)

    def enqueue(self) -> bool:
        with self._accelerator.aside() as side, self._lock, torch.no_grad():
            try:
                nbytes = 0
                while nbytes < CHUNK_BYTES:
                    more = next(self._rest, None)
                    if more is None:
                        return True
                    nbytes += more
                self._sent.append((self._accelerator.event(), nbytes))
                self._sent[-1][0].record(side)
                return False
            finally:
                self._done.record(side)  # also of what was enqueued before something failed: its slot is not free before that

    def has_room(self) -> bool:
        """A device that fails has: ``enqueue`` says what is wrong with it."""

        def room() -> bool:
            with self._lock:
                return self._has_room()

        return self._asks(room)

    def _asks(self, question: Callable[[], bool]) -> bool:
        """Without waiting for a graph's capture: False meanwhile. True where the device fails."""
        with graphs.unless_captured() as may, contextlib.suppress(RuntimeError):
            if not may:
                return False
            with self._accelerator.aside():
                return question()
        return True

    def _has_room(self) -> bool:
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()
        return sum(nbytes for _, nbytes in self._sent) < WINDOW_BYTES

    def _all(self) -> Iterator[int]:
        """Enqueue piece by piece, and tell its bytes."""
        samples = OnDevice(self._held)  # what it brings to the device need not wait for training
        with self._accelerator.aside() as side:
            side.wait_event(self._ready)
        yield from self._copies(self._sources)
        samples.compare()
        self._samples = samples

    def _copy_large(self) -> None:
        """Again where another thread has written one before its stream, most likely this thread's too, waited for the copy."""
        for _ in range(1 + TRIES):
            before = counters([source for source, _ in self._large])
            with self._accelerator.aside() as side, torch.no_grad():
                try:
                    side.wait_event(self._ready)
                    deque(self._copies(self._large), maxlen=0)
                finally:
                    self._done.record(side)
            self._accelerator.hold_back(self._done)
            after = counters([source for source, _ in self._large])
            written = [copy.key for (_, copy), then, now in zip(self._large, before, after, strict=True) if then != now]
            if not written:
                return
            self._ready.record(self._accelerator.training())
        raise goes_on_writing(written)

    def _copies(self, sources: list[tuple[Tensor, Copy]]) -> Iterator[int]:
        for source, copy in sources:
            failpoint("capture.tensor")
            yield from self._copy_one(source, copy)

    def _copy_one(self, source: Tensor, copy: Copy) -> Iterator[int]:
        for part, at in _parts(as_bits(source), copy.target, self._slots):
            place = bytes_tensor(at, part.nbytes).view(part.dtype).view(part.shape)
            if self._ring is not None:
                self._ring.out(part, place)
            else:
                place.copy_(part, non_blocking=True)
            yield part.nbytes
        if id(copy) in self._audited:
            self._digests[id(copy)] = digest(source)

    def hold_back(self) -> None:
        with self._lock:
            self._accelerator.hold_back(self._done)

    def compare(self, copies: Sequence[Copy]) -> None:
        now = self._accelerator.event()
        now.record(self._accelerator.training())
        with self._accelerator.aside() as side, torch.no_grad():
            try:
                side.wait_event(now)
                self._compared = [(copy, self._differs(copy)) for copy in copies]
            finally:
                self._done.record(side)

    def _differs(self, copy: Copy) -> Tensor:
        then = self._digests.get(id(copy))
        return copy.difference() if then is None else differing(then, digest(copy.source))

    def done(self) -> bool:
        """A device that fails is done: nothing of it arrives any more, and ``finish`` says why."""
        return self._asks(self._arrived)

    def _arrived(self) -> bool:
        arrived = self._done.query()
        if arrived:
            self._land()
        return arrived

    def _land(self) -> None:
        if self._ring is not None:
            self._ring.land()

    def finish(self) -> tuple[list[Copy], list[Copy]]:
        self._accelerator.stalled_s()  # this thread is on its device, which no other need be
        try:
            with self._accelerator.aside():
                self._done.synchronize()
                self._land()
                sampled = self._samples.differing()
                compared = [copy for copy, differs in self._compared if bool(differs)]
        finally:
            self._sources.clear()
            self._large.clear()
            self._digests.clear()
            self._held, self._samples, self._compared = [], OnDevice(()), []
        return sampled, compared


def _parts(source: Tensor, target: int, slots: Sequence[SlotView]) -> Iterator[tuple[Tensor, int]]:
    """Slices of at most CHUNK_BYTES and where each goes, none of them across two ranges that were registered apart."""
    if not source.nbytes:
        return
    segment = next(slot.segment for slot in slots if slot.segment.holds(target, source.nbytes))
    left = segment.uncut(target)
    if source.nbytes <= min(CHUNK_BYTES, left):
        yield source, target
    elif source.is_contiguous():
        flat, at = source.view(-1), 0
        while at < flat.numel():
            items = min(CHUNK_BYTES, segment.uncut(target + at * flat.itemsize)) // flat.itemsize
            items = min(items, flat.numel() - at)
            yield flat[at : at + items], target + at * flat.itemsize
            at += items
    else:
        half = source.shape[0] // 2
        for part in (source[:half], source[half:]) if half else (source[0],):
            yield from _parts(part, target, slots)
            target += part.nbytes


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


def register_next(segment: Segment, accelerator: Accelerator) -> bool:
    """One piece of it, off the critical path. False: nothing is left to be registered, or it cannot be."""
    piece = segment.next_piece()
    if piece is None:
        return False
    segment.piece_registered(accelerator.register(*piece), lambda: accelerator.unregister(piece[0]))
    return segment.next_piece() is not None
