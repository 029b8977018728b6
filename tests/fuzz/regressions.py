"""Inputs that once broke a parser. Each is refused now; docs/TESTING.md tells what each did."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgpack

from ckptd.persist import names, report
from ckptd.wire import link_frames as lf
from tests.fuzz.registry import TARGETS
from tests.fuzz.targets_storage import checkpoint

DEEP = b"\x91" * 1015 + b"\xc0"  # more lists inside each other than repr() follows


def _edited(target: str, edit: Callable[[Any], None], sample: int = 0) -> bytes:
    """A valid sample with one value replaced."""
    tree = msgpack.unpackb(TARGETS[target].valid[sample])
    edit(tree)
    packed: bytes = msgpack.packb(tree)
    return packed


def _put(*path: Any, value: Any) -> Callable[[Any], None]:
    def edit(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return edit


def _manifest(edit: Callable[[Any], None]) -> bytes:
    tree = json.loads(checkpoint()[0][names.MANIFEST])
    edit(tree)
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"


def _crossed_boxes(count: int) -> bytes:
    """As many boxes in as many dimensions, box i cut in dimension i only: a sweep took 2**count steps."""
    rows, at = [], 0
    for cut in range(count):
        sizes = [1 if dim == cut else 2 for dim in range(count)]
        nbytes = 2 ** (count - 1)
        rows.append(["k", "U8", [2] * count, [0] * count, sizes, at, nbytes, "param", "unique", 0])
        at += -(-nbytes // 64) * 64
    packed: bytes = msgpack.packb([1, 0, 1, 0, at, "", [], rows])
    return packed


def _vast_layout() -> bytes:
    """A record of a layout of 1 PiB: its table of blocks would have 2**30 entries."""
    nbytes = 1 << 50
    row = ["k", "U8", [nbytes], [0], [nbytes], 0, nbytes, "param", "unique", 0]
    layout = msgpack.packb([1, 0, 1, 0, nbytes, "", [], [row]])
    return _edited("slot-record", _put(5, value=layout))


def _cut_envelope() -> bytes:
    """The job's name is longer than what came."""
    frame = next(lf.Letter("1000/gpt", b"").frames(1))
    frame = frame[:17] + struct.pack(">H", 40) + frame[19:]
    return len(frame).to_bytes(4, "big") + frame


def _report_of_other_text() -> bytes:
    written = report.encode(report.Report(report.REPORT_VERSION, "n0", [], None, [0]))
    return written.replace(b"\xa2n0", b"\xa2\xff\xfe")


JOIN = next(i for i, sample in enumerate(TARGETS["rank-frame"].valid) if sample[1:6] == b"\xa4Join")

REGRESSIONS: dict[str, dict[str, bytes]] = {
    "rank-frame": {
        "class name of 1000 lists": b"\x92" + DEEP + b"\x80",
        "ext of no bytes": _edited("rank-frame", _put(1, "ask", value={"a": msgpack.ExtType(5, b"")}), JOIN),
    },
    "world": {"ext of no bytes": _edited("world", _put("nodes", 0, "domain", value=msgpack.ExtType(5, b"")))},
    "daemon-frame": {"class name of 1000 lists": b"\x92" + DEEP + b"\x80"},
    "control-message": {
        "time in a status": msgpack.packb(["StatusReply", {"request": "r", "body": {"a": msgpack.Timestamp(1)}}]),
    },
    "control-frames": {"job name cut off": _cut_envelope()},
    "bulk-hello": {"short": b"CKPTBULK"},
    "bulk-reply": {"short": b"CKPT"},
    "address": {
        "port of six digits": b"10.0.0.1:700070",
        "negative port": b"10.0.0.1:-1",
        "port in Arabic digits": "10.0.0.1:\u0667".encode(),
    },
    "header-forged": {
        "name of 1000 lists": b"\x97\x01" + DEEP + b"\x00\x94\xa1a\x00\xa3own\x00\xa1i\x90\x90",
        "version of 1000 lists": b"\x97" + DEEP + b"\xa1a\x00\x94\xa1a\x00\xa3own\x00\xa1i\x90\x90",
    },
    "slot-record": {
        "digest that is a number": _edited("slot-record", _put(8, 0, 1, value=1 << 40)),
        "digest beyond any memory": _edited("slot-record", _put(8, 0, 1, value=1 << 63)),
        "version of 1000 lists": b"\x9a" + DEEP + b"\xc0\x92\x00\x00" + b"\x00" * 5 + b"\x90\x00",
        "layout of 1 PiB": _vast_layout(),
        "parity of nothing": b"\x91\x02",
    },
    "layout": {
        "version of 1000 lists": b"\x98" + DEEP + b"\xc0" * 7,
        "40 crossed boxes": _crossed_boxes(40),
    },
    "wants": {
        "dtype is a list": _edited("wants", _put("tensors", 0, 1, value=[])),
        "shape of text": _edited("wants", _put("tensors", 0, 2, value=["8", "4"])),
        "first is infinite": _edited("wants", _put("first", value=float("inf"))),
        "key of 1000 lists": b"\x82\xa7tensors\x91\x95" + DEEP + b"\xa3F32\x90\x90\x90\xa7objects\x90",
    },
    "objects": {"name of bytes": b"\x81\xc4\x01a\xc4\x00"},
    "object-digests": {"name of bytes": b"\x81\xc4\x01a\xc4\x00"},
    "catalogue": {"dtype of 1000 lists": b"\x85\xa5world\x01\xa7tensors\x81\xa1w\x93" + DEEP + b"\x90\xa5param"
                  b"\xa7objects\x80\xa8per_rank\x90\xa7aliases\x80"},
    "manifest": {"1000 lists": b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"},
    "manifest-forged": {
        "world of 2**62": _manifest(_put("world", value=1 << 62)),
        "sum that is not hex": _manifest(_put("sides", 0, "sum", value="x" * 32)),
        "file elsewhere": _manifest(_put("files", 0, "path", value="../../other.safetensors")),
        "file of no name": _manifest(_put("files", 0, "path", value="")),
        "rank outside the world": _manifest(_put("objects", 0, "ranks", value=[99])),
    },
    "epoch-claim-forged": {"1000 lists": b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"},
    "report": {"node that is not UTF-8": _report_of_other_text()},
    "storage-name": {
        "Arabic digits": "epoch-\u0661\u0662\u0663\u0664\u0665\u0666".encode(),
        "leading zeros": b"step-00000000010",
    },
    "job-key": {"Arabic digits": "\u0661/gpt".encode()},
    "state-file": {"a list": b"[1]", "1000 lists": b"[" * 100_000},
    "node-id": {"not UTF-8": b"n0\xff", "zeros after a crash": bytes(12), "empty": b""},
    "page-address": {"port beyond all": b"127.0.0.1:99999"},
    "state-tree": {
        "tensor whose bytes are a number": msgpack.packb(
            msgpack.ExtType(15, msgpack.packb(["F32", [1], 1 << 40]))
        ),
        "tensor of 4 TiB without bytes": msgpack.packb(msgpack.ExtType(15, msgpack.packb(["F32", [1 << 40], b""]))),
        "generator of another state": msgpack.packb(msgpack.ExtType(17, msgpack.packb(["cpu", bytes(5056)]))),
        "numpy dtype that is parsed": msgpack.packb(msgpack.ExtType(9, msgpack.packb([",", [1], b"x"]))),
    },
}  # fmt: skip
# Not refused, as what does not parse counts as nothing there: the first ports are taken.
HARMLESS: dict[str, dict[str, bytes]] = {
    "ports-file": {
        "port of 2**32": b'{"control":4294967296,"bulk":20001}',
        "1000 lists": b'{"a":' + b"[" * 2000,
    },
}
