"""Frames and descriptors between two ends of a socket pair (D2, P5, P13)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

import msgpack
import pytest

from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import (
    FrameError,
    RankSocket,
    decode_frame,
    encode_frame,
    memfd_object,
    read_memfd_object,
)
from tests.descriptors import opened, opened_since

Pair = tuple[RankSocket, RankSocket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """(trainer's end, daemon's end)"""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = RankSocket(left, wire.TO_RANK), RankSocket(right, wire.TO_DAEMON)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(1, "gpt", 4),
        wire.Offer(["a", "b"]),
        wire.Join("x", 0, 1 << 40, None),
        wire.Join("x", 0, 1, {"step": None}),
        wire.SealedSlot(1, 2, 3, "id", 4, True, 0.5, 1),
        wire.WaitFor(3, 1, "durable"),
    ],
)
def test_messages_arrive_as_they_were(pair: Pair, message: object) -> None:
    trainer, daemon = pair
    assert trainer.send(message)
    assert daemon.recv(1) == (message, [])


def test_what_was_said_before_a_reset_is_heard(pair: Pair) -> None:
    """A daemon that turns a connection away closes it without reading the Hello."""
    trainer, daemon = pair
    trainer.send(wire.Hello(1, "gpt", 4))
    daemon.send(wire.Refused("too many connections"))
    daemon.close()
    assert trainer.recv(1) == (wire.Refused("too many connections"), [])
    assert trainer.recv(1) is None


def test_every_class_of_the_protocol_has_a_schema() -> None:
    for cls in (*wire.TO_DAEMON, *wire.TO_RANK):
        with pytest.raises(FrameError):
            decode_frame(msgpack.packb([cls.__name__, {"no such field": 1}]), [cls])


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xc1", b"\x93", msgpack.packb(7), msgpack.packb(["Hello"]), msgpack.packb(["Hello", []]),
        msgpack.packb(["Ready", {"epoch": 1}]),  # a class of the other direction
        msgpack.packb([["Hello"], {}]), msgpack.packb([{}, {}]),
        msgpack.packb(["Hello", {"version": 1, "job": "a"}]),
        msgpack.packb(["Hello", {"version": 1, "job": "a", "pid": 1, "more": 2}]),
        msgpack.packb(["Hello", {"version": 1, "job": "a", 7: 1}]),
        msgpack.packb(["Hello", {"version": True, "job": "a", "pid": 1}]),
        msgpack.packb(["Hello", {"version": 1, "job": b"a", "pid": 1}]),
        msgpack.packb(["Offer", {"segments": ["a", 1]}]), msgpack.packb(["Offer", {"segments": "ab"}]),
        msgpack.packb(["Offer", {"segments": ["a"] * 9000}]), msgpack.packb(["Called", {"step": 1.5}]),
        msgpack.packb(["Called", {"step": msgpack.ExtType(1, b"x")}]),
        b"\x92\xa6Called\x81\xa4step" + b"\x91" * 5000, b"\x92\xa6Called\x81\xa4step" + b"\xdd\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(frame, wire.TO_DAEMON)


def test_an_oversized_message_is_not_sent_and_an_oversized_packet_not_taken(pair: Pair) -> None:
    trainer, daemon = pair
    with pytest.raises(FrameError, match="a frame holds"):
        trainer.send(wire.Offer(["x" * 100] * 1000))
    trainer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    trainer.sock.send(encode_frame(wire.Called(1)).ljust(wire.FRAME_BYTES_MAX + 1, b"\0"))
    with pytest.raises(FrameError, match="more than the limit"):
        daemon.recv(1)


def test_descriptors_travel_and_cannot_be_inherited(pair: Pair) -> None:
    trainer, daemon = pair
    fd = memfd_object(b"wants")
    assert trainer.send(wire.Wants(3), [fd])
    os.close(fd)
    received = daemon.recv(1)
    assert received is not None
    message, (got,) = received
    assert message == wire.Wants(3)
    assert not os.get_inheritable(got)
    assert read_memfd_object(got, 5) == b"wants"
    os.close(got)


@pytest.mark.parametrize(
    ("message", "count"), [(wire.Called(1), 1), (wire.Wants(1), 2), (wire.Offer([]), 65)]
)
def test_descriptors_that_do_not_belong_are_refused_and_closed(
    pair: Pair, message: object, count: int
) -> None:
    trainer, daemon = pair
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    before = opened()
    assert trainer.send(message, fds)
    with pytest.raises(FrameError):
        daemon.recv(1)
    assert opened_since(before) == []
    for fd in fds:
        os.close(fd)


def test_a_peer_that_reads_nothing_never_makes_us_wait(pair: Pair) -> None:
    """P5: send says False instead."""
    trainer, _ = pair
    sent = 0
    while trainer.send(wire.Offer(["x" * 60_000])):
        sent += 1
    assert 0 < sent < 1000
    assert not trainer.send(wire.Called(1), timeout_s=0.05)


def test_the_end_and_nothing_yet_are_told_apart(pair: Pair) -> None:
    trainer, daemon = pair
    with pytest.raises(TimeoutError):
        daemon.recv(0)
    with pytest.raises(TimeoutError):
        daemon.recv(0.02)
    daemon.send(wire.Ready(1))
    trainer.close()
    assert daemon.recv(1) is None
    with pytest.raises(OSError, match="Broken pipe"):
        daemon.send(wire.Ready(1))


def test_no_daemon_and_a_stopped_one_behind_a_full_backlog_do_not_block(tmp_path: object) -> None:
    path = f"{tmp_path}/s"
    with pytest.raises(FileNotFoundError):
        RankSocket.connect(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.ExitStack() as stack:
        listener.bind(path)
        listener.listen(0)
        stack.callback(RankSocket.connect(path).close)
        with pytest.raises(BlockingIOError):
            RankSocket.connect(path)
    with pytest.raises(ConnectionRefusedError):
        RankSocket.connect(path)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_objects_in_memfds_are_whole_and_immutable(data: bytes) -> None:
    fd = memfd_object(data)
    assert read_memfd_object(fd, len(data)) == data
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"y", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1 << 20)
    os.close(fd)


def test_objects_that_could_change_or_are_too_large_are_not_read() -> None:
    fd = memfd_object(b"12345")
    with pytest.raises(ValueError, match="at most 4"):
        read_memfd_object(fd, 4)
    os.close(fd)
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(ValueError, match="not sealed"):
        read_memfd_object(fd, 100)
    os.close(fd)
    for end in (ends := os.pipe()):
        with pytest.raises(ValueError, match="not a memfd"):
            read_memfd_object(end, 100)
    for end in ends:
        os.close(end)
