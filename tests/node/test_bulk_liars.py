"""The bulk port against senders that hold a ticket and lie, chunk by chunk (P13)."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pytest

from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import CHUNK_BYTES, TransferError
from ckptd.wire.tcp import TcpTransport
from tests.node.bulk_peers import RawSender, expect, transport


@pytest.fixture
def plain() -> Iterator[TcpTransport]:
    made = transport("none", idle_timeout_s=0.5, handshake_timeout_s=0.5, connections_max=4)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("lies", "found"),
    [
        ([(0, CHUNK_BYTES, 0), (0, CHUNK_BYTES, 0)], "came twice"),
        ([(CHUNK_BYTES, CHUNK_BYTES, 0)], "out of range"),
        ([(CHUNK_BYTES, 0, 0)], "out of range"),
        ([(2 * CHUNK_BYTES, 1, 0)], "out of range"),
        ([(2**63, CHUNK_BYTES, 0)], "out of range"),
        ([(2**64 - 1, 2**32 - 1, 0)], "out of range"),
        ([(512, CHUNK_BYTES, 0)], "out of range"),
        ([(0, CHUNK_BYTES + 1, 0)], "out of range"),
        ([(0, CHUNK_BYTES, 2)], "flags"),
        ([(0, CHUNK_BYTES, 0), (1, 0, 1)], "never came"),
        ([(0, CHUNK_BYTES, 0), (2, 0, 1)], "ends with"),
        ([(0, CHUNK_BYTES, 0), (CHUNK_BYTES, 1000, 0), (2, 8, 1)], "ends with"),
    ],
)
def test_chunks_that_do_not_fit_fail_the_transfer(
    plain: TcpTransport, lies: list[tuple[int, int, int]], found: str
) -> None:
    arena = memoryview(bytearray(b"\xee" * (CHUNK_BYTES + 1000 + 64)))
    incoming = plain.expect(arena[: CHUNK_BYTES + 1000])
    raw = RawSender(incoming.ticket)
    with contextlib.suppress(ConnectionError):  # found before we had said it all
        for offset, length, flags in lies:
            raw.chunk(offset, bytes(min(length, CHUNK_BYTES)), flags, length)
    with pytest.raises(TransferError, match=found):
        incoming.done.result(5)
    assert arena[CHUNK_BYTES + 1000 :] == b"\xee" * 64
    raw.sock.close()


def test_streams_of_two_pushes_do_not_mix(plain: TcpTransport) -> None:
    incoming = expect(plain, 2 * CHUNK_BYTES)
    first = RawSender(incoming.ticket, 0, 2, push=b"a" * 16)
    for stream, streams, push in ((0, 2, b"a"), (1, 2, b"b"), (1, 3, b"a"), (0, 1, b"a")):
        with pytest.raises(TransferError, match="in use"):
            RawSender(incoming.ticket, stream, streams, push * 16)
    second = RawSender(incoming.ticket, 1, 2, push=b"a" * 16)
    for number, raw in enumerate((first, second)):
        raw.chunk(number * CHUNK_BYTES, bytes(CHUNK_BYTES))
        raw.end(1)
    assert incoming.done.result(5) == 2 * CHUNK_BYTES
    first.sock.close()
    second.sock.close()


def test_a_stream_that_stays_away_fails_the_transfer(plain: TcpTransport) -> None:
    incoming = expect(plain, CHUNK_BYTES)
    raw = RawSender(incoming.ticket, 0, 2)
    raw.chunk(0, bytes(CHUNK_BYTES))
    raw.end(1)
    with pytest.raises(TransferError, match="streams"):
        incoming.done.result(5)
    raw.sock.close()


def test_a_sender_that_falls_silent_is_given_up(plain: TcpTransport) -> None:
    incoming = expect(plain, CHUNK_BYTES)
    raw = RawSender(incoming.ticket)
    raw.chunk(0, b"only this", length=CHUNK_BYTES)
    with pytest.raises(TransferError, match="no byte moved"):
        incoming.done.result(5)
    raw.sock.close()


def test_streams_at_work_are_bounded(plain: TcpTransport) -> None:
    incoming = expect(plain, 8 * CHUNK_BYTES)
    raws = [RawSender(incoming.ticket, number, 8) for number in range(4)]
    with pytest.raises(TransferError, match="too many connections"):
        RawSender(incoming.ticket, 4, 8)
    for raw in raws:
        raw.sock.close()


def test_the_confirmation_is_the_receivers(plain: TcpTransport) -> None:
    incoming = expect(plain, 100)
    raw = RawSender(incoming.ticket)
    raw.chunk(0, bytes(100))
    raw.end(1)
    proof = frames.unpack_reply(raw.read(frames.REPLY_BYTES))
    assert raw.secret.check(proof, "done", struct.pack(">Q", 1))
    assert not raw.secret.check(proof, "done", struct.pack(">Q", 2))
    raw.sock.close()
