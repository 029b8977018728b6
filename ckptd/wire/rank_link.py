"""The daemon's end of the unix socket: who connects, which process that is, and when it dies (design D2,
P13).

Runs in the daemon's event loop and never waits for a rank: what a stopped rank does not take is queued up to
a bound, then the connection is closed (it comes back by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter
from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.process import Process, peer_credentials
from ckptd.wire import rank as wire
from ckptd.wire.complaints import Complaints
from ckptd.wire.path_lock import PathLock
from ckptd.wire.rank_session import OnClose, OnMessage, OnOpen, RankSession, Reason
from ckptd.wire.seqpacket import RankSocket

__all__ = ["RankLink", "RankSession"]

CONNECTIONS_MAX = 1024  # of all users
CONNECTIONS_PER_UID_MAX = 256
BACKLOG = 128
GARBAGE_FREE = 8  # connections of one user that may end in garbage, before the next ones wait to be listened to
GARBAGE_PAUSE_S, GARBAGE_PAUSE_MAX_S = 0.05, 2.0  # the first such pause, doubling
GARBAGE_FORGIVEN_S = 60.0  # after the last
GARBAGE_COUNT_MAX = 64
USERS_REMEMBERED_MAX = 1024
ACCEPT_PAUSE_S = 0.1  # after the process ran out of descriptors
LOOK_S = 5.0  # between two looks at the path


class RankLink:
    """Listens on ``path``. ``on_message`` may raise ValueError: that connection is closed as garbage. The
    descriptors given to it are closed when it returns. All callbacks run in the event loop.

    Raises CkptdError at ``start`` when another daemon serves the path or it cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_open: OnOpen,
        on_message: OnMessage,
        on_close: OnClose,
        *,
        mode: int = 0o600,
        connections_max: int = CONNECTIONS_MAX,
        connections_per_uid_max: int = CONNECTIONS_PER_UID_MAX,
    ) -> None:
        self.path, self._mode = Path(path), mode
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._connections_max = connections_max
        self._per_uid_max = min(connections_per_uid_max, connections_max)
        self.sessions: set[RankSession] = set()
        self._per_uid: Counter[int] = Counter()
        self.turned_away = 0
        self._garbage: dict[int, tuple[int, float]] = {}  # uid -> connections that ended so, and when the last one did
        self._complaints = Complaints()
        self._lock = PathLock(self.path, "another daemon serves this socket", "stop it, or set another socket")
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """In the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except OSError as error:
            hint = "set socket, the same for daemon and ranks, to a path of yours; XDG_RUNTIME_DIR may be another node's"
            raise CkptdError(f"cannot be made: {error.strerror}", where=str(self.path), hint=hint) from error
        try:
            self._listener = self._listen()
        except OSError as error:
            self._lock.drop()
            raise CkptdError(f"cannot listen: {error}", where=str(self.path), hint="set socket") from error
        except CkptdError:
            self._lock.drop()
            raise
        self._loop.add_reader(self._listener, self._accept)
        self._watch()

    def stop(self) -> None:
        """Close all connections and remove the path."""
        if self._listener is None:
            return
        self._watching.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        self.path.unlink(missing_ok=True)
        for session in list(self.sessions):
            session.close()
        self._complaints.close()
        self._lock.drop()

    def _listen(self) -> socket.socket:
        _remove_dead_socket(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            before = os.umask(0o177)  # nobody gets in between bind and chmod
            try:
                listener.bind(str(self.path))
            finally:
                os.umask(before)
            self.path.chmod(self._mode)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def _watch(self) -> None:
        self._watching = self._loop.call_later(LOOK_S, self._watch)
        self.look()

    def look(self) -> None:
        """Whoever sweeps old files away, or an operator, may have removed the path: no rank would come any more. What another made
        there stays."""
        if self._listener is None or os.path.lexists(self.path):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.drop()
            self._lock.take()
            listener = self._listen()
        except (OSError, CkptdError) as error:
            self._complaints.say("listener", f"{self.path} was removed, and cannot be made again: {error}")
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = listener
        self._loop.add_reader(listener, self._accept)
        self._complaints.say("listener", f"{self.path} was removed, and is there again")

    # --- connections --------------------------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(BACKLOG):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except (
                OSError
            ) as error:  # out of descriptors: the listener stays readable, so look away for a moment
                self._complaints.say("listener", f"cannot accept a rank: {error}")
                self._pause()
                return
            self._admit(sock)

    def _pause(self) -> None:
        assert self._listener is not None
        self._loop.remove_reader(self._listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, sock: socket.socket) -> None:
        pid, uid, _ = peer_credentials(sock)
        if len(self.sessions) >= self._connections_max or self._per_uid[uid] >= self._per_uid_max:
            self._turn_away(sock, f"too many connections of uid {uid}", "close clients that are not needed")
            return
        try:
            process = Process.of_peer(sock)
        except OSError as error:
            hint = "run both in one pid namespace (hostPID, shareProcessNamespace)"
            self._turn_away(sock, f"process {pid} cannot be watched: {error}", hint)
            return
        session = RankSession(sock, process, uid, self._on_message, self._forget, self._complaints, self._pause_of(uid))
        self.sessions.add(session)
        self._per_uid[uid] += 1
        self._on_open(session)

    def _pause_of(self, uid: int) -> float:
        """Whoever sends garbage is listened to later and later (D20), until he has sent none for a while."""
        count, at = self._garbage.get(uid, (0, 0.0))
        if count <= GARBAGE_FREE or self._loop.time() - at > GARBAGE_FORGIVEN_S:
            return 0.0
        return min(GARBAGE_PAUSE_S * 2.0 ** (count - GARBAGE_FREE - 1), GARBAGE_PAUSE_MAX_S)

    def _note_garbage(self, uid: int) -> None:
        now = self._loop.time()
        self._garbage = {who: (n, at) for who, (n, at) in self._garbage.items() if now - at <= GARBAGE_FORGIVEN_S}
        count, _ = self._garbage.get(uid, (0, now))
        if uid in self._garbage or len(self._garbage) < USERS_REMEMBERED_MAX:
            self._garbage[uid] = min(count + 1, GARBAGE_COUNT_MAX), now

    def _turn_away(self, sock: socket.socket, what: str, hint: str) -> None:
        self.turned_away += 1
        with sock, contextlib.suppress(OSError):  # it may have gone by itself
            RankSocket(sock, ()).send(wire.Refused(what, str(self.path), hint))

    def _forget(self, session: RankSession, reason: Reason) -> None:
        if reason == "garbage":
            self._note_garbage(session.uid)
        self.sessions.discard(session)
        self._per_uid[session.uid] -= 1
        if not self._per_uid[session.uid]:
            del self._per_uid[session.uid]
        self._on_close(session, reason)


def _remove_dead_socket(path: Path) -> None:
    """A daemon that was killed leaves its socket file. Only a socket that nobody serves is removed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CkptdError("not a socket", where=str(path), hint="set socket to a path of its own")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # a full backlog: somebody listens
    raise CkptdError(
        "another process serves this socket", where=str(path), hint="stop it, or set another socket"
    )
