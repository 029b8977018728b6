"""Daemons' rooms for replicas and fetches in one process: real arenas, real TCP, a control link that can lose."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ckptd.arena.arena import Arena, Slot
from ckptd.arena.frozen import content_of
from ckptd.core.ids import SnapshotId
from ckptd.protect.fetch import Fetcher
from ckptd.protect.frozen import FrozenParts
from ckptd.protect.pacer import Pacer
from ckptd.protect.replicate import Replicator
from ckptd.recover.passing import Passings
from ckptd.wire.bulk import Ticket
from ckptd.wire.codec import decode, encode
from ckptd.wire.keys import ClusterKey
from ckptd.wire.tcp import TcpTransport
from tests.node.proxy import Proxy
from tests.node.slots import MIB, OWN, fill_and_seal, fill_and_seal_frozen, small_arena

KEY = ClusterKey(bytes(32))


class Post:
    """Delivers messages between peers through the codec. ``copies(sender, to, message)`` says how often: 0 loses it."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.log: list[object] = []
        self.copies: Callable[[str, str, object], int] = lambda sender, to, message: 1

    def send(self, sender: str, to: str, job: str, message: object) -> bool:
        if to not in self.peers:
            return False
        self.log.append(message)
        for _ in range(self.copies(sender, to, message)):
            asyncio.get_running_loop().call_soon(self._deliver, sender, to, job, encode(message))
        return True

    def _deliver(self, sender: str, to: str, job: str, data: bytes) -> None:
        peer = self.peers.get(to)
        if peer is not None:
            message = decode(data)
            rooms = peer.replicator, peer.fetcher, peer.passings
            assert any(room.on_message(sender, job, message) for room in rooms)

    def sent(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.log)


class Peer:
    def __init__(
        self, post: Post, node: str, *, mode: str = "none", budget_bytes: int = 64 * MIB, pacer: Pacer | None = None
    ) -> None:
        self.node, self.post = node, post
        self.arena: Arena = small_arena(budget_bytes)
        self.work = ThreadPoolExecutor(2)
        options = {"secret": KEY, "idle_timeout_s": 2.0, "handshake_timeout_s": 2.0}
        self.transport = TcpTransport("127.0.0.1", mode=mode, **options)  # type: ignore[arg-type]
        self.pushes = 0
        self.arrived: list[Slot] = []
        self.damage: list[str] = []
        self.refused: list[str] = []  # nodes whose bytes did not match
        self.pacer = pacer or Pacer()
        self.fetcher = Fetcher(self.transport, self._send, self.work, pacer=self.pacer)
        self.frozen = FrozenParts(self.arena, self.fetcher, self.work)
        self.frozen.find = self._find_frozen
        rooms = self.transport, self.arena, self._send, self.work, self.frozen
        self.replicator = Replicator(*rooms, pacer=self.pacer)
        self.passings = Passings(self.transport, self._send)
        self.replicator.on_arrived = lambda job, slot: self.arrived.append(slot)
        self.fetcher.held = self._held
        self.fetcher.on_damage = lambda job, slot, reason: self.damage.append(reason)
        self.replicator.on_refused = self.fetcher.on_refused = lambda job, node: self.refused.append(node)
        post.peers[node] = self

    def _send(self, to: str, job: str, message: object) -> bool:
        return self.post.send(self.node, to, job, message)

    def _find_frozen(self, job: str, content: str) -> Slot | None:
        for slot in self.arena.slots.values():
            if slot.record is not None and slot.record.layout.is_frozen and content_of(slot.record) == content:
                return slot
        return None

    def _held(self, job: str, snapshot: SnapshotId, rank: int) -> Slot | None:
        for slot in self.arena.slots.values():
            record = slot.record
            if record is not None and (record.job, record.snapshot, record.rank) == (job, snapshot, rank):
                return slot
        return None

    def send_through(self, proxy: Proxy, times: float = math.inf) -> None:
        """Whatever this peer pushes takes that way, or the first ``times`` of it. ``pushes``: so many there were."""
        push = self.transport.push

        def bent(ticket: Ticket, spans: Sequence[memoryview], **options: Any) -> None:
            self.pushes += 1
            push(replace(ticket, address=proxy.address) if self.pushes <= times else ticket, spans, **options)

        self.transport.push = bent  # type: ignore[method-assign,assignment]

    def sealed(self, step: int = 7) -> Slot:
        slot = self.arena.allocate(OWN, 3 * MIB)
        fill_and_seal(slot, step)
        return slot

    def sealed_frozen(self, step: int = 7, frozen: Slot | None = None) -> Slot:
        """One that leans on ``frozen``, or on a new one."""
        slot = self.arena.allocate(OWN, 3 * MIB)
        fill_and_seal_frozen(slot, frozen or self.arena.allocate(OWN, 3 * MIB), step)
        return slot

    def close(self) -> None:
        self.post.peers.pop(self.node, None)
        self.transport.close()
        self.replicator.close()
        self.fetcher.close()
        self.passings.close()
        self.work.shutdown()
        self.arena.close()
