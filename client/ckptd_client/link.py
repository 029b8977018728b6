"""The connection to the daemon: one thread receives, reconnects and drains what could not be sent at once.

Nothing here lets a dead, stopped or slow daemon hold up the trainer (P5): callers only ever try a non-blocking send, what
does not go out waits in a bounded queue, and when that is full the connection is given up and made anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import FrameError, RankSocket, encode_frame
from ckptd_client import forks

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
REFUSED_BACKOFF_S = 10.0  # a daemon that refused will mostly refuse again
OUTBOX_FRAMES_MAX = 4096  # a daemon stopped for longer than this lasts is treated as lost
CLOSE_DRAIN_S = 1.0  # for the last frames and the goodbye

log = logging.getLogger("ckptd")
Handler = Callable[[Any, list[int]], None]


class Link:
    """``on_message`` and the others run on the link's thread; fds given to ``on_message`` are the handler's to close."""

    def __init__(
        self,
        path: str,
        job: str,
        on_message: Handler,
        on_up: Callable[[wire.Welcome], None],
        on_down: Callable[[str], None],
        on_refused: Callable[[wire.Refused], None],
    ) -> None:
        self.path, self._job = path, job
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._on_refused = on_refused
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._lock = threading.Lock()
        self._socket: RankSocket | None = None
        self._up = False
        self._closing = False
        self._overflowed = False
        self._wake = forks.guard(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread = threading.Thread(target=self._run, name="ckptd-link", daemon=True)
        self.refused: wire.Refused | None = None
        self.heard_at = 0.0  # monotonic seconds of the newest frame
        self._said_at = 0.0  # of the first that we have sent since
        self.trouble = f"no daemon at {path} yet"

    def start(self) -> None:
        self._thread.start()

    @property
    def up(self) -> bool:
        return self._up

    # --- sending ------------------------------------------------------------------------------------------------
    def send(self, message: object, fds: Sequence[int] = ()) -> bool:
        """Send or queue; never waits. The fds are duplicated if need be and stay the caller's. False: no connection."""
        data = encode_frame(message)
        with self._lock:
            if not self._up or self._socket is None:
                return False
            self._says()
            if not self._outbox and self._try(data, fds):
                return True
            if len(self._outbox) >= OUTBOX_FRAMES_MAX:
                self._overflowed = True
            else:
                self._outbox.append((data, [os.dup(fd) for fd in fds]))
        self._ring()
        return True

    def send_or_drop(self, message: object) -> bool:
        """For what is only news: sent now or never."""
        data = encode_frame(message)
        with self._lock:
            self._says()
            return self._up and not self._outbox and self._try(data, ())

    def _says(self) -> None:
        if self._said_at <= self.heard_at:
            self._said_at = time.monotonic()

    @property
    def quiet_s(self) -> float:
        """For so long the daemon has said nothing to what it was told. It has nothing to say while a rank makes no snapshots."""
        return max(0.0, time.monotonic() - self._said_at) if self._said_at > self.heard_at else 0.0

    def _try(self, data: bytes, fds: Sequence[int]) -> bool:
        assert self._socket is not None
        try:
            return self._socket.send_frame(data, fds)
        except OSError:
            return False  # the receiving thread finds the same out and reconnects

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the thread is just ending
            os.eventfd_write(self._wake, 1)

    def close(self, goodbye: wire.Goodbye | None) -> None:
        """Say goodbye if there is anybody, within CLOSE_DRAIN_S, and end the thread."""
        if goodbye is not None:
            self.send(goodbye)
        self._closing = True
        self._ring()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * CLOSE_DRAIN_S)

    # --- the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause = BACKOFF_FIRST_S
        while not self._closing:
            sock, began = self._connect(), time.monotonic()
            served = sock is not None and self._serve(sock)
            lasted = time.monotonic() - began > BACKOFF_MAX_S  # one that welcomes us and hangs up will mostly do so again
            pause = BACKOFF_FIRST_S if served and lasted else min(2 * pause, BACKOFF_MAX_S)
            if not self._closing:
                self._sleep(REFUSED_BACKOFF_S if self.refused else pause)
        forks.close(self._wake)

    def _connect(self) -> RankSocket | None:
        try:
            sock = RankSocket.connect(self.path)
        except OSError as error:
            self.trouble = f"no daemon at {self.path}: {error.strerror or error}"
            return None
        forks.guard(sock.fileno())
        return sock

    def _serve(self, sock: RankSocket) -> bool:
        """Until the connection ends. True when it had been welcomed."""
        reason = "closed"
        try:
            with contextlib.suppress(BrokenPipeError):  # a daemon that turned us away at once has said why before it closed
                sock.send(wire.Hello(wire.PROTOCOL_VERSION, self._job, os.getpid()))
            self.trouble = f"the daemon at {self.path} does not answer"
            reason = self._pump(sock)
        except (OSError, FrameError) as error:
            reason = str(error)
        welcomed = self._teardown(sock, reason)
        return welcomed

    def _teardown(self, sock: RankSocket, reason: str) -> bool:
        with self._lock:
            welcomed, self._up, self._socket = self._up, False, None
            while self._outbox:
                close_all(self._outbox.popleft()[1])
        forks.release(sock.fileno())
        sock.close()
        if welcomed and not self._closing:
            self.trouble = f"connection to {self.path} lost: {reason}"
            self._guarded(self._on_down, reason)
        return welcomed

    def _pump(self, sock: RankSocket) -> str:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        closing_at = 0.0
        while True:
            if self._closing and not closing_at:
                closing_at = time.monotonic() + CLOSE_DRAIN_S
            if closing_at and (not self._outbox or time.monotonic() > closing_at):
                return "closed"
            if self._overflowed:
                self._overflowed = False
                return "the daemon takes nothing any more"
            poller.register(sock.sock, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            poller.poll(None if not closing_at else CLOSE_DRAIN_S * 1000)
            self._unring()
            self._drain(sock)
            end = self._receive(sock)
            if end:
                return end

    def _drain(self, sock: RankSocket) -> None:
        with self._lock:
            while self._outbox:
                data, fds = self._outbox[0]
                if not sock.send_frame(data, fds):
                    return
                self._outbox.popleft()
                close_all(fds)

    def _receive(self, sock: RankSocket) -> str:
        """Everything that is there. The reason, once the connection is over."""
        while True:
            try:
                got = sock.recv(timeout_s=0)
            except TimeoutError:
                return ""
            if got is None:
                return "the daemon closed the connection"
            self.heard_at = time.monotonic()
            message, fds = got
            if isinstance(message, wire.Welcome):
                self._welcomed(sock, message)
            elif isinstance(message, wire.Refused):
                self.refused = message
                self.trouble = f"refused by the daemon: {message.what}"
                self._guarded(self._on_refused, message)
                return message.what
            else:
                self._guarded(self._on_message, message, fds)

    def _welcomed(self, sock: RankSocket, message: wire.Welcome) -> None:
        self.refused, self.trouble = None, ""
        with self._lock:
            self._socket, self._up = sock, True
        self._guarded(self._on_up, message)

    def _guarded(self, handler: Callable[..., None], *values: Any) -> None:
        """A mistake of ours in a handler must not end the thread: it is logged, the connection goes on."""
        try:
            handler(*values)
        except Exception:
            log.exception("ckptd client: handling %s", type(values[0]).__name__)

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.poll(seconds * 1000)
        self._unring()

    def _unring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
