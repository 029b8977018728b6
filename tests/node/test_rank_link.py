"""The daemon's end of the unix socket against real processes, well-meaning and not (D2, P5, P13)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from ckptd.wire import rank_link, rank_session
from ckptd.wire.complaints import Complaints
from ckptd.wire.rank_link import GARBAGE_FREE, RankLink, RankSession
from ckptd.wire.seqpacket import FrameError, RankSocket, read_memfd_object
from tests.descriptors import opened, opened_since
from tests.short import short_folder

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER = """
import asyncio, sys
from ckptd.wire.rank_link import RankLink

async def serve():
    RankLink(sys.argv[1], *[lambda *_: None] * 3).start()
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(serve())
"""


class Rank:
    """A process with one connection."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.node.rank_process", str(path)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0)

    async def order(self, text: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(await asyncio.to_thread(self.process.stdout.readline))

    def end(self) -> None:
        with self.process:
            self.process.kill()


class House:
    """A RankLink that writes down what it is told."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.path = directory / "run" / "ckptd.sock"
        self.opened: list[RankSession] = []
        self.messages: list[tuple[RankSession, Any]] = []
        self.objects: list[bytes] = []
        self.closed: list[tuple[RankSession, str]] = []
        self.ranks: list[Rank] = []
        self.link = RankLink(
            self.path,
            self.opened.append,
            self._on_message,
            lambda s, r: self.closed.append((s, r)),
            **options,
        )

    def _on_message(self, session: RankSession, message: Any, fds: list[int]) -> None:
        self.messages.append((session, message))
        self.objects += [read_memfd_object(fd, 100) for fd in fds]
        if isinstance(message, wire.Hello) and message.pid != session.pid:
            raise ValueError("another's pid")

    async def rank(self) -> tuple[Rank, RankSession]:
        before = len(self.opened)
        self.ranks.append(Rank(self.path))
        await self.ranks[-1].answer()
        await settled(lambda: len(self.opened) > before)
        return self.ranks[-1], self.opened[-1]


async def settled(predicate: Callable[[], object], timeout: float = 30.0) -> None:
    async def poll() -> None:
        while not predicate():  # noqa: ASYNC110 -- facts of other processes have no event
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), timeout)


@pytest_asyncio.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, connections_max=8, connections_per_uid_max=6)
    made.link.start()
    yield made
    made.link.stop()
    for rank in made.ranks:
        rank.end()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that go to the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckptd.wire")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


async def test_a_rank_is_known_by_what_the_kernel_says(house: House) -> None:
    rank, session = await house.rank()
    assert await rank.order("hello") is True
    await settled(lambda: house.messages)
    assert (session.pid, session.uid) == (rank.process.pid, os.getuid())
    assert house.messages[0][1] == wire.Hello(wire.PROTOCOL_VERSION, "gpt", rank.process.pid)
    assert session.alive
    assert session.send(wire.Ready(4))
    assert await rank.order("recv") == ["Ready", 0]


async def test_a_segment_travels_once_per_connection(house: House) -> None:
    rank, session = await house.rank()
    fd = os.memfd_create("segment")
    mapped = wire.Mapped(1, "own-1", 4096, 0, 4096)
    for expected in (1, 0):
        assert session.send_segment(mapped, "own-1", fd)
        assert await rank.order("recv") == ["Mapped", expected]
    os.close(fd)


async def test_descriptors_are_closed_once_the_message_was_handled(house: House) -> None:
    rank, _ = await house.rank()
    await rank.order("hello")
    before = opened()
    for _ in range(5):
        await rank.order("memfd 1")
    await settled(lambda: len(house.objects) == 5)
    assert house.objects == [b"object"] * 5
    assert opened_since(before) == []


async def test_death_is_the_pidfd_even_while_a_forked_worker_holds_the_socket(house: House) -> None:
    """D2: loader workers kept the socket open for 4-18 s."""
    rank, session = await house.rank()
    await rank.order("hello")
    worker = await rank.order("fork")
    try:
        rank.process.kill()
        await settled(lambda: house.closed)
        assert house.closed == [(session, "dead")]
        assert not session.alive
        assert not session.send(wire.Ready(1)), "and what is said to the dead is no error"
        os.kill(worker, 0)
    finally:
        os.kill(worker, signal.SIGKILL)


async def test_a_death_that_others_notice_first_is_told_all_the_same(house: House) -> None:
    """The arena asks every mapper whether it lives; that must not take the news from the session."""
    rank, session = await house.rank()
    rank.process.kill()
    rank.process.wait()
    while session.alive:  # at once: the loop has had no turn since
        continue
    assert house.closed == []
    await settled(lambda: house.closed)
    assert house.closed == [(session, "dead")]


async def test_what_a_rank_said_before_it_died_counts(house: House) -> None:
    rank, session = await house.rank()
    house.link._loop.remove_reader(session._sock)  # the daemon is busy; only the pidfd is seen
    assert await rank.order("flood 100") == 100
    rank.process.kill()
    await settled(lambda: house.closed)
    assert [message.step for _, message in house.messages] == list(range(100))
    assert house.closed == [(session, "dead")]


async def test_a_closed_connection_of_a_living_process_is_not_its_death(house: House) -> None:
    rank, session = await house.rank()
    await rank.order("close")
    await settled(lambda: house.closed)
    assert house.closed == [(session, "closed")]
    assert session.alive, "it may still write into the memory that it maps"
    rank.process.kill()
    await settled(lambda: not session.alive)
    assert house.closed == [(session, "closed")], "told once"


async def test_a_process_that_dies_right_after_its_socket_closed_is_dead(house: House) -> None:
    """A dying process closes its socket before its pidfd fires."""
    rank, session = await house.rank()
    await rank.order("close")
    rank.process.kill()
    await settled(lambda: house.closed)
    assert house.closed == [(session, "dead")]


@pytest.mark.parametrize(
    "garbage", ["raw c1", "raw 00", "raw 92a64772616e746580", "big 70000", "memfd 2", "memfd 70"]
)
async def test_garbage_closes_that_connection_only(house: House, garbage: str) -> None:
    """P13: whatever it sends, others go on and nothing is left open."""
    good, _ = await house.rank()
    await good.order("hello")
    before = opened()
    bad, session = await house.rank()
    await bad.order(garbage)
    await settled(lambda: house.closed)
    assert house.closed == [(session, "garbage")]
    assert await bad.order("recv") is None
    bad.end()
    await settled(lambda: not session.alive)
    assert await good.order("hello") is True
    await settled(lambda: len(house.messages) == 2)
    assert {number for number, _ in opened_since(before)} <= {session.process.fileno()}, "alive is asked of its pidfd"


async def test_whoever_sends_garbage_is_listened_to_later_and_later_and_nobody_else(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D20. One user's own processes share that, as they share his uid."""
    monkeypatch.setattr(rank_link, "GARBAGE_PAUSE_S", 0.001)
    pauses = []
    for count in range(1, GARBAGE_FREE + 5):
        with contextlib.closing(RankSocket.connect(house.path)) as link:
            link.sock.send(b"\xc1")
            await settled(lambda: len(house.closed) == count)  # noqa: B023 - awaited here
        pauses.append(house.link._pause_of(os.getuid()))
    assert pauses == [0.0] * GARBAGE_FREE + [0.001, 0.002, 0.004, 0.008]
    assert house.link._pause_of(os.getuid() + 1) == 0.0
    good, _ = await house.rank()
    assert await good.order("hello") is True
    monkeypatch.setattr(rank_link, "GARBAGE_FORGIVEN_S", -1.0)
    assert house.link._pause_of(os.getuid()) == 0.0


async def test_a_flood_of_garbage_is_one_line_and_a_count(
    house: House, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13: whoever may connect must not be able to fill the log."""
    monkeypatch.setattr(rank_link, "GARBAGE_PAUSE_MAX_S", 0.01)
    for count in range(1, 31):
        with contextlib.closing(RankSocket.connect(house.path)) as link:
            link.sock.send(b"\xc1" * (count * 10_000 % 90_000 + 1))  # some larger than a frame may be
            await settled(lambda: len(house.closed) == count)  # noqa: B023 - awaited here
    assert len(said) == 1
    assert said[0].startswith(f"uid {os.getuid()}: process {os.getpid()} sent garbage")
    house.link.stop()
    assert len(said) == 2
    assert "29 more" in said[1]


def test_complaints_are_counted_for_each_by_itself(said: list[str]) -> None:
    passes: list[Callable[[], None]] = []
    made = Complaints(lambda seconds, call, who: passes.append(lambda: call(who)))
    made.say("uid 1", "one\nINFO forged" + "x" * 500)
    made.say("uid 1", "two")
    made.say("uid 2", "three")
    made.say("uid 1", "four")
    assert said[0] == "uid 1: " + ("one INFO forged" + "x" * 500)[:200]
    assert said[1:] == ["uid 2: three"]
    first, second = passes
    first()
    second()
    assert said[2:] == ["uid 1: 2 more within 60 s, the last: four"]
    made.say("uid 2", "after a minute of silence")
    made.say("uid 1", "five")
    assert said[3:] == ["uid 2: after a minute of silence"]
    passes[2]()
    assert said[4:] == ["uid 1: 1 more within 60 s, the last: five"]
    for uid in range(1000):
        made.say(f"uid {uid}", "flood")
    assert len(said) < 300


async def test_a_handler_may_call_a_message_garbage(house: House) -> None:
    rank, session = await house.rank()
    await rank.order(
        "raw " + "92a548656c6c6f83a776657273696f6e01a36a6f62a3677074a370696401"
    )  # Hello with pid 1
    await settled(lambda: house.closed)
    assert house.closed == [(session, "garbage")]


async def test_a_flood_of_connections_is_turned_away_and_told_why(house: House) -> None:
    """P13: per user, so that one user cannot keep others out; those who are in stay in."""
    rank, _ = await house.rank()
    with contextlib.ExitStack() as stack:
        flood = []
        for _ in range(40):
            flood.append(RankSocket.connect(house.path))
            stack.callback(flood[-1].close)
        await settled(lambda: house.link.turned_away == 35)
        assert len(house.link.sessions) == 6
        received = flood[-1].recv(5)
        assert received is not None
        assert "too many connections" in received[0].what
        assert await rank.order("hello") is True
    await settled(lambda: len(house.closed) == 5)
    assert (await house.rank())[1].alive, "there is room again"


def test_a_trainer_that_the_daemons_pid_namespace_does_not_see_is_turned_away_and_told_why() -> None:
    """D1: since Linux 6.5 such a one has a pidfd, but all have the number 0, so one would get memory that another maps."""
    with short_folder() as folder:
        path = str(folder / "s")
        command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", SERVER, path]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            if daemon.stdout.readline() != "ready\n":
                pytest.skip("no new pid namespace here")
            trainer = RankSocket.connect(path)
            try:
                received = trainer.recv(5)
            finally:
                daemon.kill()
                trainer.close()
    assert received is not None
    assert "a pid namespace that this one does not see" in received[0].what and "hostPID" in received[0].hint


async def test_a_stopped_rank_costs_a_bounded_queue_and_then_its_connection(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5 seen from the daemon: it never waits, others are served meanwhile."""
    monkeypatch.setattr(rank_session, "QUEUE_FRAMES_MAX", 10)
    rank, session = await house.rank()
    other, other_session = await house.rank()
    before = opened()
    rank.process.send_signal(signal.SIGSTOP)
    fd = os.memfd_create("segment")
    sent = 0
    while session.send(wire.Mapped(sent, "x" * 50_000, 1, 0, 1), [fd] if sent % 5 == 0 else []):
        sent += 1
        assert sent < 1000
    os.close(fd)
    await settled(lambda: house.closed)
    assert house.closed == [(session, "closed")]
    assert session.alive
    assert opened_since(before) == [], "queued descriptors are closed with it"
    assert any(what.startswith("socket:") for _, what in before - opened()), "the connection itself"
    assert other_session.send(wire.Ready(1))
    assert await other.order("recv") == ["Ready", 0]


async def test_a_slow_rank_gets_everything_in_order(house: House) -> None:
    rank, session = await house.rank()
    rank.process.send_signal(signal.SIGSTOP)
    for step in range(180):
        assert session.send(wire.Level(1, step, 1, 0, 1, False, "x" * 60_000))
    assert session._queue
    rank.process.send_signal(signal.SIGCONT)
    for _ in range(180):
        assert await rank.order("recv") == ["Level", 0]
    assert not session._queue


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
async def test_a_frame_that_the_kernel_does_not_take_ends_the_connection_so_that_all_is_told_anew(
    house: House, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of a rank that lives: what it was to hear counted as sent, and nobody said it again."""
    _, session = await house.rank()

    def short(*_: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RankSocket, "send_frame", short)
    assert not session.send(wire.Ready(1))
    assert house.closed == [(session, "closed")] and session.alive


async def test_a_frame_that_cannot_be_queued_for_want_of_a_descriptor_ends_the_connection(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session = await house.rank()
    before, real, fd = opened(), os.dup, os.memfd_create("segment")

    def lacks(of: int) -> int:
        if of != fd:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(of)

    with monkeypatch.context() as patch:
        patch.setattr(RankSocket, "send_frame", lambda *_: False)
        patch.setattr(os, "dup", lacks)
        assert not session.send(wire.LoadPlan(1, [1]), [fd, 0])
    os.close(fd)
    assert house.closed == [(session, "closed")]
    assert opened_since(before) == []


async def test_a_message_too_large_is_our_own_error(house: House) -> None:
    _, session = await house.rank()
    with pytest.raises(FrameError):
        session.send(wire.Failed("x", "y" * 70_000))


async def test_two_daemons_on_one_path_are_refused_and_a_dead_ones_socket_is_replaced(tmp_path: Path) -> None:
    first, second = House(tmp_path), House(tmp_path)
    first.path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:  # a daemon that was killed leaves this
        dead.bind(str(first.path))
    first.link.start()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    with pytest.raises(CkptdError, match="another daemon"):
        second.link.start()
    first.link.stop()
    assert not first.path.exists()
    second.link.start()
    second.link.stop()


async def test_a_path_that_is_someone_elses_is_left_alone(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.path.parent.mkdir()
    house.path.write_text("precious")
    with pytest.raises(CkptdError, match="not a socket"):
        house.link.start()
    assert house.path.read_text() == "precious"
    house.path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as foreign:  # serves, but holds no lock of ours
        foreign.bind(str(house.path))
        foreign.listen()
        with pytest.raises(CkptdError, match="another process"):
            house.link.start()
        assert house.path.exists()


async def test_a_path_that_somebody_removed_is_there_again(house: House) -> None:
    """Swept with other old files from /tmp, say: the daemon lived on, and no rank could come to it."""
    rank, _ = await house.rank()
    shutil.rmtree(house.path.parent)
    house.link.look()
    await house.rank()
    assert rank in house.ranks and len(house.link.sessions) == 2, "who is connected stays so"
    house.path.unlink()
    house.path.write_text("another's")
    house.link.look()
    assert house.path.read_text() == "another's"
    other = House(house.path.parent.parent)
    with pytest.raises(CkptdError, match="another daemon"):
        other.link.start()


async def test_the_lock_dies_with_its_daemon(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "ckptd.sock.lock"
    lock.parent.mkdir()
    code = f"import fcntl,signal; f=open({str(lock)!r},'w'); fcntl.flock(f,2); print('locked',flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:  # noqa: ASYNC220
        assert holder.stdout is not None
        holder.stdout.readline()
        house = House(tmp_path)
        with pytest.raises(CkptdError, match="another daemon"):
            house.link.start()
        holder.kill()
    house.link.start()
    house.link.stop()


async def test_a_socket_whose_directory_cannot_be_made_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    """A batch system brings XDG_RUNTIME_DIR from the login node: "Permission denied: '/run/user/1000'" was all that was said."""
    (tmp_path / "user").touch()
    with pytest.raises(CkptdError, match="cannot be made") as caught:
        RankLink(tmp_path / "user" / "ckptd" / "s", lambda *_: None, lambda *_: None, lambda *_: None).start()
    assert "XDG_RUNTIME_DIR" in caught.value.hint
