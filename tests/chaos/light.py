"""Ranks without torch: they speak the client's wire and hold thousands of tiny tensors; dozens of them fit on one machine."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import RankSocket, memfd_object, read_memfd_object
from ckptd.wire.world import pack_world
from tests.node.pieces import rows_in
from tests.slot_views import SlotViews
from tests.waiting import until

ELEMENTS = 192  # of each tensor: shared evenly by 48 and by 64 ranks
OBJECTS_BYTES = 64
U32 = npt.NDArray[np.uint32]


def values(tensors: int, first: int, count: int, step: int) -> U32:
    """What elements first to first+count-1 of each tensor are after so many steps: a row per tensor."""
    which = np.arange(tensors, dtype=np.uint32)[:, None] * np.uint32(2654435761)
    return which + np.arange(first, first + count, dtype=np.uint32) * np.uint32(40503) + np.uint32(step)


class LightRank:
    """One of ``world`` ranks that share each tensor evenly."""

    def __init__(self, socket: Path, job: str, rank: int, world: int, tensors: int, tier: int) -> None:
        assert ELEMENTS % world == 0, "an even share"
        self.rank, self.tensors, self.count = rank, tensors, ELEMENTS // world
        self.first = rank * self.count
        self.link = RankSocket.connect(socket)
        self.heard: deque[tuple[Any, list[int]]] = deque()
        self.seen: list[str] = []  # what was told of snapshots and failures
        self.level, self.void = -1, False  # of the newest snapshot
        self._views = SlotViews()
        box = Box((self.first,), (self.count,))
        rows = ("U32", (ELEMENTS,), box, "param", UNIQUE, tier, False, ((0, world, rank),))
        items = [LayoutItem(self._key(i), *rows) for i in range(tensors)]
        self.layout = build_layout(rank, world, items, OBJECTS_BYTES)
        self._offsets = np.array([fragment.offset for fragment in self.layout.fragments]) // 4
        self.say(wire.Hello(wire.PROTOCOL_VERSION, job, os.getpid()))
        self.node: dict[str, Any] = {}
        self.restored: U32 | None = None
        self.step: int | None = None
        self.ready = False

    @staticmethod
    def _key(number: int) -> str:
        return f"layers.{number // 16}.block.weight_{number % 16}"

    def say(self, message: object, body: bytes = b"") -> None:
        fds = [memfd_object(body)] if body else []
        assert self.link.send(message, fds, timeout_s=60), f"rank {self.rank}: the daemon takes nothing"
        for fd in fds:
            os.close(fd)

    def join(self, attempt: str, ranks: Sequence[str], nodes: Sequence[dict[str, Any]], ask: dict[str, Any]) -> None:
        body = pack_world(ranks, nodes)
        record_bytes = 2 * len(self.layout.encoded)
        self.say(wire.Join(attempt, self.rank, self.layout.payload_bytes, ask, record_bytes=record_bytes), body)

    def read(self) -> None:
        """What has come, and answer what asks for no thought."""
        while True:
            try:
                got = self.link.recv(0)
            except TimeoutError:
                return
            assert got is not None, f"rank {self.rank}: the daemon is gone"
            message, fds = got
            getattr(self, f"_on_{type(message).__name__.lower()}", lambda message, fds: None)(message, fds)
            for fd in fds:
                os.close(fd)

    def _on_welcome(self, message: wire.Welcome, fds: list[int]) -> None:
        self.node = message.node

    def _on_ready(self, message: wire.Ready, fds: list[int]) -> None:
        self.ready = True

    def _on_failed(self, message: wire.Failed, fds: list[int]) -> None:
        raise AssertionError(f"rank {self.rank}: {message}")

    def _on_refused(self, message: wire.Refused, fds: list[int]) -> None:
        raise AssertionError(f"rank {self.rank}: {message}")

    def _on_mapped(self, message: wire.Mapped, fds: list[int]) -> None:
        self._views.take(message, fds)

    # --- snapshots ----------------------------------------------------------------------------------------------
    def _on_grantslot(self, message: wire.GrantSlot, fds: list[int]) -> None:
        """As the client's snapshot(): ``capture`` fills it."""
        self.heard.append((message, []))

    def _on_takeback(self, message: wire.TakeBack, fds: list[int]) -> None:
        self.heard = deque(one for one in self.heard if one[0].grant != message.grant)
        self.say(wire.GaveUp(message.grant, -1, "taken back"))

    def _on_level(self, message: wire.Level, fds: list[int]) -> None:
        self.level, self.void = message.level, bool(message.void)
        self.seen.append(f"step {message.step}: {message.level} of {message.wanted} {message.void}")

    def capture(self, step: int) -> None:
        """Under the grant that has come."""
        self.level, self.void = -1, False
        grant, _ = self.heard.popleft()
        memory = np.frombuffer(self._views[grant.slot], np.uint32, self.layout.payload_bytes // 4)
        memory[: OBJECTS_BYTES // 4] = 0
        memory.view(np.uint8)[0] = 0x80  # an empty msgpack map
        content = values(self.tensors, self.first, self.count, step)
        for at in range(self.count):
            memory[self._offsets + at] = content[:, at]
        self.say(wire.Called(max(step, grant.from_step)))
        note = wire.SealedSlot(grant.slot, grant.grant, max(step, grant.from_step), self.layout.layout_id, 1)
        self.say(note, self.layout.encoded)

    # --- restore ------------------------------------------------------------------------------------------------
    def _on_opened(self, message: wire.Opened, fds: list[int]) -> None:
        if message.snapshot is None:
            return
        self.step = message.snapshot[1]
        catalogue = msgpack.unpackb(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), strict_map_key=False)
        assert len(catalogue["tensors"]) == self.tensors
        self.restored = np.zeros((self.tensors, self.count), np.uint32)
        rows = [[self._key(i), "U32", [ELEMENTS], [self.first], [self.count]] for i in range(self.tensors)]
        self.say(wire.Wants(message.round), msgpack.packb({"tensors": rows, "objects": []}))

    def _on_loadplan(self, message: wire.LoadPlan, fds: list[int]) -> None:
        assert self.restored is not None, "wants were asked for before"
        plan = msgpack.unpackb(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), strict_map_key=False)
        segments = [mmap.mmap(fd, size, prot=mmap.PROT_READ) for fd, size in zip(fds[1:], message.segment_bytes, strict=True)]
        memory = [np.frombuffer(segment, np.uint32, len(segment) // 4) for segment in segments]
        for want, ((at,), (size,)), segment, offset, ((stored_at,), _) in rows_in(plan):
            first = offset // 4 + at - stored_at
            self.restored[want, at - self.first : at - self.first + size] = memory[segment][first : first + size]
        if plan["last"]:
            self.say(wire.Loaded(message.round, True))
        else:
            self.say(wire.LoadedPart(message.round, plan["part"]))

    def holds(self, step: int) -> bool:
        """Is all that it wanted back as it was after this step?"""
        expected = values(self.tensors, self.first, self.count, step)
        return self.step == step and self.restored is not None and np.array_equal(self.restored, expected)

    def close(self) -> None:
        self.link.close()


def pump(ranks: Sequence[LightRank], done: Callable[[LightRank], bool], timeout_s: float, what: str) -> float:
    """Read for all of them until each is done; the seconds that took."""
    began = time.monotonic()

    def over() -> bool:
        for rank in ranks:
            rank.read()
        return all(map(done, ranks))

    try:
        until(over, timeout_s, what)
    except AssertionError as error:
        left = [f"rank {rank.rank} ({'; '.join(rank.seen[-2:])})" for rank in ranks if not done(rank)]
        raise AssertionError(f"{error}: {len(left)} ranks are not done: {', '.join(left[:3])}") from error
    return time.monotonic() - began
