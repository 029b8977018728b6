"""Frames, fragments and claims of the control link: pure, no socket (P13)."""

from __future__ import annotations

import random
import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.wire import link_frames as lf
from ckptd.wire.claims import Claims
from ckptd.wire.outbox import OUTBOX_BYTES_MAX, URGENT_MAX, Outbox

PART = struct.Struct(">BQII")


def frames(job: str, data: bytes, number: int = 1) -> list[bytes]:
    return list(lf.Letter(job, data).frames(number))


def collect(parts: list[bytes]) -> tuple[str, bytes] | None:
    assembler, whole = lf.Assembler(), None
    for part in parts:
        whole = assembler.add(part)
    return (whole[0], bytes(whole[1])) if whole else None


@pytest.mark.parametrize("nbytes", [0, 1, lf.PART_BYTES_MAX - 5, lf.PART_BYTES_MAX, 3 * lf.PART_BYTES_MAX + 7])
def test_a_message_is_cut_and_put_together(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    parts = frames("0/j", data)
    assert max(map(len, parts)) <= lf.FRAME_BYTES_MAX
    assert collect(parts) == ("0/j", data)


def test_a_broken_off_message_gives_way_to_the_next() -> None:
    first, second = frames("0/a", bytes(2 * lf.PART_BYTES_MAX), 1), frames("0/b", b"whole", 2)
    assert collect([*first[:2], *second]) == ("0/b", b"whole")


def test_frames_out_of_order_are_refused_and_the_next_message_passes() -> None:
    parts = frames("0/j", bytes(3 * lf.PART_BYTES_MAX))
    for wrong in ([parts[1]], [parts[0], parts[2]], [parts[0], parts[0], parts[2]]):
        assembler = lf.Assembler()
        with pytest.raises(lf.BadFrame):
            list(map(assembler.add, wrong))
        assert assembler.add(frames("0/j", b"x", 9)[0]) is not None


@pytest.mark.parametrize(
    "frame",
    [
        b"M",
        PART.pack(lf.MESSAGE, 1, 0, 0) + b"\0\0",
        PART.pack(lf.MESSAGE, 1, 0, lf.PARTS_MAX + 1),
        PART.pack(lf.MESSAGE, 1, 0, 2**32 - 1),
        PART.pack(lf.MESSAGE, 1, 0, 2) + b"too short for one of two",
        PART.pack(lf.MESSAGE, 1, 0, 1) + b"\0",
        PART.pack(lf.MESSAGE, 1, 0, 1) + b"\0\2\xff\xfe",
    ],
)
def test_frames_that_no_daemon_sends(frame: bytes) -> None:
    with pytest.raises(lf.BadFrame):
        lf.Assembler().add(frame)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40).map(lambda tail: b"M" + tail), max_size=5))
def test_any_frames_are_messages_or_bad(parts: list[bytes]) -> None:
    assembler = lf.Assembler()
    for part in parts:
        try:
            made = assembler.add(part)
        except lf.BadFrame:
            continue
        assert made is None or (isinstance(made[0], str) and made[0] and part.endswith(bytes(made[1])))


def test_greetings_carry_their_version_where_every_version_finds_it() -> None:
    hello = lf.pack(lf.HELLO, "a", "i1", "b")
    assert lf.unpack(hello, 3) == ("a", "i1", "b")
    assert lf.unpack(b"H\0\x63 whatever comes then", 3) == lf.Skew(99)
    head = hello[:3]
    long = msgpack.packb(["x" * 2000, "", ""])
    for bad in (b"H", b"H\0", head, head + b"\xc1", head + b"\x93\x01\x02\x03", head + msgpack.packb(["a"]), head + long):
        with pytest.raises(lf.BadFrame):
            lf.unpack(bad, 3)


# --- outbox -----------------------------------------------------------------------------------------------------
class Pipe:
    """Takes ``room`` frames, then says Again."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, list[bytes]()

    def send(self, frame: bytes) -> None:
        import zmq

        if len(self.taken) >= self.room:
            raise zmq.Again
        self.taken.append(frame)


def test_an_outbox_sends_what_there_is_room_for_and_urgent_frames_first() -> None:
    pipe = Pipe(room=2)
    box = Outbox(pipe.send)
    assert box.post(lf.Letter("0/a", bytes(3 * lf.PART_BYTES_MAX)))
    assert box.flush() == 2
    assert box.flush() == 0
    box.urgent(b"P")
    pipe.room = 99
    assert box.flush() == 3
    assert pipe.taken[2] == b"P"
    assert collect([frame for frame in pipe.taken if frame != b"P"]) == ("0/a", bytes(3 * lf.PART_BYTES_MAX))
    assert box.nbytes == 0


def test_an_outbox_is_bounded() -> None:
    box = Outbox(Pipe(room=0).send)
    big = lf.Letter("0/a", bytes(OUTBOX_BYTES_MAX))
    assert box.post(big), "one always finds room"
    assert not box.post(lf.Letter("0/a", b""))
    for _ in range(10 * URGENT_MAX):
        box.urgent(b"P")
    box.clear()
    assert box.nbytes == 0
    assert box.post(lf.Letter("0/a", b""))


# --- claims -----------------------------------------------------------------------------------------------------
def test_a_second_incarnation_is_refused_while_the_first_is_heard() -> None:
    claims = Claims("me", "i0", silence_s=3)
    assert not claims.refusal("a", "i1", 0)
    claims.open("a", "i1", 0)
    assert "i1" in claims.refusal("a", "i2", 1)
    assert not claims.refusal("a", "i1", 1)
    assert claims.heard("a", "i1", 2.5)
    assert claims.refusal("a", "i2", 5)
    assert not claims.refusal("a", "i2", 6)


def test_an_id_is_free_when_its_last_connection_is_gone() -> None:
    claims = Claims("me", "i0", silence_s=3)
    claims.open("a", "i1", 0)
    claims.open("a", "i1", 0)
    claims.close("a", "i1")
    assert claims.refusal("a", "i2", 1)
    claims.close("a", "i1")
    assert not claims.refusal("a", "i2", 1)


def test_who_was_silent_has_lost_its_id() -> None:
    claims = Claims("me", "i0", silence_s=3)
    claims.open("a", "i1", 0)
    claims.open("a", "i2", 4)
    assert not claims.heard("a", "i1", 4.5)
    assert claims.refusal("a", "i1", 4.5)
    claims.close("a", "i1")
    assert claims.heard("a", "i2", 5)


def test_nobody_else_is_us() -> None:
    claims = Claims("me", "i0", silence_s=3)
    assert claims.refusal("me", "i9", 0)
    assert claims.refusal("me", "i0", 0)
