"""Messages as bytes: every class there and back, and nothing but messages (P13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import msgpack
import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol import messages as m
from ckptd.wire.codec import ARRAY_ITEMS_MAX, CONTROL_MESSAGE_BYTES_MAX, MESSAGES, DecodeError, decode, encode
from ckptd.wire.peer import PEER_MESSAGES, FetchAsk, StatusReply
from ckptd.wire.strict import UNTYPED_DEPTH_MAX

NODE = NodeInfo("n0", "tcp://10.0.0.1:7000", "10.0.0.1:7001", "rack1", "abc")
RECORD = EpochRecord(2, "nonce", ("n0", "n0"), (NODE,), (SnapshotId(1, 40),))


def packed(name: str, **fields: Any) -> bytes:
    data: bytes = msgpack.packb([name, fields])
    return data


def test_the_map_names_every_message_once() -> None:
    assert len(MESSAGES) == len(get_args(m.Message)) + len(PEER_MESSAGES)
    assert {MESSAGES[name].__name__ for name in MESSAGES} == set(MESSAGES)


@pytest.mark.parametrize(
    "message",
    [
        m.Stale(RECORD),
        m.JoinReport("a", ("n0",), (NODE,), (0,), m.RestoreAsk(step=4), None),
        m.ReportAgain("a"),
        m.EpochOpen("a", RECORD, 1, SnapshotId(1, 40), True, (m.Source("n0", 0, 1, "id"),), ("t:a",)),
        m.Inventory("", RECORD, (), {}, ((SnapshotId(1, 2), -1, False),)),
        FetchAsk("t", SnapshotId(1, 2), 0, ((0, 10), (64, 1 << 40)), b"ticket"),
        StatusReply("r", {"a": [1, {"b": None, "c": 1.5}], "d": b"x"}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_there_and_back(message: object) -> None:
    assert decode(encode(message)) == message


def test_types_are_not_coerced() -> None:
    good = {"epoch": 1, "layouts": {"id": b"x"}}
    assert decode(packed("LayoutReply", **good)) == m.LayoutReply(1, {"id": b"x"})
    for wrong in (
        {"epoch": 1.0}, {"epoch": True}, {"epoch": "1"}, {"epoch": None},
        {"layouts": {"id": "eA=="}}, {"layouts": [["id", b"x"]]}, {"layouts": {"id": {"deep": b"x"}}},
    ):  # fmt: skip
        with pytest.raises(DecodeError, match="LayoutReply"):
            decode(packed("LayoutReply", **(good | wrong)))


def test_unknown_fields_are_refused_at_every_depth() -> None:
    fact = {"snapshot": {"epoch": 1, "step": 2}, "rank": 0, "tier": 0, "layout_id": "x"}
    assert decode(packed("Held", epoch=1, fact=fact))
    for path, damaged in (
        (r"Held\.more", {"epoch": 1, "fact": fact, "more": 1}),
        (r"Held\.fact\.more", {"epoch": 1, "fact": fact | {"more": 1}}),
        (r"Held\.fact\.snapshot\.more", {"epoch": 1, "fact": fact | {"snapshot": {"epoch": 1, "step": 2, "more": 1}}}),
    ):
        with pytest.raises(DecodeError, match=path):
            decode(packed("Held", **damaged))
    nodes = [{"node": "a", "control": "", "bulk": "", "domain": ""}, {"node": "b", "evil": 1}]
    with pytest.raises(DecodeError, match=r"InventoryRequest\.nodes\[1\]\.evil"):
        decode(packed("InventoryRequest", attempt="a", nodes=nodes))


def world(nodes: int) -> tuple[NodeInfo, ...]:
    hosts = [f"10.0.{i // 256}.{i % 256}" for i in range(nodes)]
    return tuple(NodeInfo(f"n{i}", f"tcp://{host}:7000", f"{host}:7001", "r") for i, host in enumerate(hosts))


def test_what_every_node_says_alike_is_there_once() -> None:
    """P16: a steward of hundreds of nodes hears of the world from each."""
    nodes = world(500)
    ranks = tuple(node.node for node in nodes for _ in range(8))
    record = EpochRecord(2, "nonce", ranks, nodes, (SnapshotId(1, 40),))
    report = m.JoinReport("a", ranks, nodes, (0,), m.RestoreAsk(step=4), record)
    one, other = decode(encode(report)), decode(encode(replace(report, here=(1,))))
    assert isinstance(one, m.JoinReport) and isinstance(other, m.JoinReport)
    assert (one, other) == (report, replace(report, here=(1,)))
    assert one.ranks is other.ranks and one.nodes is other.nodes and one.known is other.known
    told = decode(encode(m.Inventory("a", record, ())))
    assert isinstance(told, m.Inventory)
    assert told.known == record and told.known is not record
    assert decode(encode(m.InventoryRequest("a", nodes[1:]))) == m.InventoryRequest("a", nodes[1:])


def test_a_long_message_is_looked_at_as_a_short_one_is() -> None:
    nodes = world(100)
    report = m.JoinReport("a", (), nodes, (0,), None, None)
    name, fields = msgpack.unpackb(encode(report))
    assert decode(packed(name, **fields)) == report
    for wrong, said in (
        ({"more": 1}, "more: not a field"),
        ({"nodes": [*fields["nodes"], {"node": "b", "evil": 1}]}, r"nodes: \[100\].evil is not a field"),
        ({"nodes": [*fields["nodes"], {"node": "b"}]}, "nodes: .*missing required field"),
        ({"nodes": [*fields["nodes"], 7]}, "nodes: "),
        ({"here": [0.5]}, "here: "),
        ({"here": msgpack.ExtType(4, b"x")}, "max_ext_len"),
        ({"ask": {"step": True}}, "ask: "),
    ):
        with pytest.raises(DecodeError, match=said):
            decode(packed(name, **(fields | wrong)))
    del fields["here"]
    with pytest.raises(DecodeError, match="here"):
        decode(packed(name, **fields))
    with pytest.raises(DecodeError, match="unknown message"):
        decode(packed("os.system", **fields))
    whole = encode(report)
    no_text = whole.replace(b"\xa5nodes", b"\xa5nod\xff\xff")
    for damaged in (no_text, whole + b"\x00", whole[:-1], whole[:5000], b"\x91" * 100_000):
        with pytest.raises(DecodeError):
            decode(damaged)


def test_missing_fields_and_unknown_classes_are_refused() -> None:
    with pytest.raises(DecodeError, match="epoch"):
        decode(packed("Grant", grant=1, from_step=1))
    for name in ("NodeInfo", "Message", "CkptdError", "os.system", ""):
        with pytest.raises(DecodeError, match="unknown message"):
            decode(packed(name))
    with pytest.raises(DecodeError, match="unknown message"):
        decode(encode(m.FlushAsk(1, 8)), {"Grant": m.Grant})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        msgpack.packb({"Grant": {}}),
        msgpack.packb(["Grant"]),
        msgpack.packb([1, {}]),
        msgpack.packb(["Grant", []]),
        msgpack.packb(["Grant", {1: 2}]),
        msgpack.packb(["Grant", {b"epoch": 1}]),
        msgpack.packb(["Grant", {"epoch": msgpack.ExtType(4, b"x")}]),
        msgpack.packb(["Grant", {"epoch": msgpack.Timestamp(1)}]),
        msgpack.packb(["Grant", {"epoch": 1, "grant": 1, "from_step": 1}]) + b"\x00",
        msgpack.packb(["Grant", {"epoch": 1, "grant": 1, "from_step": 1}])[:-1],
        b"\x92\xa5Grant\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x92\xa2\xff\xfe\x80",
        b"\x80\x04\x95\n\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.",  # a pickle
    ],
)
def test_what_is_no_message_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


def test_limits_hold() -> None:
    with pytest.raises(DecodeError, match="at most"):
        decode(bytes(CONTROL_MESSAGE_BYTES_MAX + 1))
    with pytest.raises(CkptdError, match="longer than a message may be"):
        encode(m.LayoutReply(1, {"id": bytes(200)}), bytes_max=100)
    with pytest.raises(DecodeError, match="max_array_len"):
        decode(packed("Grant", epoch=[None] * (ARRAY_ITEMS_MAX + 1)))


def test_untyped_values_are_bounded_in_depth() -> None:
    body: dict[str, Any] = {}
    for _ in range(UNTYPED_DEPTH_MAX - 1):
        body = {"x": body}
    assert decode(encode(StatusReply("r", body))) == StatusReply("r", body)
    for _ in range(3):
        body = {"x": [body]}
    with pytest.raises(DecodeError, match="nested deeper"):
        decode(encode(StatusReply("r", body)))


def test_what_has_no_wire_form_is_an_error_of_ours() -> None:
    with pytest.raises(CkptdError, match="no wire form"):
        encode(m.Grant(1, 2**70, 1))
    with pytest.raises(CkptdError, match="no wire form"):
        encode(StatusReply("r", {"f": open}))
