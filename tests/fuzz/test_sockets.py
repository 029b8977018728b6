"""Half-valid frames on the real sockets of a whole daemon: it lives, nothing of ours fails, and a good rank is served (P13)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict

import pytest
import pytest_asyncio

from ckptd.wire import link_frames as lf
from ckptd.wire import rank as wire
from ckptd.wire import rank_link
from ckptd.wire.seqpacket import FDS_MAX, RankSocket, memfd_object
from ckptd.wire.world import pack_world
from tests.fuzz.mutate import mutant
from tests.fuzz.registry import TARGETS
from tests.node.daemon_rig import Rig, rig
from tests.node.links import RawPeer, eventually

STRANGERS = 40  # connections to each door
FRAMES = 8  # of each
OBJECTS = ("layout", "world", "wants", "slot-record")  # what a descriptor beside a frame may hold


@pytest_asyncio.fixture
async def r() -> AsyncIterator[Rig]:
    async with rig() as made:
        rank = made.rank()
        await rank.begin("good")
        await rank.sealed(1)
        yield made
        assert made.ranks[0].link.fileno() >= 0
        await made.ranks[0].sealed(2)
        made.ranks[0].say(wire.AskHealth(77))
        await made.ranks[0].heard(wire.Health, request=77)
        assert "internal" not in made.problems(), made.problems()


# --- the ranks' socket ------------------------------------------------------------------------------------------
async def test_ranks_that_speak_half_valid_frames(r: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: after a valid Hello, and after a valid Join, of another job of the same user."""
    monkeypatch.setattr(rank_link, "GARBAGE_PAUSE_MAX_S", rank_link.GARBAGE_PAUSE_S)  # else most of the time is the pauses
    for number in range(STRANGERS):
        chance = random.Random(number)
        link = RankSocket.connect(r.daemon.config.socket)
        link.send(wire.Hello(wire.PROTOCOL_VERSION, f"evil{number % 3}", os.getpid()))
        if number % 2:
            _join(r, link, f"attempt{number}")
        with contextlib.suppress(OSError):  # hung up on, as it should be
            for _ in range(FRAMES):
                _send_mutant(link, chance)
            link.send(wire.AskHealth(number))
        answered = lambda link=link: _answered(link)  # noqa: E731
        assert await eventually(answered, what=f"stranger {number} is answered or hung up on")
        link.close()


def _join(r: Rig, link: RankSocket, attempt: str) -> None:
    node = asdict(r.daemon.services.node)
    fd = memfd_object(pack_world([node["node"]], [node]))
    link.send(wire.Join(attempt, 0, 4096, {"step": None, "source": None, "allow_fresh": False}), (fd,))
    os.close(fd)


def _send_mutant(link: RankSocket, chance: random.Random) -> None:
    """Mostly a valid frame of some class with damaged objects beside it, else a damaged frame."""
    target = TARGETS["rank-frame"]
    frame = (
        chance.choice(target.valid)
        if chance.random() < 0.8
        else mutant(target, chance)[: wire.FRAME_BYTES_MAX]
    )
    carries = any(cls.__name__.encode() in frame[:20] for cls in FDS_MAX)
    fds = [memfd_object(mutant(TARGETS[chance.choice(OBJECTS)], chance))] if carries else []
    try:
        link.send_frame(frame or b"\0", fds)
    finally:
        for fd in fds:
            os.close(fd)


def _answered(link: RankSocket) -> bool:
    """Its question about health, or by the end of the connection."""
    try:
        while (got := link.recv(0)) is not None:
            for fd in got[1]:
                os.close(fd)
            if isinstance(got[0], wire.Health) and got[0].request > 0:
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


# --- the ports --------------------------------------------------------------------------------------------------
async def test_a_peer_that_speaks_half_valid_frames(r: Rig) -> None:
    """P13: greetings, frames and messages, before and after a valid greeting, about jobs that are not there."""
    node = r.daemon.services.node
    for number in range(STRANGERS // 4):
        chance, peer = random.Random(number), RawPeer(node.control, key=r.daemon.secret)
        try:
            if number % 2:
                assert (await peer.greet(f"evil{number}", "i1", node.node))[0] == lf.WELCOME
            for _ in range(4 * FRAMES):
                for frame in _control_frames(chance):
                    peer.socket.send(frame)
            await _still_answers(r, f"again{number}")
        finally:
            peer.close()


async def _still_answers(r: Rig, name: str) -> None:
    node = r.daemon.services.node
    good = RawPeer(node.control, key=r.daemon.secret)
    try:
        assert (await good.greet(name, "i1", node.node))[0] == lf.WELCOME
    finally:
        good.close()


def _control_frames(chance: random.Random) -> list[bytes]:
    kind = chance.randrange(3)
    if kind == 0:
        return [mutant(TARGETS["control-greeting"], chance)[: lf.FRAME_BYTES_MAX] or b"\0"]
    if kind == 1:
        return [chance.choice(b"HWRPOMx").to_bytes(1, "big") + chance.randbytes(chance.randrange(60))]
    message = mutant(TARGETS["control-message"], chance)
    return list(lf.Letter("4242/evil", message).frames(chance.randrange(9)))


async def test_strangers_at_the_bulk_port_and_the_status_page(
    r: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """P13: the bulk listener and the page of the daemon; random bytes are in tests/node/test_bulk_strangers.py."""
    host, _, port = r.daemon.transport.address.rpartition(":")
    page = r.daemon.http.address
    for number in range(STRANGERS):
        chance = random.Random(number)
        hello = mutant(TARGETS["bulk-hello"], chance) + mutant(TARGETS["bulk-chunks"], chance)
        await asyncio.to_thread(_knock, (host, int(port)), hello)
        await asyncio.to_thread(_knock, page, _request(chance))
    good = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await asyncio.to_thread(_knock, page, good, ends=False)
    assert answer.startswith(b"HTTP/1.1 "), answer
    assert "Invalid HTTP" not in caplog.text, "a line of log for each piece of garbage"


def _request(chance: random.Random) -> bytes:
    path = chance.choice(
        (b"/metrics", b"/status?x=%00%ff", b"/ls/../../etc/passwd", b"/\xff", b"/" + b"a" * 70_000, b"*")
    )
    head = chance.choice((b"Host: localhost", b"Host: evil.example", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
                          b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF", b"X: " + b"y" * 70_000, b"\0: \0"))  # fmt: skip
    method = chance.choice((b"GET", b"POST", b"PRI", b"\0", b"GET" * 99))
    return method + b" " + path + b" HTTP/1.1\r\n" + head + b"\r\nConnection: close\r\n\r\n"


def _knock(address: tuple[str, int], data: bytes, *, ends: bool = True) -> bytes:
    """What is answered until the other side hangs up. ends: say that no more will come."""
    answer = b""
    patience_s = 2.0 if ends else 30.0
    with socket.create_connection(address, timeout=patience_s) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        if ends:
            sock.shutdown(socket.SHUT_WR)
        while part := sock.recv(4096):
            answer += part
    return answer
