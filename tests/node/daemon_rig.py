"""A whole daemon in the test's own event loop, and ranks that speak to it over its socket: real rooms, no other process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from ckptd.config import Config
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.daemon.job import JobShell
from ckptd.daemon.server import Daemon
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import RankSocket, memfd_object, read_memfd_object
from ckptd.wire.world import pack_world
from tests.node.links import eventually
from tests.node.slots import small_layout, write_payload
from tests.short import short_folder
from tests.slot_views import SlotViews

TICK_S = 0.02
JOB = "rig"
M = TypeVar("M")


class Rank:
    """One connection of this very process."""

    def __init__(self, daemon: Daemon, job: str = JOB) -> None:
        self.daemon, self.job = daemon, job
        self.link = RankSocket.connect(daemon.config.socket)
        self.seen: list[tuple[Any, list[int]]] = []
        self.views = SlotViews()
        self.captured: dict[int, int] = {}  # step -> grant
        self.link.send(wire.Hello(wire.PROTOCOL_VERSION, job, os.getpid()))

    def say(self, message: object, fds: tuple[int, ...] = ()) -> None:
        assert self.link.send(message, fds)

    async def heard(self, kind: type[M], **fields: Any) -> tuple[M, list[int]]:
        """The next message of this class with these fields; those before it stay to be asked for."""

        def look() -> tuple[M, list[int]] | None:
            self.read()
            for index, (message, fds) in enumerate(self.seen):
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    del self.seen[index]
                    return message, fds
            return None

        found: tuple[M, list[int]] = await eventually(
            look, what=f"{kind.__name__} {fields}, seen: {self.seen}"
        )
        return found

    def read(self) -> None:
        while True:
            try:
                got = self.link.recv(0)
            except TimeoutError:
                return
            if got is None:
                return
            if isinstance(got[0], wire.Mapped):
                self.views.take(*got)
            if not (isinstance(got[0], wire.TakeBack) and self._gave_up(got[0].grant)):
                self.seen.append(got)

    def _gave_up(self, number: int) -> bool:
        """As the client does with a grant that it has not used: one of an earlier epoch may come right after a join."""
        for index, (message, _) in enumerate(self.seen):
            if isinstance(message, wire.GrantSlot) and message.grant == number:
                del self.seen[index]
                self.say(wire.GaveUp(number, -1, "taken back"))
                return True
        return False

    def join(self, attempt: str, state_bytes: int | None = None, rank: int = 0, *, grant: int = 0, **ask: Any) -> None:
        node = asdict(self.daemon.services.node)
        size = layout_here().payload_bytes if state_bytes is None else state_bytes
        full = {"step": None, "source": None, "allow_fresh": False} | ask
        self.say_join(wire.Join(attempt, rank, size, full, grant=grant), pack_world([node["node"]], [node]))

    def say_join(self, message: wire.Join, world: bytes) -> None:
        fd = memfd_object(world)
        self.say(message, (fd,))
        os.close(fd)

    async def begin(self, attempt: str) -> None:
        """Join where nothing is to be restored."""
        self.join(attempt)
        await self.heard(wire.Ready)

    async def capture(
        self, step: int, seed: int | None = None, *, seal: bool = True, layout: Layout | None = None
    ) -> wire.GrantSlot:
        """Fill the slot of the next grant, as snapshot(step) does."""
        grant, _ = await self.heard(wire.GrantSlot)
        await eventually(lambda: grant.slot in self.views)
        layout = layout or layout_here()
        objects = write_payload(self.views[grant.slot], layout, seed=step if seed is None else seed)
        self.say(wire.Called(max(step, grant.from_step)))
        if seal:
            self.seal(grant, step, layout, objects)
        return grant

    def seal(self, grant: wire.GrantSlot, step: int, layout: Layout, objects: int) -> None:
        self.captured[step] = grant.grant
        fd = memfd_object(layout.encoded)
        self.say(wire.SealedSlot(grant.slot, grant.grant, step, layout.layout_id, objects), (fd,))
        os.close(fd)

    async def sealed(self, step: int, seed: int | None = None, *, layout: Layout | None = None) -> None:
        await self.capture(step, seed, layout=layout)
        while (await self.heard(wire.Level, step=step))[0].void:
            self.say(wire.Called(step, True))  # must=True
            await self.capture(step, seed, layout=layout)

    def waits(self, step: int, level: str) -> None:
        self.say(wire.WaitFor(step, self.captured[step], level))

    async def durable(self, step: int) -> None:
        """It asks for that, and is told so."""
        self.waits(step, "durable")
        await self.heard(wire.Level, step=step, durable=True)

    async def opened(self) -> tuple[wire.Opened, dict[str, Any]]:
        note, fds = await self.heard(wire.Opened)
        catalogue = read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX) if fds else b"\x80"
        return note, msgpack.unpackb(catalogue, strict_map_key=False)

    def want(self, number: int, tensors: list[Any], objects: tuple[str, ...] = ()) -> None:
        fd = memfd_object(msgpack.packb({"tensors": tensors, "objects": objects}))
        self.say(wire.Wants(number), (fd,))
        os.close(fd)

    def close(self) -> None:
        self.link.close()
        for _, fds in self.seen:
            for fd in fds:
                os.close(fd)
        self.seen.clear()


def layout_here() -> Layout:
    """small_layout is one rank's of two: the same, whole."""
    whole = Box.whole
    items = [
        (f.key, f.dtype, f.shape, whole(f.shape), f.role, f.sharing, f.tier) for f in small_layout().fragments
    ]
    return build_layout(0, 1, items, objects_capacity=4096)


def everything(layout: Layout) -> list[Any]:
    return [[f.key, f.dtype, f.shape, f.box.offsets, f.box.sizes] for f in layout.fragments]


class Rig:
    def __init__(self, root: Path, **settings: Any) -> None:
        defaults = {
            "node_id": "rig", "state_dir": root / "state", "socket": root / "s", "memory_budget": "64MiB",
            "plain_loopback": True, "bulk_mode": "none", "replicas": 0, "inventory_timeout_s": 1.0,
            "steward_timeout_s": 20.0, "breakpoint_grace_s": 3600.0,
        }  # fmt: skip
        self.root = root
        self.daemon = Daemon(Config(**{**defaults, **settings}))
        self.ranks: list[Rank] = []
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.daemon._start()
        self._ticking = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.daemon.tick_jobs()
            await asyncio.sleep(TICK_S)

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        for rank in self.ranks:
            rank.close()
        await self.daemon._stop()
        self.daemon.arena.close()

    def rank(self, job: str = JOB) -> Rank:
        made = Rank(self.daemon, job)
        self.ranks.append(made)
        return made

    async def durable(self, *steps: int) -> Rank:
        """A rank in its first epoch, whose steps storage has."""
        rank = self.rank()
        await rank.begin("a")
        for step in steps:
            await rank.sealed(step)
            await rank.durable(step)
        return rank

    def shell(self, job: str = JOB) -> JobShell:
        return self.daemon.jobs[f"{os.getuid()}/{job}"]

    def problems(self) -> dict[str, str]:
        return {problem.kind: problem.text for problem in self.daemon.health.problems()}


@asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    with short_folder() as root:
        made = Rig(root, **settings)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()
