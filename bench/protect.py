"""One replica between two processes over loopback, next to raw TCP with the same streams and mode in the same run.

python -m bench.protect --json out.json
python -m bench.protect --pace 2.5e9    # as over a wire of 20 Gb/s
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.common import Report, Row, arguments, interleave
from bench.pace import pace_pushes, paced
from bench.state import JOB, make_arena, sealed_slot
from ckptd.arena.arena import Slot
from ckptd.arena.payload import Payload
from ckptd.core.ids import SnapshotId
from ckptd.protect.fetch import Fetcher
from ckptd.protect.frozen import FrozenParts
from ckptd.protect.replicate import Replicator
from ckptd.wire.bulk import Mode
from ckptd.wire.codec import MESSAGES, decode, encode
from ckptd.wire.keys import ClusterKey
from ckptd.wire.tcp import TcpTransport

T = TypeVar("T")
MODES: tuple[Mode, ...] = ("none", "aead")
STREAMS = 2
OWN_SLOTS = 2  # what is sent, and where it is fetched into
PEER_SLOTS = 2  # the replica it holds, and the one that arrives
CHUNK_BYTES = 8 << 20
FRAME_BYTES_MAX = 64 << 20
FLOOR = 0.7
TAG_BYTES = 16
RAW_KEY = bytes(32)
RAW, SEALED, MESSAGES_KIND = b"R", b"S", b"M"  # what a connection to the peer process is for


class Pipe:
    """The control link of the benchmark: length-prefixed messages over one local connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, node: str, job: str, message: object) -> bool:
        data = encode(message)
        self._writer.write(len(data).to_bytes(4, "big") + data)
        return True

    async def messages(self) -> None:
        while True:
            try:
                length = int.from_bytes(await self._reader.readexactly(4), "big")
                yield_to = decode(await self._reader.readexactly(length), MESSAGES)
            except asyncio.IncompleteReadError:
                return
            for room in self.rooms:
                if room.on_message("peer", JOB, yield_to):
                    break

    rooms: tuple[Replicator | Fetcher, ...] = ()


def _rooms(pipe: Pipe, transport: TcpTransport, slots: int, nbytes: int) -> tuple[Replicator, Fetcher]:
    work = ThreadPoolExecutor(2)
    arena, fetcher = make_arena(slots, nbytes), Fetcher(transport, pipe.send, work)
    made = Replicator(transport, arena, pipe.send, work, FrozenParts(arena, fetcher, work)), fetcher
    pipe.rooms = made
    return made


# --- the peer process -------------------------------------------------------------------------------------------
async def _serve_messages(sock: socket.socket, mode: Mode, key: ClusterKey, nbytes: int) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    pipe = Pipe(reader, writer)
    transport = TcpTransport("127.0.0.1", mode=mode, secret=key)
    replicator, fetcher = _rooms(pipe, transport, PEER_SLOTS, nbytes)
    held: list[Slot] = []

    def arrived(job: str, slot: Slot) -> None:
        # Keep the newest, as a peer set does: the memory of the one before is used again, so it is warm.
        for old in held:
            replicator._arena.release(old)
        held[:] = [slot]

    replicator.on_arrived = arrived
    fetcher.held = lambda job, snapshot, rank: held[0] if held else None
    await pipe.messages()


def _serve_raw(sock: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        got = sock.recv_into(into[at:], len(into) - at)
        if not got:
            return
        at += got
    sock.sendall(b"k")


def _serve_sealed(sock: socket.socket, into: memoryview) -> None:
    aead, scratch = AESGCM(RAW_KEY), memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
    for number, at in enumerate(range(0, len(into), CHUNK_BYTES)):
        dest = into[at : at + CHUNK_BYTES]
        got, need = 0, len(dest) + TAG_BYTES
        while got < need:
            got += sock.recv_into(scratch[got:need], need - got)
        aead.decrypt_into(number.to_bytes(12, "big"), scratch[:need], None, dest)
    sock.sendall(b"k")


def peer(key_hex: str, nbytes: int, pace: float = 0.0) -> None:
    pace_pushes(pace / STREAMS)
    key = ClusterKey(bytes.fromhex(key_hex))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    raw = memoryview(bytearray(nbytes))
    part = -(-nbytes // STREAMS)
    while True:
        sock, _ = listener.accept()
        kind = sock.recv(1)
        if kind in (RAW, SEALED):
            index = sock.recv(1)[0]
            threading.Thread(
                target=_serve_raw if kind == RAW else _serve_sealed,
                args=(sock, raw[index * part : (index + 1) * part]),
                daemon=True,
            ).start()
        else:
            mode: Mode = "aead" if sock.recv(1) == b"a" else "none"
            coroutine = _serve_messages(sock, mode, key, nbytes)
            threading.Thread(target=asyncio.run, args=(coroutine,), daemon=True).start()


# --- the measuring side -----------------------------------------------------------------------------------------
class RawTcp:
    """Plain sockets, the same number of streams, warm buffers on both ends, nothing else done; ``sealed``: AES-256-GCM of
    each chunk through one scratch per stream, which is the least that mode aead can do."""

    def __init__(self, port: int, view: memoryview, *, sealed: bool, pace: float = 0.0) -> None:
        self._port, self._view, self._sealed, self._pace = port, view, sealed, pace

    def __call__(self) -> None:
        part = -(-len(self._view) // STREAMS)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda i: self._stream(i, self._view[i * part : (i + 1) * part]), range(STREAMS)))

    def _stream(self, index: int, view: memoryview) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as sock:
            paced(sock, self._pace / STREAMS)
            sock.sendall((SEALED if self._sealed else RAW) + bytes([index]))
            aead, scratch = AESGCM(RAW_KEY), memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
            for number, at in enumerate(range(0, len(view), CHUNK_BYTES)):
                chunk = view[at : at + CHUNK_BYTES]
                if self._sealed:
                    out = scratch[: len(chunk) + TAG_BYTES]
                    aead.encrypt_into(number.to_bytes(12, "big"), chunk, None, out)
                    chunk = out
                sock.sendall(chunk)
            sock.recv(1)


class Loop:
    """An event loop in a thread, with the sender's rooms."""

    def __init__(self, port: int, mode: Mode, key: ClusterKey) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self._open(port, mode, key))

    async def _open(self, port: int, mode: Mode, key: ClusterKey) -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(MESSAGES_KIND + mode[:1].encode())
        reader, writer = await asyncio.open_connection(sock=sock)
        self.pipe = Pipe(reader, writer)
        transport = TcpTransport("127.0.0.1", mode=mode, secret=key)
        self.replicator, self.fetcher = _rooms(self.pipe, transport, 1, 0)
        self.task = asyncio.ensure_future(self.pipe.messages())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class Side:
    """What is measured in one mode: a replica sent to the peer, and the same slices fetched back from it."""

    def __init__(self, loop: Loop, slot: Slot, into: Payload) -> None:
        assert slot.record is not None
        self._loop, self._slot = loop, slot
        self._spans = tuple((f.offset, f.nbytes) for f in slot.record.layout.fragments)
        self._into = into[: sum(nbytes for _, nbytes in self._spans)]

    def replicate(self) -> None:
        done, reason = self._loop.call(self._loop.replicator.replicate(JOB, self._slot, 0, "peer"))
        assert done, reason

    def fetch(self) -> None:
        fetched = self._loop.call(
            self._loop.fetcher.fetch(JOB, "peer", SnapshotId(1, 1), 0, self._spans, self._into)
        )
        assert fetched.ok, fetched.reason

    def prove(self) -> None:
        """What was measured is a replica: the slices come back bit by bit."""
        np.frombuffer(self._into, np.uint8)[:] = 0
        self.fetch()
        at = 0
        for offset, nbytes in self._spans:
            assert self._into[at : at + nbytes] == self._slot.payload[offset : offset + nbytes], f"other bytes at {offset}"
            at += nbytes


@contextlib.contextmanager
def peer_process(key: ClusterKey, nbytes: int, pace: float) -> Iterator[int]:
    """The port it listens on."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"from bench.protect import peer; peer({key.secret.hex()!r}, {nbytes}, {pace})"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()


def main() -> int:
    pace_help = "bytes/s the wire carries, all streams together (0: what loopback does)"
    args = arguments(__doc__ or "", pace={"type": float, "default": 0.0, "help": pace_help})
    pace_pushes(args.pace / STREAMS)
    key, arena = ClusterKey.generate(), make_arena(OWN_SLOTS, int(args.bytes))
    slot = sealed_slot(arena, int(args.bytes))
    assert slot.record is not None
    payload = slot.record.layout.payload_bytes
    into = arena.allocate(slot.tenant, payload, 1 << 20).payload
    report = Report("protect: one replica of a sealed slot; restore: the same slices fetched from a peer")
    with peer_process(key, payload, args.pace) as port:
        view = slot.payload[:payload]
        contenders: dict[str, Callable[[], None]] = {
            f"raw {mode}": RawTcp(port, view, sealed=mode == "aead", pace=args.pace) for mode in MODES
        }
        sides = {mode: Side(Loop(port, mode, key), slot, into) for mode in MODES}
        for mode, side in sides.items():
            contenders |= {f"replica {mode}": side.replicate, f"fetch {mode}": side.fetch}
        # warm twice: the peer keeps one replica while the next arrives, so it has two memories to touch first
        taken = interleave(contenders, args.repeats, warm=2)
        for side in sides.values():
            side.prove()
    for mode in MODES:
        limit = report.add(Row(f"raw TCP, {STREAMS} streams, {mode}", taken[f"raw {mode}"], payload))
        report.add(Row(f"replica, {mode}, verified", taken[f"replica {mode}"], payload, floor=FLOOR), limit)
        report.add(Row(f"fetch, {mode}, verified", taken[f"fetch {mode}"], payload, floor=FLOOR), limit)
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
