"""One rank's connection, as the daemon sees it: what it said, what waits for it, whether its process lives (design D2)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from ckptd.process import Process
from ckptd.wire import rank as wire
from ckptd.wire.complaints import Complaints
from ckptd.wire.seqpacket import FrameError, RankSocket, close_all, encode_frame

QUEUE_FRAMES_MAX = 1024  # waiting for one rank
QUEUE_BYTES_MAX = 8 << 20
FRAMES_PER_TURN_MAX = 64  # of one rank before the others get their turn
FRAMES_LAST_MAX = 4096  # read from a dead process; a socket buffer holds about as many
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)  # what sending to a peer says that has closed
DEATH_GRACE_S = 0.25  # a dying process closes its socket a little before its pidfd fires

Reason = Literal["dead", "closed", "garbage"]
OnOpen = Callable[["RankSession"], None]
OnMessage = Callable[["RankSession", Any, list[int]], None]
OnClose = Callable[["RankSession", Reason], None]


class RankSession:
    """One connected rank process. ``alive`` stays meaningful after the connection has closed."""

    def __init__(
        self,
        sock: socket.socket,
        process: Process,
        uid: int,
        on_message: OnMessage,
        on_close: OnClose,
        complaints: Complaints,
        pause_s: float = 0.0,
    ) -> None:
        """``pause_s``: until it is listened to."""
        self._complaints = complaints
        self.uid, self.pid, self.process = uid, process.pid, process
        self._on_message, self._on_close = on_message, on_close
        self._sock = RankSocket(sock, wire.TO_DAEMON)
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._queued_bytes = 0
        self._segments: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.fileno(), self._died)
        self._grace: asyncio.TimerHandle | None = None
        self.closed = False
        if pause_s:
            self._loop.call_later(pause_s, self._listen)
        else:
            self._listen()

    @property
    def alive(self) -> bool:
        """Does the process live? Its pidfd says so; the end of the connection does not."""
        return self.process.alive

    def send(self, message: object, fds: Sequence[int] = ()) -> bool:
        """Queued when the rank does not take it now. False: the connection is closed, or just was because it
        takes nothing any more. ``fds`` stay the caller's. Raises FrameError for a message too large."""
        data = encode_frame(message)
        if self.closed:
            return False
        if self._queue or not self._send_now(data, fds):
            return self._enqueue(data, fds)
        return True

    def send_segment(self, message: wire.Mapped, name: str, fd: int) -> bool:
        """``message`` with the segment's descriptor, the first time that this connection hears of that
        segment."""
        known = name in self._segments
        self._segments.add(name)
        return self.send(message, () if known else (fd,))

    def close(self, reason: Reason = "closed") -> None:
        """Tells ``on_close`` once. The process stays watched through ``alive``."""
        if self.closed:
            return
        self.closed = True
        if self._grace is not None:
            self._grace.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        if self.process.fileno() >= 0:
            self._loop.remove_reader(self.process.fileno())
        self._sock.close()
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()
        self._on_close(self, reason)

    # --- sending ------------------------------------------------------------------------------------
    def _send_now(self, data: bytes, fds: Sequence[int]) -> bool:
        """False: it does not take it now. A peer that is gone takes everything; its end is seen by reading."""
        try:
            return self._sock.send_frame(data, fds)
        except OSError as error:
            if error.errno not in GONE:
                self._lacks(error)
            return error.errno in GONE

    def _lacks(self, error: OSError) -> None:
        """What it was to hear is lost, for what the kernel or this process lacks: it comes back by itself, and hears all anew."""
        self._complain(f"cannot be told: {error}, its connection is closed")
        self.close()

    def _enqueue(self, data: bytes, fds: Sequence[int]) -> bool:
        if self.closed:
            return False
        if len(self._queue) >= QUEUE_FRAMES_MAX or self._queued_bytes + len(data) > QUEUE_BYTES_MAX:
            self._complain("takes no messages, its connection is closed")
            self.close()
            return False
        kept: list[int] = []
        try:
            for fd in fds:
                kept.append(os.dup(fd))  # noqa: PERF401 -- those before the one that fails are closed
        except OSError as error:
            close_all(kept)
            self._lacks(error)
            return False
        if not self._queue:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._queue.append((data, kept))
        self._queued_bytes += len(data)
        return True

    def _writable(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            if not self._send_now(data, fds):
                return
            self._queue.popleft()
            self._queued_bytes -= len(data)
            close_all(fds)
        self._loop.remove_writer(self._sock.fileno())

    # --- receiving ----------------------------------------------------------------------------------
    def _listen(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        self._read(FRAMES_PER_TURN_MAX)

    def _read(self, frames_max: int) -> None:
        for _ in range(frames_max):
            if self.closed:
                return
            try:
                received = self._sock.recv(0)
            except TimeoutError:
                return
            except (FrameError, OSError) as error:
                self.garbage(error)
                return
            if received is None:
                self._ended()
                return
            self._deliver(*received)

    def _deliver(self, message: Any, fds: list[int]) -> None:
        try:
            self._on_message(self, message, fds)
        except ValueError as error:
            self.garbage(error)
        finally:
            close_all(fds)

    def garbage(self, error: Exception) -> None:
        """It sent what no client sends: the connection is closed."""
        self._complain(f"sent garbage: {error}")
        self.close("garbage")

    def _complain(self, what: str) -> None:
        self._complaints.say(f"uid {self.uid}", f"process {self.pid} {what}")

    def _ended(self) -> None:
        """Either it is dying, or it only closed the socket. A moment later its pidfd tells."""
        self._loop.remove_reader(self._sock.fileno())
        self._grace = self._loop.call_later(DEATH_GRACE_S, self.close)

    def _died(self) -> None:
        """A forked child may hold the socket open for long (4-18 s measured with loader workers): this is the
        end all the same. What it sent before is handled first."""
        self._loop.remove_reader(self.process.fileno())
        if self._grace is None:
            self._read(FRAMES_LAST_MAX)
        self.process.close()
        self.close("dead")
