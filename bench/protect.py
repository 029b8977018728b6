"""One replica between two processes over loopback, next to raw TCP with the same streams and mode in the same run.

python -m bench.protect --json out.json
python -m bench.protect --pace 2.5e9    # as over a wire of 20 Gb/s
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.common import Report, Row, arguments, interleave
from bench.pace import pace_pushes, paced
from bench.state import JOB, make_arena, sealed_slot
from ckptd.core.ids import SnapshotId
from ckptd.protect.fetch import Fetcher
from ckptd.protect.frozen import FrozenParts
from ckptd.protect.replicate import Replicator
from ckptd.wire.codec import MESSAGES, decode, encode
from ckptd.wire.keys import ClusterKey
from ckptd.wire.tcp import TcpTransport

STREAMS = 2
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


def _rooms(pipe: Pipe, transport: TcpTransport, budget: int) -> tuple[Replicator, Fetcher]:
    work = ThreadPoolExecutor(2)
    arena, fetcher = make_arena(budget), Fetcher(transport, pipe.send, work)
    made = Replicator(transport, arena, pipe.send, work, FrozenParts(arena, fetcher, work)), fetcher
    pipe.rooms = made
    return made


# --- the peer process -------------------------------------------------------------------------------------------
async def _serve_messages(sock: socket.socket, mode: str, key: ClusterKey, nbytes: int) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    pipe = Pipe(reader, writer)
    transport = TcpTransport("127.0.0.1", mode=mode, secret=key)  # type: ignore[arg-type]
    replicator, fetcher = _rooms(pipe, transport, 3 * nbytes)
    held: list[object] = []

    def arrived(job: str, slot: object) -> None:
        # Keep the newest, as a peer set does: the memory of the one before is used again, so it is warm.
        for old in held:
            replicator._arena.release(old)  # type: ignore[arg-type]
        held[:] = [slot]

    replicator.on_arrived = arrived  # type: ignore[assignment]
    fetcher.held = lambda job, snapshot, rank: held[0] if held else None  # type: ignore[assignment,return-value]
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
            mode = "aead" if sock.recv(1) == b"a" else "none"
            threading.Thread(
                target=lambda s=sock, m=mode: asyncio.run(_serve_messages(s, m, key, nbytes)), daemon=True
            ).start()


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

    def __init__(self, port: int, mode: str, key: ClusterKey, nbytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self._open(port, mode, key, nbytes))

    async def _open(self, port: int, mode: str, key: ClusterKey, nbytes: int) -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(MESSAGES_KIND + mode[:1].encode())
        reader, writer = await asyncio.open_connection(sock=sock)
        self.pipe = Pipe(reader, writer)
        transport = TcpTransport("127.0.0.1", mode=mode, secret=key)  # type: ignore[arg-type]
        self.replicator, self.fetcher = _rooms(self.pipe, transport, nbytes)
        self.task = asyncio.ensure_future(self.pipe.messages())

    def call(self, coroutine: object) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()  # type: ignore[arg-type]


def main() -> int:
    pace_help = "bytes/s the wire carries, all streams together (0: what loopback does)"
    args = arguments(__doc__ or "", pace={"type": float, "default": 0.0, "help": pace_help})
    pace_pushes(args.pace / STREAMS)
    nbytes = int(args.bytes)
    key = ClusterKey.generate()
    arena = make_arena(3 * nbytes)
    slot = sealed_slot(arena, nbytes)
    assert slot.record is not None
    payload = slot.record.layout.payload_bytes
    child = subprocess.Popen(
        [sys.executable, "-c", f"from bench.protect import peer; peer({key.secret.hex()!r}, {payload}, {args.pace})"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    report = Report("protect: one replica of a sealed slot; restore: the same slices fetched from a peer")
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        view = slot.payload[:payload]
        loops = {mode: Loop(port, mode, key, nbytes) for mode in ("none", "aead")}
        contenders = {
            "raw none": RawTcp(port, view, sealed=False, pace=args.pace),
            "raw aead": RawTcp(port, view, sealed=True, pace=args.pace),
        }
        spans = tuple((f.offset, f.nbytes) for f in slot.record.layout.fragments)
        into = arena.allocate(slot.tenant, payload, 1 << 20).payload[: sum(n for _, n in spans)]
        for mode, loop in loops.items():

            def replicate(loop: Loop = loop) -> float:
                started = time.perf_counter()
                answer = loop.call(loop.replicator.replicate(JOB, slot, 0, "peer"))
                assert answer == (True, ""), answer
                return time.perf_counter() - started

            def fetch(loop: Loop = loop) -> float:
                started = time.perf_counter()
                answer = loop.call(loop.fetcher.fetch(JOB, "peer", SnapshotId(1, 1), 0, spans, into))
                assert answer == (True, ""), answer
                return time.perf_counter() - started

            contenders |= {f"replica {mode}": replicate, f"fetch {mode}": fetch}  # type: ignore[dict-item]
        # warm twice: the peer keeps one replica while the next arrives, so it has two memories to touch first
        taken = interleave(contenders, args.repeats, warm=2)  # type: ignore[arg-type]
        for mode in loops:
            limit = report.add(Row(f"raw TCP, {STREAMS} streams, {mode}", taken[f"raw {mode}"], payload))
            report.add(
                Row(f"replica, {mode}, verified", taken[f"replica {mode}"], payload, floor=FLOOR), limit
            )
            report.add(Row(f"fetch, {mode}, verified", taken[f"fetch {mode}"], payload, floor=FLOOR), limit)
    finally:
        child.kill()
        child.wait()
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
