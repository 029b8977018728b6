"""The receiver's side: accepts, lets peers prove their ticket, and only then gives a connection a thread.

Peers that have proven nothing share one thread and at most HANDSHAKES_MAX connections of HANDSHAKE_BYTES_MAX each; when
more knock, the one that has waited longest makes room, so that a flood does not shut out those that do prove (P13).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ckptd.core.errors import CkptdError
from ckptd.thread_pool import ThreadPool
from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import HANDSHAKES_MAX
from ckptd.wire.landing import Landing, Landings
from ckptd.wire.scratch import ScratchPool
from ckptd.wire.tcp_io import join_address
from ckptd.wire.tcp_receive import Stream

log = logging.getLogger("ckptd.wire")

BACKLOG = 512  # connections the kernel holds for us
SWEEP_S = 0.25  # how late an expired ticket or handshake is noticed
ACCEPTS_PER_TURN = 64  # then the handshakes under way get their turn
FULL_PAUSE_S = 0.05  # after the process ran out of descriptors, or memory
STREAMS_READY = 4  # threads for streams from the start: one of them is enough to receive, if it must be


class Handshake:
    """A connection that has proven nothing yet: HELLO, CHALLENGE, PROOF; never more bytes than that."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock, self.deadline = sock, deadline
        self.nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self.hello: frames.Hello | None = None
        self.landing: Landing | None = None
        self._buffer = bytearray()

    def read(self) -> bytes | None:
        """The next frame, None: not all of it is here. Raises OSError, EOFError."""
        wanted = frames.HELLO_BYTES if self.hello is None else frames.PROOF_BYTES
        data = self.sock.recv(wanted - len(self._buffer))
        if not data:
            raise EOFError
        self._buffer += data
        if len(self._buffer) < wanted:
            return None
        frame, self._buffer = bytes(self._buffer), bytearray()
        return frame

    def answer(self, status: int, body: bytes = bytes(32)) -> None:
        """Fits into an empty send buffer, so it never blocks."""
        self.sock.send(frames.pack_reply(status, body))


class BulkListener:
    def __init__(
        self,
        bind: str,
        port: int,
        landings: Landings,
        bulk_key: bytes,
        *,
        connections_max: int,
        idle_timeout_s: float,
        handshake_timeout_s: float,
    ) -> None:
        self._landings, self._bulk_key = landings, bulk_key
        self._connections_max = connections_max
        self._idle_timeout_s, self._handshake_timeout_s = idle_timeout_s, handshake_timeout_s
        self._scratch = ScratchPool()
        self.on_bytes: Callable[[], None] = lambda: None
        self._shaking: dict[socket.socket, Handshake] = {}  # in order of arrival
        self._streams: set[Stream] = set()  # admitted and not ended
        self._lock = threading.Lock()
        self._closing = False
        self._threads = ThreadPool(connections_max, "bulk-stream", ready=min(STREAMS_READY, connections_max), daemon=True)
        self._acceptor = ThreadPool(1, "bulk-listener", ready=1, daemon=True)
        self._listener = _listen(bind, port)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._acceptor.submit(self._run)

    @property
    def streams(self) -> int:
        """Admitted and not ended, those included that wait for a thread."""
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """Idempotent; returns when no stream is left."""
        self._closing = True
        with contextlib.suppress(OSError):  # the thread saw it by itself and is gone
            self._wake.send(b"\0")
        self._acceptor.shutdown()
        self._threads.shutdown()  # their landings have failed, so they are on their way out, also those that have not begun

    # --- the one thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # no memory, say: without this thread the daemon is deaf for bulk for ever
                self._stumbled(error)
        for sock in (*self._shaking, self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(SWEEP_S):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Handshake):
                self._advance(key.data)
        self._sweep(time.monotonic())

    def _stumbled(self, error: Exception) -> None:
        with contextlib.suppress(Exception):  # what lacks for the turn may lack for the log
            log.error("bulk listener stumbled: %r", error)
        time.sleep(FULL_PAUSE_S)  # what it stumbled over may be there still: do not spin

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._refused_by_kernel(error)
                return
            sock.setblocking(False)
            while len(self._shaking) >= HANDSHAKES_MAX:
                self._drop(next(iter(self._shaking.values())))
            shake = self._shaking[sock] = Handshake(sock, time.monotonic() + self._handshake_timeout_s)
            self._selector.register(sock, selectors.EVENT_READ, shake)  # last: what is polled must be known, or it spins

    def _refused_by_kernel(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            log.error("bulk listener cannot accept: %s", error.strerror)
            for shake in list(self._shaking.values()):
                self._drop(shake)
            time.sleep(FULL_PAUSE_S)  # the listener stays readable: do not spin

    def _sweep(self, now: float) -> None:
        for shake in list(self._shaking.values()):
            if shake.deadline > now:
                break  # the rest came later
            self._drop(shake)
        self._landings.expire(now)
        self._threads.refill()

    def _drop(self, shake: Handshake) -> None:
        self._release(shake)
        shake.sock.close()

    def _release(self, shake: Handshake) -> None:
        self._shaking.pop(shake.sock, None)
        with contextlib.suppress(KeyError):  # an earlier try got no further
            self._selector.unregister(shake.sock)

    def _advance(self, shake: Handshake) -> None:
        if shake.sock not in self._shaking:
            return  # made room in this very turn
        try:
            frame = shake.read()
            if frame is None:
                return
            done = self._greet(shake, frame) if shake.hello is None else self._prove(shake, frame)
        except Exception:  # broken, malformed, or no memory for it: this connection ends, the others go on
            done = True
        if done and shake.sock in self._shaking:
            self._drop(shake)

    def _greet(self, shake: Handshake, frame: bytes) -> bool:
        """True: nothing more will come of it."""
        hello = frames.Hello.unpack(frame)
        landing = self._landings.find(hello.ticket)
        status = frames.OK
        if hello.version != frames.VERSION:
            status = frames.VERSION_SKEW
        elif landing is None:
            status = frames.UNKNOWN
        elif landing.ticket.mode != hello.mode:
            status = frames.MODE
        shake.answer(status, shake.nonce)
        shake.hello, shake.landing = hello, landing
        return status != frames.OK

    def _prove(self, shake: Handshake, frame: bytes) -> bool:
        hello, landing = shake.hello, shake.landing
        assert hello is not None and landing is not None, "PROOF comes after HELLO"
        secret = frames.StreamSecret(landing.ticket, self._bulk_key, hello, shake.nonce)
        if not secret.check(frame, "sender"):
            shake.answer(frames.WRONG_KEY)
            return True
        status = self._start(shake, landing, hello, secret)
        if status != frames.OK:
            shake.answer(status)
        return status != frames.OK

    def _start(
        self, shake: Handshake, landing: Landing, hello: frames.Hello, secret: frames.StreamSecret
    ) -> int:
        if self.streams >= self._connections_max:
            return frames.BUSY
        stream = Stream(
            shake.sock, landing, hello.stream, secret, self._idle_timeout_s, self._handshake_timeout_s, self._scratch,
            lambda: self.on_bytes(),
        )  # fmt: skip
        status = landing.admit(hello, stream.interrupt, time.monotonic())
        if status == frames.OK:
            try:
                self._employ(shake, stream)
            except Exception as error:  # no thread
                log.warning("a stream is refused: %s", error)
                landing.dismiss(hello.stream)
                status = frames.BUSY
        return status

    def _employ(self, shake: Handshake, stream: Stream) -> None:
        """Give the stream a thread, or a place in their queue. Raises OSError: neither; the connection is the caller's to end."""
        self._selector.unregister(shake.sock)  # before the thread has it
        with self._lock:
            self._streams.add(stream)
        try:
            self._threads.submit(self._serve, stream)
            del self._shaking[shake.sock]
        except BaseException:
            with self._lock:
                self._streams.discard(stream)
            raise

    def _serve(self, stream: Stream) -> None:
        try:
            stream.run()
        finally:
            with self._lock:
                self._streams.discard(stream)


def _listen(bind: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((bind.strip("[]"), port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        hint = "is bind_address an address of this machine (`ip -br addr`)? is the port free (`ss -ltnp`)?"
        raise CkptdError(f"cannot listen for bulk: {error.strerror}", where=join_address(bind, port), hint=hint) from error
    sock.setblocking(False)
    return sock
