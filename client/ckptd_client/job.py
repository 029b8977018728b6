"""One capture in progress: what is still to be copied, by whom, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ckptd_client.collectives import storages
from ckptd_client.copying import Copy
from ckptd_client.handles import Handle
from ckptd_client.plan import Plan
from ckptd_client.segments import SlotView
from ckptd_client.standing import Standing
from ckptd_client.statics import Content, Mark
from ckptd_client.versions import Versions, Watched

NAMED_MAX = 3  # tensors in the reason of a void

class DeviceBatch(Protocol):
    """Copies that an accelerator makes by itself once they are enqueued (device.py)."""

    def enqueue(self) -> bool:
        """Side stream: wait for the training stream's mark, then copy. False: not all, for a snapshot that is void by now needs no
        more. By the capture thread, again once there is room."""

    def has_room(self) -> bool:
        """Would ``enqueue`` find something to do? Does not wait."""

    def hold_back(self) -> None:
        """The training stream waits for what is on its way; the host does not."""

    def done(self) -> bool:
        """Are all bytes in the slot? Does not wait."""

    def compare(self, copies: Sequence[Copy]) -> None:
        """Side stream: behind the copies, compare the slot with what training has made of the sources by now. Called once, before
        ``hold_back``."""

    def finish(self) -> tuple[Sequence[Copy], Sequence[Copy]]:
        """After ``done``: let go of the sources. What differs, of the frozen ones by a sample and of those compared. Raises
        RuntimeError when the device failed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    copy: Copy
    begin: int
    length: int
    first: bool
    last: bool


@dataclass(eq=False)
class Job:
    """``copied``: no source is read by a thread any more. ``looked``: the version counters were asked since. ``stop``: why it is
    void. ``over``: nothing can stop it now."""

    step: int
    grant: int
    came_at: int  # newest step called when the grant came
    slot: SlotView
    frozen: SlotView | None  # what the snapshot leans on
    fills: bool  # is the frozen slot captured into?
    found: bool  # was it captured before this rank's newest start or restore, and not compared since?
    connection: int
    plan: Plan
    handle: Handle
    objects_bytes: int
    keep: bool
    audit: bool
    content: Content | None = None  # of what is frozen, as snapshot() saw it
    versions: Versions = field(default_factory=lambda: Versions((), ()))  # as snapshot() saw them
    of_state: Versions = field(default_factory=lambda: Versions((), ()))  # the optimizers', not asked after the first fence
    copies: list[Copy] = field(default_factory=list)  # on the CPU, for the threads
    fenced: list[Copy] = field(default_factory=list)  # what an audit compares, wherever it lies
    static: list[tuple[Copy, Tensor, Mark]] = field(default_factory=list)  # frozen, copied this time; what it is of
    held: list[Copy] = field(default_factory=list)  # frozen, in their slot since an earlier snapshot
    unproven: list[tuple[Copy, Tensor, Mark]] = field(default_factory=list)  # the same, to be compared this time
    compared: bool = False  # all that is frozen, byte by byte
    doubtful: tuple[int, int, list[str]] | None = None  # steps sealed before; what in their frozen part may not be what it was
    device: DeviceBatch | None = None
    blocked_s: float = 0.0
    stop: str = ""
    looked: bool = False
    copied_at: float = 0.0
    thread: int = field(default_factory=threading.get_ident)  # that called snapshot()
    stood: Standing | None = None  # where it was when the last byte was copied
    written: dict[str, set[str]] = field(default_factory=dict)  # owner -> keys that were written past the fence
    over: bool = False
    enqueued: bool = False
    in_flight: list[int] = field(default_factory=list)  # the threads that copy a chunk of it
    began: float = field(default_factory=time.monotonic)
    capture_s: float = 0.0
    _storages: set[int] | None = None
    _chunks: Iterator[Chunk] | None = None
    _exhausted: bool = False

    def next_chunk(self) -> Chunk | None:
        """Called under the engine's lock, by the thread that copies it. That one is in flight before it has the chunk: where it is
        interrupted in between, the chunk is lost."""
        if self.stop:
            self._exhausted = True
        if self._exhausted:
            return None
        self.in_flight.append(threading.get_ident())
        if self._chunks is None:
            self._chunks = _chunks(self.copies)
        chunk = next(self._chunks, None)
        if chunk is None:
            self._exhausted = True
            self.in_flight.remove(threading.get_ident())
        return chunk

    def were_written(self, found: Collection[Copy | Watched], how: str) -> None:
        """Void, as these keys of their owners are not what snapshot() saw. ``how``: "written before the fence", ..."""
        for one in found:
            self.written.setdefault(one.owner.name, set()).add(one.key)
        keys = sorted(one.key for one in found)
        more = f" and {len(keys) - NAMED_MAX} more" if len(keys) > NAMED_MAX else ""
        self.stop = self.stop or f"{how} {', '.join(keys[:NAMED_MAX])}{more}"

    def were_stepped(self, keys: set[str]) -> None:
        """An optimizer most of whose parameters were written steps past the fence, and writes its state beside them."""
        for name, stepped in self.plan.stepped.items():
            if 2 * len(stepped & keys) > len(stepped):
                self.written[name] = set()

    @property
    def storages(self) -> set[int]:
        """Addresses of what it reads in the background; asked for only by whoever is to write past version counters."""
        if self._storages is None:
            self._storages = storages([*self.versions.tensors, *self.of_state.tensors])
        return self._storages

    @property
    def slots(self) -> list[SlotView]:
        return [self.slot] if self.frozen is None else [self.slot, self.frozen]

    @property
    def on_device(self) -> bool:
        """Bytes are still on their way into the slot, which no stop can call back. What is large is so before it is enqueued."""
        return self.device is not None and not self.device.done()

    @property
    def to_enqueue(self) -> bool:
        """Its device is still to be asked for copies."""
        return self.device is not None and not (self.enqueued or self.stop)

    @property
    def copied(self) -> bool:
        device_done = self.device is None or self.enqueued
        return self._exhausted and not self.in_flight and (device_done or bool(self.stop))


def _chunks(copies: list[Copy]) -> Iterator[Chunk]:
    for copy in copies:
        spans = list(copy.chunks())
        for index, (begin, length) in enumerate(spans):
            yield Chunk(copy, begin, length, index == 0, index == len(spans) - 1)


OnSealed = Callable[[Job], None]
OnVoid = Callable[[Job, str], None]
