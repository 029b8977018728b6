"""The control port against strangers, other keys, other versions, impostors and junk, over real sockets (P13)."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import pytest_asyncio
import zmq

from ckptd.core.ids import NodeInfo
from ckptd.core.protocol import messages as m
from ckptd.wire import link_frames as lf
from ckptd.wire.keys import ClusterKey
from ckptd.wire.rate_limiter import STRANGERS_MAX
from tests.node.links import JOB, KEY, Link, LinkProcess, RawPeer, eventually, stays

OTHER = ClusterKey(b"\x55" * 32)
QUICK_S = 0.6


@pytest_asyncio.fixture
async def a() -> AsyncIterator[Link]:
    async with Link("a") as link:
        yield link


@pytest.fixture
def raw(a: Link) -> Iterator[RawPeer]:
    peer = RawPeer(a.address)
    yield peer
    peer.close()


def knock(link: Link) -> socket.socket:
    host, _, port = link.address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


# --- keys -------------------------------------------------------------------------------------------------------
async def test_another_key_is_not_let_in_and_says_so_on_both_sides(a: Link) -> None:
    async with Link("x", secret=OTHER) as x:
        x.connect(a.info)
        await eventually(lambda: x.peers == [("a", False)])
        await eventually(lambda: x.said("another cluster key") and a.said("were refused"), 10)
        assert not x.send("a", JOB, m.FlushAsk(1, 1))
    assert not a.messages


async def test_a_link_recovers_when_the_other_side_gets_the_right_key() -> None:
    async with Link("n") as n:
        async with Link("x", secret=OTHER) as wrong:
            address = wrong.address
            n.connect(wrong.info)
            await eventually(lambda: n.up("x") is False and n.said("another cluster key"), 8)
        assert await meets_the_right_one(n, address)


async def test_a_link_recovers_when_a_plain_socket_was_at_its_place() -> None:
    """libzmq gives a socket up after a handshake that breaks the protocol; we do not."""
    context = zmq.Context()
    plain = context.socket(zmq.ROUTER)
    port = plain.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    async with Link("n") as n:
        n.connect(NodeInfo("x", address, "", ""))
        await eventually(lambda: n.up("x") is False and n.said("another cluster key"), 8)
        context.destroy(0)
        assert await meets_the_right_one(n, address)


async def meets_the_right_one(n: Link, address: str) -> bool:
    async with Link("x", address) as right:
        await eventually(lambda: n.up("x"), 8)
        sent = n.send("x", JOB, m.FlushAsk(1, 1))
        await eventually(lambda: right.messages)
        return sent and right.messages == [("n", JOB, m.FlushAsk(1, 1))]


async def test_nobody_greets_without_the_key(a: Link) -> None:
    """Loopback too: another user of the machine could fetch everybody's weights (D20)."""
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(a.address)
    plain.send(lf.pack(lf.HELLO, "p", "incarnation", "a"))
    await stays(lambda: not plain.poll(0), 1.0)
    assert a._listener is not None
    assert not a._listener._connections and a.peers == []
    context.destroy(0)


async def test_the_right_server_key_with_the_wrong_client_key_is_stopped_by_the_allow_list(a: Link) -> None:
    """Whoever knows only the public server key encrypts well and is still nobody."""
    stranger = RawPeer(a.address, KEY, client=OTHER)
    stranger.socket.send(lf.pack(lf.HELLO, "x", "i1", "a"))
    await eventually(lambda: a.said("were refused"))
    assert a._listener is not None
    assert not a._listener._connections
    stranger.close()


# --- strangers on the port --------------------------------------------------------------------------------------
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
        b"\x16\x03\x01\x02\x00" + bytes(500),
        b"\xff" * 100_000,
        GREETING + b"\x06" + struct.pack(">Q", 1 << 30) + bytes(1000),  # a command of 1 GiB
        GREETING + b"\x02" + struct.pack(">Q", 2**63 - 1) + bytes(1000),  # a message of 8 EiB
        GREETING + b"\x04\x05READY",
    ],
)
async def test_garbage_and_oversized_frames_cost_nothing(a: Link, garbage: bytes) -> None:
    process = psutil.Process()
    before = process.memory_info()
    sock = knock(a)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, garbage)
    assert await eventually(lambda: _ended(sock), 5, "hung up on")
    sock.close()
    assert process.memory_info().vms - before.vms < 512 << 20
    async with Link("b") as b:
        await a.met(b)


def _ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


async def test_a_flood_of_strangers_is_bounded_and_peers_go_on(a: Link) -> None:
    process = psutil.Process()
    async with Link("b") as b, Link("c") as c:
        await a.met(b)
        await b.met(a)
        before = process.num_fds()
        flood = [knock(a) for _ in range(3 * STRANGERS_MAX)]
        await eventually(lambda: process.num_fds() - before - len(flood) <= STRANGERS_MAX + 8, 5, "bounded descriptors")
        await c.met(a)  # a newcomer that proves itself gets in
        assert b.send("a", JOB, m.FlushAsk(1, 1))
        await eventually(lambda: a.messages)
        for sock in flood:
            sock.close()
        assert (b.peers, c.peers) == ([("a", True)], [("a", True)])


# --- versions ---------------------------------------------------------------------------------------------------
async def test_another_version_is_refused_by_name(a: Link, raw: RawPeer) -> None:
    answer = await raw.ask(b"H\0\x63" + b"whatever version 99 puts here")
    code, text = lf.unpack(answer, 2)  # type: ignore[misc]
    assert code == lf.VERSION_CODE
    assert "version 99" in text
    assert a.said("a peer at 127.0.0.1 was refused: protocol version 99")
    assert (await raw.greet("x", "i1", "a"))[0] == lf.WELCOME  # it may be upgraded


async def test_a_peer_of_another_version_is_named_and_not_up(a: Link) -> None:
    context = zmq.Context()
    newer = context.socket(zmq.ROUTER)
    newer.curve_server, newer.curve_secretkey = True, KEY.curve_server.secret
    port = newer.bind_to_random_port("tcp://127.0.0.1")
    a.connect(NodeInfo("new", f"tcp://127.0.0.1:{port}", "", ""))
    for answer in (b"W\0\x63future", b"R\0\x63future"):
        identity, _ = await eventually(lambda: _received(newer))
        newer.send_multipart([identity, answer])
    await eventually(lambda: a.said("speaks version 99"))
    await eventually(lambda: a.up("new") is False, 6)
    assert ("new", True) not in a.peers, "not for a moment"
    context.destroy(0)


def _received(sock: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return sock.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


# --- who is who -------------------------------------------------------------------------------------------------
async def test_two_daemons_with_one_node_id_are_found_out(a: Link) -> None:
    """The one that was there stays; the second is refused and told, and so is whoever it knocked at."""
    async with Link("b", incarnation="first") as first, Link("b", incarnation="second") as second:
        await first.met(a)
        second.connect(a.info)
        await eventually(lambda: a.said("node id 'b' is already taken by first"))
        await eventually(lambda: second.said("node id 'b' is already taken by first"))
        assert not second.send("a", JOB, m.FlushAsk(1, 1))
        assert first.send("a", JOB, m.FlushAsk(1, 2))
        await eventually(lambda: a.messages)
        assert a.messages == [("b", JOB, m.FlushAsk(1, 2))]
        await first.stop()
        await eventually(lambda: second.up("a"), 5, "the id is free now")


async def test_an_impostor_found_when_connecting_out(a: Link) -> None:
    async with Link("b", incarnation="first") as first, Link("b", incarnation="second") as second:
        await first.met(a)
        a.connect(second.info)
        await eventually(lambda: a.said("is not node 'b'"))
        assert not a.up("b")


async def test_two_daemons_that_are_one_node_to_each_other(a: Link) -> None:
    async with Link("a", incarnation="other") as other:
        other._links.clear()
        other.connect(NodeInfo("b", a.address, "", ""))  # it believes b is there
        await eventually(lambda: other.said("this is node 'a', not 'b'"))
        assert not other.up("b")


async def test_a_claim_to_be_us_is_refused(a: Link, raw: RawPeer) -> None:
    assert (await raw.greet("a", "another", "a"))[0] == lf.REFUSED
    assert a.said("node id 'a' is already taken")


async def test_a_restarted_daemon_gets_its_id_although_the_dead_one_said_no_goodbye() -> None:
    """Power loss: no FIN. After down_after_s of silence the id is free."""
    async with Link("a", down_after_s=QUICK_S) as a:
        with LinkProcess("b", "dead") as dead:
            await a.met(dead.info)
            dead.signal(19)  # SIGSTOP: as silent as a node without power
            async with Link("b", incarnation="new", down_after_s=QUICK_S) as new:
                new.connect(a.info)
                await eventually(lambda: new.up("a"))
                a.connect(new.info)
                await eventually(lambda: a.up("b") and a._links["b"].verdict.incarnation == "new")  # it was up as the dead one
                dead.signal(18)  # SIGCONT: it wakes up and finds its place taken
                await stays(lambda: a.up("b"), QUICK_S)
                assert a._links["b"].verdict.incarnation == "new"


async def test_late_words_of_a_process_are_not_taken_for_its_successors(
    a: Link, raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is stopped with a message to answer, we stand still, a new one greets, the old one goes on. Whoever relied on
    the new one's words would mix them with older ones (P2)."""
    with LinkProcess("b", "old") as old:
        await a.met(old.info)
        old.signal(signal.SIGSTOP)
        assert a.send("b", JOB, m.FlushAsk(1, 1)), "it sends this back when it goes on"
        monkeypatch.setattr(a, "now", lambda: time.monotonic() + 100.0)
        assert (await raw.greet("b", "new", "a"))[0] == lf.WELCOME
        link = a._links["b"]
        assert link.greeted, "our own standstill is not held against the old one"
        old.signal(signal.SIGCONT)
        await eventually(lambda: not link.greeted or a.messages)
        assert not a.messages


async def test_an_address_that_is_none_leaves_no_socket_open(a: Link) -> None:
    """A peer's word for where a third one is: each such address kept two sockets, and the daemon could not end."""
    assert a._context is not None
    before = len(a._context._sockets)
    gc.disable()
    try:
        for number in range(8):
            a.connect(NodeInfo(f"bad{number}", "nowhere at all", "", ""))
        await eventually(lambda: len(a.said("cannot connect to node")) == 8)
        assert len(a._context._sockets) == before
    finally:
        gc.enable()


# --- junk from a peer with the key ------------------------------------------------------------------------------
async def test_nothing_is_taken_before_hello(a: Link, raw: RawPeer) -> None:
    letter = lf.Letter(JOB, b"")
    for frame in (lf.PING_FRAME, next(letter.frames(1))):
        code, _ = lf.unpack(await raw.ask(frame), 2)  # type: ignore[misc]
        assert code == lf.GREET_FIRST
    assert not a.messages


async def test_junk_is_a_problem_and_nothing_else(a: Link, raw: RawPeer) -> None:
    assert (await raw.greet("x", "i1", "a"))[0] == lf.WELCOME
    for junk in (b"", b"\0", b"Z", b"M", b"M" + bytes(40), b"H", b"H\0" + bytes([lf.PROTOCOL_VERSION]) + b"\xc1", b"\xff" * 1000):
        raw.socket.send(junk)
    for number, letter in enumerate((lf.Letter(JOB, b"\xc1"), lf.Letter(JOB, b"\x92\xa5Grant\x80"), lf.Letter("", b""))):
        raw.socket.send(next(letter.frames(number)))
    raw.socket.send_multipart([b"two", b"parts"])
    assert await raw.ask(lf.PING_FRAME) == lf.PONG_FRAME
    assert not a.messages
    assert a.said("node 'x' sent a Grant that does not fit")
    assert a.said("node 'x' sent a frame of unknown kind")
    assert len(a.problems) < 12


async def test_a_frame_beyond_the_limit_ends_the_connection_and_only_that(a: Link, raw: RawPeer) -> None:
    async with Link("b") as b:
        await b.met(a)
        assert (await raw.greet("x", "i1", "a"))[0] == lf.WELCOME
        raw.socket.send(b"M" + bytes(lf.FRAME_BYTES_MAX + 100))
        assert a._listener is not None
        listener = a._listener
        await eventually(lambda: "x" not in listener._latest, 5, "the connection is gone")
        assert b.send("a", JOB, m.FlushAsk(1, 1))
        await eventually(lambda: a.messages)
        assert b.peers == [("a", True)]
