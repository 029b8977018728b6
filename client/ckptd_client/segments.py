"""The daemon's memory in this process: mapped memfds and the slots in them (design D1)."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ckptd_client import forks, graphs, libc

REGISTERED_BYTES = 1024**3  # of one piece that an accelerator registers: it takes a third of a second, and locks the mappings
WARM_PIECE_BYTES = 64 * 1024 * 1024  # page tables are filled in pieces, so that a capture need not wait long


class Segment:
    """One mapped memfd. Unmapped when nobody has it pinned any more; never by the garbage collector."""

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        """Takes ``fd``. Raises OSError when it cannot be mapped."""
        self.name, self.nbytes = name, nbytes
        stat = os.fstat(fd)
        self.identity = (stat.st_dev, stat.st_ino)
        try:
            if stat.st_size < nbytes:
                raise OSError(f"segment {name} has {stat.st_size} bytes, {nbytes} were promised")
            self.address = libc.map_shared(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        self.fd = forks.guard(fd)
        libc.advise(self.address, nbytes, libc.MADV_DONTFORK)
        libc.advise(self.address, nbytes, libc.MADV_DONTDUMP)
        self.refused = ""  # why an accelerator cannot register it
        self._registered = 0  # bytes from its beginning on
        self._before_unmap: list[Callable[[], object]] = []
        self._pins = 1
        self._lock = threading.Lock()

    def pin(self) -> None:
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        with self._lock:
            self._pins -= 1
            last = self._pins == 0
        if last:
            for undo in self._before_unmap:
                undo()
            libc.unmap(self.address, self.nbytes)
            forks.close(self.fd)


    # --- for an accelerator (device.py) -------------------------------------------------------------------------
    @property
    def registered(self) -> bool:
        """All of it."""
        return self._registered >= self.nbytes

    def next_piece(self) -> tuple[int, int] | None:
        """(address, bytes) that are to be registered next."""
        if self.refused or self.registered:
            return None
        return self.address + self._registered, min(REGISTERED_BYTES, self.nbytes - self._registered)

    def piece_registered(self, trouble: str, undo: Callable[[], object]) -> None:
        """The next piece is, or the trouble with it."""
        piece = self.next_piece()
        assert piece is not None, "there is a next piece"
        if trouble:
            self.refused = trouble
            return
        self._registered += piece[1]
        self._before_unmap.append(undo)

    def holds(self, address: int, nbytes: int) -> bool:
        return self.address <= address and address + nbytes <= self.address + self.nbytes

    def uncut(self, address: int) -> int:
        """Bytes from there on that were registered as one."""
        return REGISTERED_BYTES - (address - self.address) % REGISTERED_BYTES


@dataclass(frozen=True, eq=False)
class SlotView:
    """One slot: ``capacity`` bytes at ``address``, the payload's first byte."""

    number: int
    segment: Segment
    offset: int
    capacity: int

    @property
    def address(self) -> int:
        return self.segment.address + self.offset

    def pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of pieces to warm, on page boundaries."""
        page = os.sysconf("SC_PAGESIZE")
        start = self.address // page * page
        stop = min(self.address + self.capacity, self.segment.address + self.segment.nbytes)
        return [(at, min(WARM_PIECE_BYTES, stop - at)) for at in range(start, stop, WARM_PIECE_BYTES)]


def bytes_tensor(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] over mapped memory; the caller keeps the segment pinned while it lives."""
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)


class Segments:
    """What is mapped now. Only the link's thread changes it; others hold SlotViews with their segments pinned."""

    def __init__(self) -> None:
        self.slots: dict[int, SlotView] = {}
        self._known: dict[tuple[int, int], Segment] = {}
        self._named: dict[str, Segment] = {}  # of this connection
        self._dropped: deque[Segment] = deque()

    def map_slot(
        self, number: int, name: str, nbytes: int, offset: int, capacity: int, fd: int | None
    ) -> SlotView:
        """Raises OSError when the memory cannot be mapped, KeyError for a name never sent with a descriptor."""
        if fd is not None:
            self._named[name] = self._map(name, fd, nbytes)
        segment = self._named[name]
        if offset < 0 or offset + capacity > segment.nbytes:
            raise OSError(f"slot {number} leaves its segment {name}")
        view = SlotView(number, segment, offset, capacity)
        segment.pin()
        old = self.slots.get(number)
        self.slots[number] = view
        if old is not None:
            self._dropped.append(old.segment)
        return view

    def _map(self, name: str, fd: int, nbytes: int) -> Segment:
        stat = os.fstat(fd)
        old = self._known.get((stat.st_dev, stat.st_ino))
        if old is not None and old.nbytes == nbytes:  # the same memory again, after a reconnect
            os.close(fd)
            old.name = name
            return old
        segment = Segment(name, fd, nbytes)
        self._known[segment.identity] = segment
        return segment

    def find(self, fd: int, nbytes: int) -> Segment | None:
        """The segment that maps this very memory, pinned for the caller."""
        stat = os.fstat(fd)
        segment = self._known.get((stat.st_dev, stat.st_ino))
        if segment is None or segment.nbytes != nbytes:
            return None
        segment.pin()
        return segment

    def retire(self, number: int) -> None:
        """The slot goes; its segment too once no slot of it is left."""
        view = self.slots.pop(number, None)
        if view is None:
            return
        self._dropped.append(view.segment)
        self.drop_unused()

    def forget_connection(self) -> None:
        """Slots and names were the old connection's; the mappings stay, to be offered to the next daemon."""
        for number in list(self.slots):
            self._dropped.append(self.slots.pop(number).segment)
        self._named.clear()

    def offers(self) -> list[tuple[str, int]]:
        return [(segment.name, segment.fd) for segment in self._known.values()]

    def close(self) -> None:
        self.forget_connection()
        self.drop_unused()
        self.let_go()

    def let_go(self) -> None:
        """Unmap what was dropped: a device may take long over it, so nobody's lock is held. It would break a graph's capture, so
        what is dropped within one stays until the next call."""
        with graphs.unless_captured() as may:
            while may and self._dropped:
                self._dropped.popleft().unpin()

    def drop_unused(self) -> None:
        """Unmap what no slot lies in (after a reconnect: once the daemon has told all its slots)."""
        used = {view.segment.identity for view in self.slots.values()}
        for identity in [i for i in self._known if i not in used]:
            segment = self._known.pop(identity)
            self._named = {name: s for name, s in self._named.items() if s is not segment}
            self._dropped.append(segment)
