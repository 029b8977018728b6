"""Messages between daemons as bytes: msgpack ``[class name, {field: value}]``, decoded strictly into dataclasses (P13).

Nested dataclasses are maps, tuples are arrays, bytes are bin. Decoding trusts nothing: sizes and depth are bounded before
anything is built, ext types and non-string map keys are refused, unknown classes and fields are refused, and no value is
coerced (a float is not an int, a str is not bytes).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_args, get_type_hints

import msgpack
import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.protocol.messages import Message
from ckptd.wire.peer import PEER_MESSAGES
from ckptd.wire.strict import Unexpected, checker

CONTROL_MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # one encoded message; layouts of many ranks are the largest

ARRAY_ITEMS_MAX = 1 << 20  # entries of one array or map: bounds what 64 MiB of one-byte values unfold to

# The world and the newest epochs, which every node of a job names alike: a steward of hundreds has each of them once.
ALIKE: frozenset[Any] = frozenset({EpochRecord, EpochRecord | None, tuple[NodeInfo, ...], tuple[str, ...]})
ALIKE_BYTES = range(4096, 4 * 1024 * 1024)  # smaller and larger ones are read each time
ALIKE_KEPT_MAX = 16

MESSAGES: Mapping[str, type] = {cls.__name__: cls for cls in (*get_args(Message), *PEER_MESSAGES)}


class DecodeError(CkptdError):
    """The bytes are not a message that this daemon accepts: nothing of it was used."""


def encode(message: object, *, bytes_max: int = CONTROL_MESSAGE_BYTES_MAX) -> bytes:
    """The wire form of a message dataclass. Raises CkptdError when it is longer than ``bytes_max``."""
    name = type(message).__name__
    try:
        data = msgspec.msgpack.encode([name, message])
    except (TypeError, OverflowError, RecursionError) as error:
        raise CkptdError(f"a {name} has no wire form: {error}") from error
    if len(data) > bytes_max:
        raise CkptdError(
            f"a {name} of {len(data)} bytes is longer than a message may be ({bytes_max})",
            hint="a state with very many small tensors needs fewer, larger ones",
        )
    return data


def decode(
    data: bytes | memoryview, allowed: Mapping[str, type] = MESSAGES, *, bytes_max: int = CONTROL_MESSAGE_BYTES_MAX
) -> object:
    """The message in ``data``: an instance of a class in ``allowed``. Raises DecodeError, never anything else."""
    if len(data) > bytes_max:
        raise DecodeError(f"a message of {len(data)} bytes, at most {bytes_max} are allowed")
    if len(data) > ALIKE_BYTES.start:
        return _convert_parts(*_parts(data), allowed)
    match _unpack(data):
        case [str() as name, dict() as fields]:
            return _convert(name, fields, allowed)
    raise DecodeError("not a message: [class name, {field: value}] expected")


def _parts(data: bytes | memoryview) -> tuple[str, dict[str, msgspec.Raw]]:
    """A message's class and its fields, as they lie there."""
    try:
        return _PARTS.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        raise DecodeError(f"not a message: {error}") from error


_PARTS = msgspec.msgpack.Decoder(tuple[str, dict[str, msgspec.Raw]])


def _unpack(data: bytes | memoryview) -> Any:
    # msgpack refuses deep nesting by itself (StackError is a ValueError) and bounds declared lengths, these by len(data).
    limit = min(ARRAY_ITEMS_MAX, len(data))
    try:
        return msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_no_ext, max_ext_len=0, max_array_len=limit, max_map_len=limit
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f"not msgpack: {type(error).__name__} {error}") from error


def _no_ext(code: int, data: bytes) -> object:
    """Of no bytes: those of max_ext_len. Times (code -1) never come here, but they have bytes."""
    raise ValueError(f"ext type {code} is not allowed")


def _convert(name: str, fields: dict[Any, Any], allowed: Mapping[str, type]) -> object:
    cls = _known(name, allowed)
    try:
        checker(cls)(fields, name)
        return msgspec.convert(fields, cls, strict=True, builtin_types=(bytes,))
    except _MISFITS as error:
        raise DecodeError(f"a {name} that does not fit: {error}") from error


def _convert_parts(name: str, parts: dict[str, msgspec.Raw], allowed: Mapping[str, type]) -> object:
    """What is alike in many messages is the same value in all of them."""
    cls = _known(name, allowed)
    hints = _hints(cls)
    fields: dict[str, Any] = {}
    field = ""
    try:
        for field, raw in parts.items():
            if field not in hints:
                raise Unexpected("not a field")
            kind, data = hints[field], bytes(raw)
            fields[field] = (_alike if kind in ALIKE and len(data) in ALIKE_BYTES else _field)(kind, data)
        return cls(**fields)
    except (*_MISFITS, TypeError) as error:  # TypeError: a field is missing
        raise DecodeError(f"a {name} that does not fit: {field[:80]}: {error}") from error


_MISFITS = Unexpected, msgspec.ValidationError, RecursionError, OverflowError


def _known(name: str, allowed: Mapping[str, type]) -> Any:
    cls = allowed.get(name)
    if cls is None:
        raise DecodeError(f"unknown message {name[:80]!r}")
    return cls


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _field(kind: Any, data: bytes) -> Any:
    value = _unpack(data)
    checker(kind)(value, "")
    return msgspec.convert(value, kind, strict=True, builtin_types=(bytes,))


_alike = lru_cache(maxsize=ALIKE_KEPT_MAX)(_field)
