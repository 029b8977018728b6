"""Hypothesis against the codec: messages come back equal, and no bytes do more than raise DecodeError (P13)."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.wire.codec import MESSAGES, DecodeError, decode, encode

LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    Any: st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=3) | st.binary(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Whatever a field of this type may hold."""
    if hint in LEAVES:
        return LEAVES[hint]
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    assert origin is tuple, hint
    if arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    return st.tuples(*map(values, arguments))


MESSAGE = st.one_of(*(values(cls) for cls in MESSAGES.values()))
TREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 3), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(MESSAGE)
def test_every_message_comes_back_equal(message: object) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        message = decode(data)
    except DecodeError:
        return
    assert type(message) in MESSAGES.values()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(MESSAGES)), TREE)
def test_any_tree_under_a_known_name(name: str, tree: Any) -> None:
    try:
        message = decode(msgpack.packb([name, tree]))
    except DecodeError:
        return
    assert type(message) is MESSAGES[name]


@settings(max_examples=200, deadline=None)
@given(MESSAGE, st.data())
def test_a_flipped_bit_or_a_cut_gives_a_message_or_a_decode_error(message: object, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[at // 8] ^= 1 << at % 8
    cut = data.draw(st.integers(0, len(raw)))
    for mutated in (bytes(raw), bytes(raw[:cut])):
        try:
            again = decode(mutated)
        except DecodeError:
            continue
        assert type(again) in MESSAGES.values()
