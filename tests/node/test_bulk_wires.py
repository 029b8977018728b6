"""Bulk streams over bad wires: bent, cut, standing still, cancelled (P10); and the keys that find it out."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ckptd.core.failpoint import arm
from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import CHUNK_BYTES, Ticket, TransferError
from ckptd.wire.scratch import SCRATCHES_MAX
from ckptd.wire.tcp import TcpTransport
from tests.node.bulk_peers import HANDSHAKE, KEY, MODES, expect, transport
from tests.node.proxy import Proxy, flip
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


NBYTES = CHUNK_BYTES + 5000
FIRST_CHUNK = HANDSHAKE + frames.CHUNK_HEAD_BYTES
PROMPT_S = 15  # for a machine on which five tests run at once


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(HANDSHAKE + 7, id="offset"),
        pytest.param(HANDSHAKE + 11, id="length"),
        pytest.param(HANDSHAKE + 15, id="flags"),
        pytest.param(FIRST_CHUNK, id="first byte"),
        pytest.param(FIRST_CHUNK + CHUNK_BYTES - 1, id="last byte of a chunk"),
        pytest.param(FIRST_CHUNK + CHUNK_BYTES + 3, id="tag"),
        pytest.param(FIRST_CHUNK + CHUNK_BYTES + 16 + frames.CHUNK_HEAD_BYTES + 99, id="second chunk"),
        pytest.param(40, id="ticket id"),
        pytest.param(70, id="proof"),
    ],
)
def test_a_flipped_bit_is_found_in_mode_aead(position: int) -> None:
    """P10: on the wire."""
    sender, receiver = transport("aead"), transport("aead", idle_timeout_s=1.0)
    incoming = receiver.expect(memoryview(bytearray(NBYTES)), aad=b"snapshot", ttl_s=0.5)
    with Proxy(receiver.address, bend=flip(position)) as proxy:
        with pytest.raises(TransferError):
            sender.push(replace(incoming.ticket, address=proxy.address), [memoryview(bytes(NBYTES))], streams=1)
        with pytest.raises(TransferError):
            incoming.done.result(10)
    sender.close()
    receiver.close()


def test_the_finder_of_a_flipped_bit_says_so() -> None:
    sender, receiver = transport("aead"), transport("aead")
    incoming = expect(receiver, NBYTES)
    with Proxy(receiver.address, bend=flip(FIRST_CHUNK + 1000)) as proxy, pytest.raises(TransferError):
        sender.push(replace(incoming.ticket, address=proxy.address), [memoryview(bytes(NBYTES))], streams=1)
    with pytest.raises(TransferError, match="changed on the wire"):
        incoming.done.result(10)
    sender.close()
    receiver.close()


def test_another_aad_does_not_open_what_was_sealed() -> None:
    sender, receiver = transport("aead"), transport("aead")
    incoming = expect(receiver, 10)
    with pytest.raises(TransferError):
        sender.push(replace(incoming.ticket, aad=b"another snapshot"), [memoryview(bytes(10))])
    with pytest.raises(TransferError, match="changed on the wire"):
        incoming.done.result(10)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("cut_at", [10, HANDSHAKE, FIRST_CHUNK, FIRST_CHUNK + 100_000, -20])
def test_a_cut_stream_fails_on_both_sides(
    sender: TcpTransport, receiver: TcpTransport, mode: str, cut_at: int
) -> None:
    """Also when all that is missing is the word that nothing is missing (-20: in or before the last frame)."""
    whole = HANDSHAKE + NBYTES + 3 * frames.CHUNK_HEAD_BYTES + (3 * 16 if mode == "aead" else 0)
    incoming = receiver.expect(memoryview(bytearray(NBYTES)), ttl_s=0.5)
    with Proxy(receiver.address, cut_at=cut_at if cut_at > 0 else whole + cut_at) as proxy:
        with pytest.raises(TransferError):
            sender.push(replace(incoming.ticket, address=proxy.address), [memoryview(bytes(NBYTES))], streams=1)
        with pytest.raises(TransferError):
            incoming.done.result(10)


def test_a_window_smaller_than_what_a_reader_waits_for(sender: TcpTransport, receiver: TcpTransport) -> None:
    """A reader asks for a whole chunk at once; the receive buffer holds a hundredth of it."""
    receiver._listener._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # accepted sockets inherit it
    source, into = random.Random(3).randbytes(CHUNK_BYTES // 8), bytearray(CHUNK_BYTES // 8)
    incoming = receiver.expect(memoryview(into))
    sender.push(incoming.ticket, [memoryview(source)], streams=1)
    assert into == source


def test_one_of_several_streams_breaking_fails_the_transfer(sender: TcpTransport, receiver: TcpTransport) -> None:
    nbytes = 6 * CHUNK_BYTES
    incoming = receiver.expect(memoryview(bytearray(nbytes)))
    with Proxy(receiver.address, cut_at=CHUNK_BYTES + 1000) as proxy:
        with pytest.raises(TransferError):
            sender.push(replace(incoming.ticket, address=proxy.address), [memoryview(bytes(nbytes))], streams=3)
        with pytest.raises(TransferError):
            incoming.done.result(10)
    until(lambda: receiver.connections == 0, 5)


def test_a_wire_that_stands_still_is_given_up_by_both(mode: str) -> None:
    sender, receiver = transport(mode, idle_timeout_s=0.4), transport(mode, idle_timeout_s=0.4)
    incoming = receiver.expect(memoryview(bytearray(8 * CHUNK_BYTES)))
    with Proxy(receiver.address, hold_at=CHUNK_BYTES) as proxy:
        with pytest.raises(TransferError, match=r"no byte moved|closed|broke"):
            sender.push(
                replace(incoming.ticket, address=proxy.address), [memoryview(bytes(8 * CHUNK_BYTES))], streams=1
            )
        with pytest.raises(TransferError, match=r"no byte moved|closed"):
            incoming.done.result(5)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_cancelling_in_mid_stream_ends_both_promptly(mode: str, who: str) -> None:
    """Well before any timeout, and done comes only when the buffer is let go."""
    sender, receiver = transport(mode, idle_timeout_s=4 * PROMPT_S), transport(mode, idle_timeout_s=4 * PROMPT_S)
    nbytes = 8 * CHUNK_BYTES
    into, cancelled = bytearray(nbytes), threading.Event()
    incoming = receiver.expect(memoryview(into))
    with Proxy(receiver.address, hold_at=CHUNK_BYTES) as proxy, ThreadPoolExecutor(1) as pool:
        ticket = replace(incoming.ticket, address=proxy.address)
        pushing = pool.submit(sender.push, ticket, [memoryview(bytes(nbytes))], streams=1, cancelled=cancelled)
        assert proxy.holding.wait(PROMPT_S)
        if who == "sender":
            cancelled.set()
            with pytest.raises(TransferError, match="cancelled"):
                pushing.result(PROMPT_S)
            proxy.close()  # what a closed connection looks like on the other side
        else:
            incoming.cancel()
        with pytest.raises(TransferError):
            incoming.done.result(PROMPT_S)
        assert receiver._landings.find(incoming.ticket.id) is None
        proxy.close()
        with pytest.raises(TransferError):
            pushing.result(PROMPT_S)
    sender.close()
    receiver.close()


def test_no_key_and_nonce_ever_repeat() -> None:
    """The same plaintext never looks the same: per chunk (counter), per connection (nonce), per stream, per ticket."""
    ticket = Ticket(bytes(16), bytes(32), "127.0.0.1:1", 64, "aead")
    hello = frames.Hello(0, 2, "aead", ticket.id, bytes(16))
    secrets = [
        frames.StreamSecret(ticket, b"", hello, bytes(32)),
        frames.StreamSecret(ticket, b"", hello, b"\1" * 32),
        frames.StreamSecret(ticket, b"", replace(hello, stream=1), bytes(32)),
        frames.StreamSecret(ticket, b"", replace(hello, push=b"\1" * 16), bytes(32)),
        frames.StreamSecret(replace(ticket, key=b"\1" * 32), b"", hello, bytes(32)),
        frames.StreamSecret(ticket, KEY.bulk, hello, bytes(32)),
    ]
    scratch = memoryview(bytearray(100))
    sealed = []
    for secret in secrets:
        cipher = secret.cipher()
        sealed += [bytes(cipher.seal(b"head", bytes(64), scratch)) for _ in range(3)]
    assert len(set(sealed)) == len(sealed)


def test_more_streams_than_scratches_get_through() -> None:
    """Both ways at once: senders and receivers have pools of their own."""
    a, b = transport("aead"), transport("aead")
    size = 2 * CHUNK_BYTES
    with ThreadPoolExecutor(SCRATCHES_MAX) as pool:
        jobs = []
        for number in range(SCRATCHES_MAX):
            here, there = (a, b) if number % 2 else (b, a)
            incoming = there.expect(memoryview(bytearray(size)))
            jobs.append(pool.submit(here.push, incoming.ticket, [memoryview(bytes(size))], streams=4))
        for job in jobs:
            job.result(20)
    a.close()
    b.close()


def test_done_waits_until_no_stream_can_touch_the_buffer() -> None:
    """Race: cancelled while a stream is about to decrypt a chunk into the buffer."""
    sender, receiver = transport("aead"), transport("aead")
    into = bytearray(CHUNK_BYTES)
    incoming = receiver.expect(memoryview(into))
    arm("bulk.open:sleep=0.3")
    try:
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(sender.push, incoming.ticket, [memoryview(b"\x11" * CHUNK_BYTES)], streams=1)
            until(lambda: any(incoming._seen), 5, "a chunk is claimed")
            incoming.cancel()
            with pytest.raises(TransferError, match="cancelled"):
                incoming.done.result(5)
            into[:] = b"\xee" * CHUNK_BYTES  # the memory is somebody else's now
            until(lambda: receiver.connections == 0, 5)
            assert into == b"\xee" * CHUNK_BYTES
            with pytest.raises(TransferError):
                pushing.result(5)
    finally:
        arm("")
        sender.close()
        receiver.close()
