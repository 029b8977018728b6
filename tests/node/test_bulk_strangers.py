"""The bulk port against whoever has not proven a ticket, over real sockets (P13)."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckptd.core.errors import CkptdError
from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import CHUNK_BYTES, HANDSHAKE_BYTES_MAX, HANDSHAKES_MAX, Ticket, TransferError
from ckptd.wire.keys import ClusterKey
from ckptd.wire.tcp import TcpTransport
from ckptd.wire.tcp_io import split_address
from tests.node.bulk_peers import HANDSHAKE, KEY, MODES, RawSender, answer, expect, knock, transport
from tests.node.proxy import Proxy
from tests.waiting import until


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(mode: str) -> Iterator[TcpTransport]:
    made = transport(mode)
    yield made
    made.close()


@pytest.fixture
def sender(mode: str) -> Iterator[TcpTransport]:
    made = transport(mode)
    yield made
    made.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"\xff" * 1_000_000,
        random.Random(5).randbytes(300),
        b"CKPTBULK" + b"\xff" * 56,
    ],
)
def test_garbage_is_hung_up_on(receiver: TcpTransport, garbage: bytes) -> None:
    incoming = expect(receiver, 10)
    with knock(receiver) as sock:
        with contextlib.suppress(ConnectionError):  # hung up on in the middle of it
            sock.sendall(garbage)
        assert len(answer(sock)) <= frames.REPLY_BYTES
    assert not incoming.done.done()
    receiver.push(incoming.ticket, [memoryview(bytes(10))])


def test_another_version_is_told_so(receiver: TcpTransport, mode: str) -> None:
    incoming = expect(receiver, 10)
    hello = replace(frames.Hello(0, 1, incoming.ticket.mode, incoming.ticket.id, bytes(16)), version=2)
    with knock(receiver) as sock:
        sock.sendall(hello.pack())
        with pytest.raises(TransferError, match="another version"):
            frames.unpack_reply(answer(sock))


def test_a_peer_that_says_nothing_is_hung_up_on(mode: str) -> None:
    receiver = transport(mode, handshake_timeout_s=0.2)
    with knock(receiver) as silent, knock(receiver) as halfway:
        halfway.sendall(b"CKPTBULK")
        assert answer(silent) == b""
        assert answer(halfway) == b""
    receiver.close()


def test_a_flood_of_strangers_leaves_transfers_working(sender: TcpTransport, receiver: TcpTransport) -> None:
    """P13: what strangers cost is bounded, and who proves a ticket gets in, before and during the flood."""
    running = expect(receiver, CHUNK_BYTES)
    raw = RawSender(running.ticket) if running.ticket.mode == "none" else None
    strangers = [knock(receiver) for _ in range(3 * HANDSHAKES_MAX)]
    for sock in strangers[::2]:
        sock.setblocking(False)
        with contextlib.suppress(ConnectionError):  # already made room
            sock.send(b"CKPTBULK")
    for _ in range(5):
        incoming = expect(receiver, 1000)
        sender.push(incoming.ticket, [memoryview(bytes(1000))], streams=2)
    assert len(receiver._listener._shaking) <= HANDSHAKES_MAX
    if raw is not None:
        raw.chunk(0, bytes(CHUNK_BYTES))
        raw.end(1)
        assert running.done.result(5) == CHUNK_BYTES
        raw.sock.close()
    for sock in strangers:
        sock.close()


def test_a_stranger_is_read_no_further_than_the_handshake(receiver: TcpTransport) -> None:
    incoming = expect(receiver, 10)
    hello = frames.Hello(0, 1, incoming.ticket.mode, incoming.ticket.id, bytes(16))
    assert HANDSHAKE == HANDSHAKE_BYTES_MAX
    with knock(receiver) as sock:
        sock.sendall(hello.pack() + bytes(32) + bytes(100_000))
        said = answer(sock)
    assert len(said) <= 2 * frames.REPLY_BYTES
    assert not incoming.done.done()


def test_another_cluster_key_opens_nothing_even_with_the_ticket(receiver: TcpTransport, mode: str) -> None:
    incoming = expect(receiver, 10)
    stranger = transport(mode, secret=ClusterKey.generate())
    with pytest.raises(TransferError, match="another cluster key"):
        stranger.push(incoming.ticket, [memoryview(bytes(10))])
    stranger.close()
    assert not incoming.done.done()


def test_a_receiver_that_cannot_prove_itself_gets_no_byte(sender: TcpTransport, mode: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        got = bytearray()

        def lie() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(frames.HELLO_BYTES, socket.MSG_WAITALL)
                sock.sendall(frames.pack_reply(frames.OK, bytes(32)))
                sock.recv(frames.PROOF_BYTES, socket.MSG_WAITALL)
                sock.sendall(frames.pack_reply(frames.OK, bytes(32)))
                while data := sock.recv(4096):
                    got.extend(data)

        liar = threading.Thread(target=lie)
        liar.start()
        ticket = Ticket(bytes(16), bytes(32), f"127.0.0.1:{listener.getsockname()[1]}", 10, mode)  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="cannot prove"):
            sender.push(ticket, [memoryview(b"0123456789")])
        liar.join(5)
        assert not got


def test_a_recorded_session_cannot_be_replayed(sender: TcpTransport, receiver: TcpTransport) -> None:
    incoming = expect(receiver, 10)
    with Proxy(receiver.address) as proxy:
        sender.push(replace(incoming.ticket, address=proxy.address), [memoryview(b"0123456789")])
        recorded = bytes(proxy.sent)
    assert incoming.done.result(0) == 10
    with knock(receiver) as sock:
        sock.sendall(recorded)
        with pytest.raises(TransferError, match="does not know the ticket"):
            frames.unpack_reply(answer(sock)[: frames.REPLY_BYTES])


def test_a_recorded_proof_is_worth_nothing_while_the_ticket_is_open(receiver: TcpTransport) -> None:
    """The challenge is new each time."""
    incoming = expect(receiver, CHUNK_BYTES * 2)
    with Proxy(receiver.address) as proxy:
        first = RawSender(replace(incoming.ticket, address=proxy.address), stream=0, streams=2)
        until(lambda: len(proxy.sent) == HANDSHAKE)  # it is noted after it was passed on
        recorded = bytes(proxy.sent)
        with knock(receiver) as sock:
            sock.sendall(recorded)
            said = answer(sock)
        with pytest.raises(TransferError, match="does not accept the proof"):
            frames.unpack_reply(said[frames.REPLY_BYTES :])
        assert not incoming.done.done()
        first.sock.close()


def test_a_taken_port_is_named() -> None:
    first = TcpTransport("127.0.0.1", secret=KEY)
    port = split_address(first.address)[1]
    with pytest.raises(CkptdError, match="cannot listen"):
        TcpTransport("127.0.0.1", port, secret=KEY)
    first.close()
