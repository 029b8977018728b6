"""What comes through sockets: ranks' frames, the control link, bulk streams, keys and names."""

from __future__ import annotations

from dataclasses import asdict

import msgpack

from ckptd.core.errors import CkptdError
from ckptd.wire import bulk_frames as bf
from ckptd.wire import codec, keys, names
from ckptd.wire import link_frames as lf
from ckptd.wire import rank as wire
from ckptd.wire.bulk import CHUNK_BYTES, Ticket, TransferError
from ckptd.wire.landing import Landing
from ckptd.wire.seqpacket import ITEMS_MAX, FrameError, decode_frame, encode_frame
from ckptd.wire.tcp_io import join_address, split_address
from ckptd.wire.world import RANKS_MAX, pack_world
from ckptd.wire.world_check import unpack_world
from tests.fuzz.examples import examples
from tests.fuzz.target import Target

NODE = {
    "node": "n0",
    "control": "tcp://10.0.0.1:7000",
    "bulk": "10.0.0.1:7001",
    "domain": "rack1",
    "incarnation": "a",
}
PART_HEAD_BYTES = lf.FRAME_BYTES_MAX - lf.PART_BYTES_MAX
NEST = 1024 * 8  # msgpack reserves a list's places level by level, 8 bytes each, 1024 levels at most


def _frames(classes: tuple[type, ...]) -> list[bytes]:
    return [encode_frame(message) for message in examples(classes)]


def _worlds() -> list[bytes]:
    return [pack_world(["n0", "n0", "n1"], [NODE, {**NODE, "node": "n1"}]), pack_world([], [])]


# --- the control link -------------------------------------------------------------------------------------------
def _greetings() -> list[bytes]:
    return [
        lf.pack(lf.HELLO, "n0", "i1"),
        lf.pack(lf.REFUSED, lf.MISDIRECTED, "it is 'n1'"),
        b"W\x00\xffanything",
    ]


def _greeting(data: bytes) -> tuple[str, ...] | lf.Skew:
    return lf.unpack(data, 2)


def _pack_greeting(fields: tuple[str, ...] | lf.Skew) -> bytes:
    return (
        b"W" + fields.version.to_bytes(2, "big")
        if isinstance(fields, lf.Skew)
        else lf.pack(lf.WELCOME, *fields)
    )


def _letters() -> list[bytes]:
    long = lf.Letter("1000/gpt", b"m" * (lf.PART_BYTES_MAX + 9))
    return [
        _row([*lf.Letter("1000/gpt", b"message").frames(3)]),
        _row([*lf.Letter("", b"m").frames(1), *lf.Letter("7/a", b"").frames(2)]),
        _row([*long.frames(4)]),
    ]


def _row(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


def _frames_of(data: bytes) -> list[bytes]:
    """As libzmq hands them over: each at most FRAME_BYTES_MAX."""
    found, at = [], 0
    while at + 4 <= len(data):
        length = min(int.from_bytes(data[at : at + 4], "big"), lf.FRAME_BYTES_MAX)
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def _assemble(data: bytes) -> list[tuple[str, bytes]]:
    assembler, whole, came = lf.Assembler(), [], 0
    for frame in _frames_of(data):
        got = assembler.add(frame)
        came = len(frame) - PART_HEAD_BYTES + (came if frame[9:13] != bytes(4) else 0)
        if got is not None:
            assert came == 2 + len(got[0]) + len(got[1]), "what came is the job and the message, to the byte"
            whole.append((got[0], bytes(got[1])))
    return whole


def _send_letters(letters: list[tuple[str, bytes]]) -> bytes:
    return _row(
        [frame for i, (job, message) in enumerate(letters) for frame in lf.Letter(job, message).frames(i)]
    )


# --- bulk -------------------------------------------------------------------------------------------------------
TICKET = Ticket(b"i" * 16, b"k" * 32, "10.0.0.1:7001", 2 * CHUNK_BYTES + 5, "aead", b"aad")
BUFFER = memoryview(bytearray(TICKET.nbytes))


def _hellos() -> list[bytes]:
    return [
        bf.Hello(s, n, mode, b"t" * 16, b"p" * 16).pack() for s, n, mode in ((0, 1, "none"), (15, 16, "aead"))
    ]  # type: ignore[arg-type]


def _pack_hello(hello: bf.Hello) -> bytes:
    return hello.pack()


def _chunks() -> list[bytes]:
    heads = [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, 5)]
    return [
        b"".join(bf.pack_chunk(at, n) for at, n in heads),
        b"".join(bf.pack_chunk(at, n) for at, n in heads[::-1]),
    ]


def _claim(data: bytes) -> None:
    """The places that chunk heads are given: inside the buffer, of the length they say, none twice."""
    landing, taken = Landing(TICKET, BUFFER, 0.0), set()
    for at in range(0, len(data) - bf.CHUNK_HEAD_BYTES + 1, bf.CHUNK_HEAD_BYTES):
        offset, length, _ = bf.unpack_chunk(data[at : at + bf.CHUNK_HEAD_BYTES])
        place = landing.claim(offset, length)
        assert len(place) == length > 0 and offset + length <= TICKET.nbytes and offset not in taken
        taken.add(offset)


# --- keys and names ---------------------------------------------------------------------------------------------
def _key_files() -> list[bytes]:
    return [f"{keys.MAGIC} {bytes(range(32)).hex()}\n".encode()]


def _pack_key(key: keys.ClusterKey) -> bytes:
    return f"{keys.MAGIC} {key.secret.hex()}\n".encode()


def _address(data: bytes) -> tuple[str, int]:
    host, port = split_address(data.decode("utf-8", "replace"))
    assert 0 <= port < 1 << 16, port
    return host, port


TARGETS = [
    Target(
        "rank-frame", lambda data: decode_frame(data, wire.TO_DAEMON), lambda: _frames(wire.TO_DAEMON), (FrameError,),
        "msgpack", encode_frame, allocated_max=ITEMS_MAX * NEST,
    ),
    Target(
        "daemon-frame", lambda data: decode_frame(data, wire.TO_RANK), lambda: _frames(wire.TO_RANK), (FrameError,),
        "msgpack", encode_frame, allocated_max=ITEMS_MAX * NEST,
    ),
    Target(
        "world", unpack_world, _worlds, (ValueError,), "msgpack", lambda found: pack_world(found[0], map(asdict, found[1])),
        allocated_max=RANKS_MAX * NEST,
    ),
    Target(
        "control-message", codec.decode, lambda: [codec.encode(m) for m in examples(codec.MESSAGES.values())],
        (codec.DecodeError,), "msgpack", codec.encode,
    ),
    Target("control-greeting", _greeting, _greetings, (lf.BadFrame,), pack=_pack_greeting),
    Target("control-frames", _assemble, _letters, (lf.BadFrame,), pack=_send_letters),
    Target(
        "ticket", Ticket.decode, lambda: [TICKET.encode(), msgpack.packb(msgpack.unpackb(TICKET.encode()))],
        (TransferError,), "msgpack", Ticket.encode,
    ),
    Target("bulk-hello", bf.Hello.unpack, _hellos, (TransferError,), pack=_pack_hello),
    Target(
        "bulk-reply", bf.unpack_reply, lambda: [bf.pack_reply(status, b"p" * 32) for status in range(9)],
        (TransferError,), pack=lambda body: bf.pack_reply(bf.OK, body),
    ),
    Target("bulk-chunks", _claim, _chunks, (TransferError,)),
    Target(
        "address", _address, lambda: [b"10.0.0.1:7000", b"[::1]:65535", b"[fe80::1%lo]:1"], (TransferError,), "text",
        lambda found: join_address(*found).encode(),
    ),
    Target("key-file", lambda data: keys._parse(data, "key"), _key_files, (CkptdError,), "text", _pack_key),
    Target(
        "job-name", lambda data: names.job_key(7, data.decode("utf-8", "replace")), lambda: [b"gpt", b"a.b_c-9"],
        (CkptdError,), "text", lambda key: key.partition("/")[2].encode(), exact=True,
    ),
]  # fmt: skip
