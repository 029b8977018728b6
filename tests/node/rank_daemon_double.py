"""A daemon small enough to script: speaks wire.rank over a real SEQPACKET socket with real memfds, keeps what was sealed
and serves it back, to any number of ranks of one node. For tests of the client alone.

It checks what it gets with the core's own functions: layouts decode, copies by contract are equal, fragments cover.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from ckptd.core.state_map.agreement import TENSORS, agree, object_name
from ckptd.core.state_map.box import Box, intersect, uncovered
from ckptd.core.state_map.layout import UNIQUE, Layout
from ckptd.daemon.ranks import LAYOUTS_PER_RANK_MAX
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import FrameError, RankSocket, memfd_object, read_memfd_object
from ckptd.wire.world import WORLD_BYTES_MAX
from ckptd.wire.world_check import unpack_world
from tests.node.pieces import placed

NODE = {"node": "double", "control": "tcp://127.0.0.1:1", "bulk": "127.0.0.1:2", "domain": "d0", "incarnation": "1"}
GRAIN_BYTES = 1 << 20


@dataclass(eq=False)
class Peer:
    """One connected rank."""

    sock: RankSocket
    rank: int = -1
    called: int = -1
    needs: int = 1  # bytes of a slot's live part
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (fd, capacity)
    free: list[int] = field(default_factory=list)
    granted: dict[int, int] = field(default_factory=dict)  # grant -> slot
    frozen: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot of a frozen part -> (fd, capacity)
    sealed_frozen: set[int] = field(default_factory=set)  # a snapshot leans on these
    layouts: dict[str, Layout] = field(default_factory=dict)
    wants: Any = None
    loaded: wire.Loaded | None = None


@dataclass
class Held:
    layout: Layout
    payload: bytes
    objects_bytes: int


class RankDaemonDouble:
    """``granting``: "always" keeps every free slot granted, "asked" answers must=True only, "never".

    ``seen``: every message that arrived, as (rank, message). ``held``: (epoch, step) -> rank -> what was sealed.
    """

    def __init__(self, path: Path, *, slots: int = 3, granting: str = "always", **policy: Any) -> None:
        self.path, self.slot_count, self.granting = path, slots, granting
        self.policy = {"replicas": 0, "own_slots": slots, "fence_timeout_s": 20.0, "audit_every": 0, **policy}
        self.held: dict[tuple[int, int], dict[int, Held]] = {}
        self.seen: list[tuple[int, Any]] = []
        self.corruptions: list[str] = []
        self.voided: dict[int, str] = {}
        self.epoch, self.level = 0, 1  # level: told of complete snapshots
        self.durable = True
        self.fail_restore: str = ""
        self.problems, self.waits = list[str](), ""  # told to whoever asks
        self.on_asked = True  # are grants made for what is asked?
        self.part_pieces = 0  # pieces of each part of a load plan; 0: one part
        self.spoil_part = -1  # the part whose first piece leaves its segment
        self.changed = threading.Condition(threading.RLock())
        self._peers: list[Peer] = []
        self.worlds: dict[str, Any] = {}  # attempt -> ranks, nodes
        self._joined: dict[str, dict[int, tuple[Peer, wire.Join]]] = {}
        self._attempt = ""
        self._ready = False
        self._round = self._failed_round = 0
        self._offered: tuple[int, int] | None = None
        self._numbers = self._slot_ids = 0
        self._grant_steps: dict[int, int] = {}
        self._asked: int | None = None
        self._sealed: dict[int, dict[int, int]] = {}  # grant -> rank -> step, until all ranks have sealed

    # --- life ---------------------------------------------------------------------------------------------------
    def start(self) -> RankDaemonDouble:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def stop(self) -> None:
        """As a crash: every connection ends; the held snapshots stay."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self.changed:
            for peer in self._peers:
                with contextlib.suppress(OSError):  # it has left already
                    peer.sock.sock.shutdown(socket.SHUT_RDWR)
            self._peers.clear()
            self._ready = False

    def __enter__(self) -> RankDaemonDouble:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(RankSocket(sock, wire.TO_DAEMON))
            self._peers.append(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        while True:
            try:
                got = peer.sock.recv()
            except (OSError, FrameError):
                got = None
            if got is None:
                peer.sock.close()
                for fd, _ in (*peer.slots.values(), *peer.frozen.values()):
                    os.close(fd)
                peer.slots.clear()
                peer.frozen.clear()
                return
            message, fds = got
            with self.changed:
                self.seen.append((peer.rank, message))
                handler = getattr(self, f"_on_{type(message).__name__.lower()}", None)
                if handler is not None:
                    handler(peer, message, fds)
                self.changed.notify_all()
            for fd in fds:
                os.close(fd)

    def messages(self, kind: type) -> list[Any]:
        with self.changed:
            return [message for _, message in self.seen if isinstance(message, kind)]

    def wait_for(self, predicate: Any, timeout: float = 30.0) -> None:
        with self.changed:
            assert self.changed.wait_for(predicate, timeout), f"not within {timeout} s; seen {self.seen[-5:]}"

    # --- joining and restoring ----------------------------------------------------------------------------------
    def _on_hello(self, peer: Peer, message: wire.Hello, fds: list[int]) -> None:
        _send(peer, wire.Welcome(wire.PROTOCOL_VERSION, NODE, self.policy))

    def _on_join(self, peer: Peer, message: wire.Join, fds: list[int]) -> None:
        peer.rank = message.rank
        self.worlds[message.attempt] = ranks, _ = unpack_world(read_memfd_object(fds[0], WORLD_BYTES_MAX))
        self._give_frozen(peer, message.frozen_bytes)
        self._resize(peer, message.state_bytes)
        if message.attempt == self._attempt:
            self._joined[self._attempt][message.rank] = (peer, message)
            _send(peer, wire.Ready(self.epoch))
            self._ready = True
            self._grant_free()
            return
        here = self._joined.setdefault(message.attempt, {})
        here[message.rank] = (peer, message)
        if len(here) == len(ranks):
            self._attempt, self._ready, self.world = message.attempt, False, len(here)
            self._open(message.ask)

    def _open(self, ask: dict[str, Any] | None) -> None:
        self.epoch += 1
        self._round += 1
        self._grant_steps.clear()
        self._asked = None
        for peer in self._members():
            peer.called = -1
            peer.free += [slot for slot in peer.granted.values() if slot in peer.slots]
            peer.granted.clear()
        complete = [
            s for s, ranks in self.held.items() if len(ranks) == next(iter(ranks.values())).layout.world
        ]
        if ask is not None and ask["step"] is not None:
            complete = [s for s in complete if s[1] == ask["step"]]
        self._offered = max(complete) if ask is not None and complete else None
        if self.fail_restore:
            self._tell(wire.Failed("unrecoverable", self.fail_restore, "none"))
            return
        if self._offered is None:
            self._tell(wire.Opened(self.epoch, self._round, None))
            self._all_ready()
            return
        fd = memfd_object(msgpack.packb(self._catalogue(self._offered)))
        self._tell(wire.Opened(self.epoch, self._round, list(self._offered)), [fd])
        os.close(fd)

    def _tell(self, message: object, fds: list[int] | None = None) -> None:
        for peer in self._members():
            _send(peer, message, fds or [], timeout_s=5)

    def _members(self) -> list[Peer]:
        return [peer for _, (peer, _) in sorted(self._joined.get(self._attempt, {}).items())]

    def _all_ready(self) -> None:
        self._tell(wire.Ready(self.epoch))
        self._ready = True
        self._grant_free()

    def per_rank(self, snapshot: tuple[int, int]) -> tuple[list[str], list[str]]:
        """What differs between ranks, and what must not but does."""
        layouts = {rank: held.layout for rank, held in self.held[snapshot].items()}
        sums = {rank: _digests(held) for rank, held in self.held[snapshot].items()}
        found = agree(layouts, sums)
        return list(found.per_rank), list(found.errors)

    def _catalogue(self, snapshot: tuple[int, int]) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for rank, held in self.held[snapshot].items():
            tensors.update({f.key: [f.dtype, f.shape, f.role] for f in held.layout.fragments})
            for name in _objects(held):
                objects.setdefault(name, []).append(rank)
            aliases.update(dict(held.layout.aliases))
        per_rank, _ = self.per_rank(snapshot)
        world = len(self.held[snapshot])
        return {
            "tensors": tensors, "objects": objects,
            "per_rank": per_rank,
            "aliases": aliases,
            "world": world,
            "own": {name[2:]: self._who_has(snapshot, name[2:]) for name in per_rank if name.startswith("t:")},
        }

    def _who_has(self, snapshot: tuple[int, int], key: str) -> list[int]:
        return [rank for rank, held in self.held[snapshot].items() if any(f.key == key for f in held.layout.fragments)]

    def _on_wants(self, peer: Peer, message: wire.Wants, fds: list[int]) -> None:
        peer.wants, peer.loaded = (
            msgpack.unpackb(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), strict_map_key=False), None,
        )
        if all(other.wants is not None for other in self._members()):
            for other in self._members():
                self._send_plan(other)

    def _on_wantsrefused(self, peer: Peer, message: wire.WantsRefused, fds: list[int]) -> None:
        if self._failed_round < message.round:  # the first refusal decides for all ranks
            self._failed_round = message.round
            self._forget_wants()
            self._tell(wire.Failed(message.code, message.reason, "register the same objects"))

    def _on_loadedpart(self, peer: Peer, message: wire.LoadedPart, fds: list[int]) -> None:
        self._send_plan(peer, message.part + 1)

    def _on_loaded(self, peer: Peer, message: wire.Loaded, fds: list[int]) -> None:
        peer.loaded = message
        if not message.ok:
            self._tell(wire.Failed("load", f"rank {peer.rank}: {message.reason}", ""))  # as the steward's node says it
        elif all(other.loaded is not None and other.loaded.ok for other in self._members()):
            self._forget_wants()
            self._all_ready()

    def _forget_wants(self) -> None:
        for peer in self._members():
            peer.wants = peer.loaded = None

    def _send_plan(self, peer: Peer, part: int = 0) -> None:
        assert self._offered is not None
        ranks = self.held[self._offered]
        per_rank = {name.removeprefix("t:") for name in self.per_rank(self._offered)[0]}
        order = sorted(ranks, key=lambda rank: rank != peer.rank)
        pieces: list[Any] = []
        for index, (key, _, _, offsets, sizes) in enumerate(peer.wants["tensors"]):
            sources = order if key not in per_rank else [peer.wants.get("ranks", {}).get(index, peer.rank)]
            pieces += self._pieces(index, key, Box(tuple(offsets), tuple(sizes)), sources, order)
        blobs, objects, everyone = b"", {}, {}
        for name in peer.wants["objects"]:
            for rank in ranks:
                blob = _objects(ranks[rank]).get(name)
                if blob is not None:
                    place = [len(order), len(blobs), len(blob)]
                    everyone.setdefault(name, {})[rank] = place
                    if rank == peer.rank or name not in objects:
                        objects[name] = place
                    blobs += blob
        pieces.sort(key=lambda piece: piece[0] >= peer.wants["first"])
        size = self.part_pieces or max(1, len(pieces))
        mine = pieces[part * size : (part + 1) * size]
        if part == self.spoil_part:
            mine[0][4] = 1 << 40
        plan = {
            "pieces": placed(mine).encode(), "part": part,
            "last": (part + 1) * size >= len(pieces),
            "mode": "direct" if self.part_pieces else "verified",
            "objects": objects, "objects_all": everyone, "bytes": {"own": 1}, "seconds": {},
        }  # fmt: skip
        bodies = [*(ranks[rank].payload for rank in order), blobs]
        fds = [memfd_object(msgpack.packb(plan)), *(memfd_object(body) for body in bodies)]
        _send(peer, wire.LoadPlan(self._round, [len(body) for body in bodies]), fds, timeout_s=5)
        for fd in fds:
            os.close(fd)

    def _pieces(self, index: int, key: str, box: Box, sources: list[int], order: list[int]) -> list[Any]:
        assert self._offered is not None
        left, pieces = [box], []
        for rank in sources:
            for f in self.held[self._offered][rank].layout.fragments:
                if f.key != key:
                    continue
                for part in [p for other in left if (p := intersect(other, f.box)) is not None]:
                    row = [part.offsets, part.sizes, order.index(rank), f.offset, f.box.offsets, f.box.sizes]
                    pieces.append([index, *row])
                left = [rest for other in left for rest in uncovered(other, [f.box])]
        assert not left, f"{key}: nobody holds {left}"
        return pieces

    # --- snapshots ----------------------------------------------------------------------------------------------
    def _resize(self, peer: Peer, state_bytes: int) -> None:
        peer.needs = max(state_bytes, 1)
        capacity = -(-peer.needs // GRAIN_BYTES) * GRAIN_BYTES
        for slot in [s for s in peer.free if peer.slots[s][1] < capacity]:
            os.close(peer.slots.pop(slot)[0])
            peer.free.remove(slot)
            _send(peer, wire.Retire(slot))
        while sum(size >= capacity for _, size in peer.slots.values()) < self.slot_count:
            slot = self._map(peer, peer.slots, capacity)
            peer.free.append(slot)

    def _give_frozen(self, peer: Peer, nbytes: int) -> None:
        waiting = [size for slot, (_, size) in peer.frozen.items() if slot not in peer.sealed_frozen]
        if nbytes > 0 and not any(size >= nbytes for size in waiting):
            self._map(peer, peer.frozen, nbytes)

    def _map(self, peer: Peer, into: dict[int, tuple[int, int]], capacity: int) -> int:
        self._slot_ids += 1
        fd = os.memfd_create("double")
        os.posix_fallocate(fd, 0, capacity + 4096)
        into[self._slot_ids] = (fd, capacity)
        note = wire.Mapped(
            self._slot_ids, f"segment-{self._slot_ids}", capacity + 4096, 4096, capacity, into is peer.frozen
        )
        _send(peer, note, [fd], timeout_s=5)
        return self._slot_ids

    def _on_resize(self, peer: Peer, message: wire.Resize, fds: list[int]) -> None:
        self._give_frozen(peer, message.frozen_bytes)
        self._resize(peer, message.state_bytes)
        self._grant_free()

    def _on_called(self, peer: Peer, message: wire.Called, fds: list[int]) -> None:
        peer.called = message.step
        if message.asks:
            self._asked = message.step
            self._grant_free()

    def _grant_free(self) -> None:
        """One grant for what is asked, before the others; none while some rank has a void one: it would take that."""
        if len(self._members()) > 1 and any(n in self.voided for peer in self._members() for n in peer.granted):
            return
        asked = self._asked if self.on_asked else None
        if asked is not None and not any(step <= asked for step in self._grant_steps.values()) and not self.grant(asked):
            for number in self._grant_steps.keys() - self._sealed.keys():
                self._void(number, f"its slots are needed for step {asked}", None)
        while self.granting == "always" and self._ready and all(peer.free for peer in self._members()):
            self.grant(max(peer.called for peer in self._members()) + 1)

    def grant(self, from_step: int) -> int:
        """To every rank. Returns the grant's number, 0 when a rank has no free slot."""
        members = self._members()
        if not self._ready or not all(peer.free for peer in members):
            return 0
        self._numbers += 1
        self._grant_steps[self._numbers] = from_step
        for peer in members:
            slot = peer.free.pop(0)
            peer.granted[self._numbers] = slot
            _send(peer, wire.GrantSlot(slot, self._numbers, from_step))
        return self._numbers

    def take_back(self, number: int, reason: str = "test") -> None:
        with self.changed:
            self._tell(wire.TakeBack(number, reason))

    def _on_gaveup(self, peer: Peer, message: wire.GaveUp, fds: list[int]) -> None:
        peer.called = max(peer.called, message.step)
        self._tell(wire.WrittenThere(message.grant, message.written))
        slot = peer.granted.pop(message.grant, None)
        if slot is not None and slot in peer.slots:
            peer.free.append(slot)
            self._resize(peer, peer.needs)  # one that fits no more goes
        if message.grant in self._grant_steps:
            later = [n for n in sorted(self._grant_steps) if n > message.grant and len(self._members()) > 1]
            for number in (message.grant, *later):  # else two ranks would go on one step apart
                self._void(number, message.reason, peer if number == message.grant else None)
        self._grant_free()

    def _void(self, number: int, reason: str, gave_up: Peer | None) -> None:
        """For every rank; ``gave_up``: who has said so."""
        del self._grant_steps[number]
        self.voided[number] = reason
        for rank, step in self._sealed.pop(number, {}).items():
            self.held[self.epoch, step].pop(rank, None)
            self._tell(wire.Level(self.epoch, step, number, -1, 1, False, reason))
        self.held = {snapshot: ranks for snapshot, ranks in self.held.items() if ranks}
        for other in self._members():
            if other is not gave_up and number in other.granted:
                _send(other, wire.TakeBack(number, reason))

    def _on_sealedslot(self, peer: Peer, message: wire.SealedSlot, fds: list[int]) -> None:
        if fds:
            layout = Layout.decode(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX))
            assert layout.layout_id == message.layout_id
            peer.layouts[message.layout_id] = layout
            while len(peer.layouts) > LAYOUTS_PER_RANK_MAX:
                del peer.layouts[next(iter(peer.layouts))]
        slot = peer.granted.pop(message.grant, None)
        if slot is None:
            return  # of an earlier epoch
        assert slot == message.slot
        peer.free.append(slot)
        if message.layout_id not in peer.layouts and message.grant in self._grant_steps:
            self._void(message.grant, "seal failed: layout unknown", peer)
        if message.grant in self.voided:  # or another rank had given it up before
            _send(peer, wire.Level(self.epoch, message.step, message.grant, -1, 1, False, self.voided[message.grant]))
            self._grant_free()
            return
        fd, layout = peer.slots[slot][0], peer.layouts[message.layout_id]
        payload = os.pread(fd, layout.frozen_at, 4096)
        if layout.frozen_bytes:
            peer.sealed_frozen.add(message.frozen)
            payload += os.pread(peer.frozen[message.frozen][0], layout.frozen_bytes, 4096)
        snapshot = (self.epoch, message.step)
        held = self.held.setdefault(snapshot, {})
        held[peer.rank] = Held(layout, payload, message.objects_bytes)
        self._sealed.setdefault(message.grant, {})[peer.rank] = message.step
        if len(held) == layout.world:
            self._grant_steps.pop(message.grant, None)
            self._sealed.pop(message.grant, None)
            if self._asked is not None and message.step >= self._asked:
                self._asked = None
            self.corruptions += self.per_rank(snapshot)[1]
            self._tell(wire.Level(self.epoch, message.step, message.grant, self.level, 1, self.durable))
        self._grant_free()

    def _on_waitfor(self, peer: Peer, message: wire.WaitFor, fds: list[int]) -> None:
        """As the steward answers who waits for what nobody holds: it does not know why."""
        here = peer.rank in self.held.get((self.epoch, message.step), {})
        if not here and message.grant not in self._grant_steps:
            why = "no memory holds any of it"
            _send(peer, wire.Level(self.epoch, message.step, message.grant, -1, 1, False, why))

    def _on_liststeps(self, peer: Peer, message: wire.ListSteps, fds: list[int]) -> None:
        rows = [{"epoch": e, "step": s, "level": 1, "durable": True, "where": ["memory"]} for e, s in self.held]
        _send(peer, wire.Steps(message.request, rows))

    def _on_askhealth(self, peer: Peer, message: wire.AskHealth, fds: list[int]) -> None:
        _send(peer, wire.Health(message.request, not self.problems, self.problems, {"waits": self.waits}))


def _send(peer: Peer, message: object, fds: list[int] | None = None, timeout_s: float = 0.0) -> None:
    with contextlib.suppress(OSError):  # the rank has just left
        peer.sock.send(message, fds or [], timeout_s)


def _objects(held: Held) -> dict[str, bytes]:
    found: dict[str, bytes] = msgpack.unpackb(held.payload[: held.objects_bytes])
    assert not any(held.payload[held.objects_bytes : held.layout.objects_capacity]), "the rest of the region is zero"
    return found


def _digests(held: Held) -> list[tuple[str, bytes]]:
    shared = [_hash(held.payload[f.offset : f.offset + f.nbytes]) for f in held.layout.fragments if f.sharing != UNIQUE]
    return [(TENSORS, b"".join(shared))] + [(object_name(name), _hash(blob)) for name, blob in _objects(held).items()]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def main() -> None:
    """As a process of its own, to be stopped and killed: ``python -m tests.node.rank_daemon_double SOCKET``."""
    RankDaemonDouble(Path(sys.argv[1])).start()
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
