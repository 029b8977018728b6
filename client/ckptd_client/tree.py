"""Non-tensor state as a msgpack tree with typed extensions; no pickle anywhere (P13).

Plain: None, bool, int, float, str, bytes, list, dict. Extensions: tuple, set, frozenset, Counter, OrderedDict, Enum
(by value), Path, datetime, numpy arrays and scalars, torch.Size, torch.dtype, generators, big ints, complex, small CPU
tensors (by value), other tensors (by reference to a fragment of the slot). A tensor that occurs again is the same again. Equal
values give equal bytes on all ranks.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import enum
import math
import pathlib
import random
import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import msgpack
import torch
from torch import Tensor

from ckptd_client.dtypes import NAME, TORCH

INLINE_BYTES_MAX = 16 * 1024  # CPU tensors up to this travel inside the tree
DEPTH_MAX = 100  # of values in values: a parser in C recurses, and ends the process at some 200 extensions
REF_MARK = "#"  # between an object's name and the number of a tensor in it: the key of its fragment

# Extension codes; a format, never renumbered.
TUPLE, SET, FROZENSET, COUNTER, ORDERED, ENUM, PATH, DATETIME, NDARRAY, NPSCALAR = range(1, 11)
SIZE, DTYPE, BIGINT, COMPLEX, TENSOR, REF, GENERATOR, SAME = range(11, 19)

NUMPY_DTYPE = re.compile(r"[<>|=][?bBiufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[A-Za-z]{1,2}\])?")  # numpy parses far more
REMEDY = (
    "turn it into numbers, strings, lists, dicts or tensors in state_dict(), or leave it out with exclude="
)
UNBIND = "parts, unbind()"
NO_TEXT = "is no text: it holds half of a surrogate pair, as file names do that are no UTF-8; os.fsencode() makes bytes of it"
TakeTensor = Callable[
    [str, Tensor], str
]  # (path inside the tree, tensor) -> key of the fragment that will hold it
Builders = Mapping[int, Callable[[Any], Any]]  # extension code -> value from its plain form


class ForeignType(TypeError):
    """A value that the tree cannot hold; the message names its path and the remedy."""


class _Unfit(TypeError):
    """Why a value cannot be encoded, where that is more than its type."""


def encode(value: Any, path: str, take: TakeTensor | None = None) -> bytes:
    """Raises ForeignType naming the path of what cannot be encoded. ``take``: gets tensors too large to inline."""
    encoder = _Encoder(path, take)
    try:
        return encoder.pack(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        foreign = find_foreign(value, path)
        if foreign is None:
            raise
    raise ForeignType(foreign)


def decode(data: bytes | memoryview, find: Callable[[str], Any] | None = None, others: Builders = MappingProxyType({})) -> Any:
    """``others``: what makes values of some extensions, in place of what they were. Raises ValueError for what is no such tree."""

    tensors: list[Any] = []  # in the order in which they were encoded

    depth = 0

    def hook(code: int, body: bytes) -> Any:
        nonlocal depth
        if depth > DEPTH_MAX:
            raise ValueError(f"values nested deeper than {DEPTH_MAX}")
        depth += 1
        value = tensors[_number(unpack(body))] if code == SAME else _decode_ext(code, body, unpack, find, others)
        depth -= 1
        if code in (TENSOR, REF):
            tensors.append(value)
        return value

    def unpack(body: bytes | memoryview) -> Any:
        return msgpack.unpackb(body, ext_hook=hook, strict_map_key=False)

    try:
        return unpack(data)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"state does not parse: {error or type(error).__name__}") from error
    finally:
        tensors.clear()  # the two functions above refer to each other, and would keep it until garbage is collected


class _Encoder:
    def __init__(self, path: str, take: TakeTensor | None) -> None:
        self._path, self._take, self._tensors, self._depth = path, take, 0, 0
        self._met: dict[Any, tuple[int, Tensor]] = {}

    def pack(self, value: Any) -> bytes:
        return cast(bytes, msgpack.packb(value, default=self._extend, strict_types=True))

    def _extend(self, value: Any) -> msgpack.ExtType:
        if isinstance(value, Tensor):
            return self._tensor(value)
        code, form = _plain_form(value)
        if self._depth > DEPTH_MAX:
            raise _Unfit(f"values nested deeper than {DEPTH_MAX}")
        self._depth += 1
        body = self.pack(form)
        self._depth -= 1
        if code == ENUM:
            _check_enum(value, body)
        return msgpack.ExtType(code, body)

    def _tensor(self, value: Tensor) -> msgpack.ExtType:
        if value.is_nested:
            raise _Unfit(f"a nested tensor cannot be saved: save a list of its {UNBIND}")
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise _Unfit(f"a {type(value).__name__} ({value.layout}) cannot be saved")
        if value.dtype not in NAME:
            raise _Unfit(f"a tensor of {value.dtype} cannot be saved")
        memory = _memory(value)
        if memory in self._met:
            return msgpack.ExtType(SAME, self.pack(self._met[memory][0]))
        self._met[memory] = (len(self._met), value)
        if (value.device.type == "cpu" and value.nbytes <= INLINE_BYTES_MAX) or self._take is None:
            return msgpack.ExtType(
                TENSOR, self.pack([NAME[value.dtype], list(value.shape), tensor_bytes(value)])
            )
        key = self._take(f"{self._path}{REF_MARK}{self._tensors}", value)
        self._tensors += 1
        return msgpack.ExtType(REF, self.pack(key))


def _memory(value: Tensor) -> Any:
    """What two objects have in common that are the same tensor, as long as both live."""
    at = value.data_ptr()
    return (at, value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()) if at else id(value)


def tensor_bytes(value: Tensor) -> bytes:
    """The elements in C order, as a view shows them; without numpy."""
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def tensor_from_bytes(dtype: str, shape: list[int], data: bytes) -> Tensor:
    """Raises ValueError, KeyError or RuntimeError when they do not belong together; nothing is allocated before."""
    kind = TORCH[dtype]
    if type(data) is not bytes or math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f"a tensor of {dtype} with other bytes than its shape needs")
    if not data:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)


def _plain_form(value: Any) -> tuple[int, Any]:
    """(extension code, msgpack-able form). Raises TypeError for a foreign type."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return ENUM, [kind.__module__, kind.__qualname__, value.value]
    if isinstance(value, pathlib.PurePath):
        return PATH, str(value)
    if kind is datetime.datetime:
        return DATETIME, value.isoformat()
    if isinstance(value, torch.dtype):
        return DTYPE, str(value).removeprefix("torch.")
    if isinstance(value, torch.Generator):
        return GENERATOR, [str(value.device), tensor_bytes(value.get_state())]
    form = _FORMS.get(kind)
    if form is not None:
        return form[0], form[1](value)
    return _numpy_form(value)


def _check_enum(value: enum.Enum, body: bytes) -> None:
    """Raises _Unfit for a member that a restore would not find: its class stands in a function, or under another name."""
    kind = type(value)
    try:
        found = _enum(decode(body))
    except (ValueError, TypeError):
        found = None
    if found is not value:
        raise _Unfit(f"{kind.__module__}.{kind.__qualname__} is not found under this name; define it at the top of a module")


def _sorted_items(value: Any) -> list[Any]:
    """In an order that does not depend on the process's hash seed."""
    return sorted(value, key=lambda item: msgpack.packb(item, default=lambda v: repr(v)))


_FORMS: dict[type, tuple[int, Callable[[Any], Any]]] = {
    tuple: (TUPLE, list),
    set: (SET, _sorted_items),
    frozenset: (FROZENSET, _sorted_items),
    collections.Counter: (COUNTER, lambda value: list(map(list, value.items()))),
    collections.OrderedDict: (ORDERED, lambda value: list(map(list, value.items()))),
    torch.Size: (SIZE, list),
    int: (BIGINT, str),
    complex: (COMPLEX, lambda value: [value.real, value.imag]),
}


def _numpy_form(value: Any) -> tuple[int, Any]:
    numpy, masked = sys.modules.get("numpy"), sys.modules.get("numpy.ma")  # imported by nobody, there are none
    # Another thread may be importing it at this moment: then nobody has one yet.
    if isinstance(value, getattr(masked, "MaskedArray", ())):
        raise _Unfit("a masked array: save its data and its mask")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise TypeError("numpy objects and records")
        code = NDARRAY if isinstance(value, numpy.ndarray) else NPSCALAR
        return code, [value.dtype.str, list(value.shape), value.tobytes()]
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        state = "bit_generator.state" if isinstance(value, numpy.random.Generator) else "get_state()"
        raise _Unfit(f"a numpy {type(value).__name__}: save its {state} in state_dict(), and set it in load_state_dict()")
    if isinstance(value, random.Random):
        name = type(value).__name__
        raise _Unfit(f"a {name} of Python's: save its getstate() in state_dict(), and setstate() it in load_state_dict()")
    raise TypeError(type(value).__name__)


# --- decoding -----------------------------------------------------------------------------------------------
def _decode_ext(
    code: int, body: bytes, unpack: Callable[[bytes], Any], find: Callable[[str], Any] | None, others: Builders
) -> Any:
    value = unpack(body)
    if code == REF:
        if find is None:
            raise ValueError("a tensor by reference outside of a snapshot")
        return find(value)
    builder = others.get(code) or _BUILDERS.get(code)
    if builder is None:
        raise ValueError(f"unknown extension {code}: written by a newer version?")
    return builder(value)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no number of a tensor")
    return value


def _enum(value: Any) -> enum.Enum:
    """Only classes that the program has imported itself: nothing is imported or run because a file says so."""
    module, name, member = value
    found: Any = sys.modules.get(module)
    for part in name.split("."):  # what stands there: a module's __getattr__ or a property would run, and may import
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError(f"Enum {module}.{name} is not imported in this program: import it before restore()")
    return found(member)


def _numpy(value: Any) -> Any:
    import numpy

    dtype, shape, data = value
    if not NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError("no numpy dtype that is saved")
    return numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _generator(value: Any) -> torch.Generator:
    generator = torch.Generator(device=value[0])
    generator.set_state(tensor_from_bytes("U8", [len(value[1])], value[1]))
    return generator


_BUILDERS: dict[int, Callable[[Any], Any]] = {
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
    COUNTER: lambda value: collections.Counter(dict(value)),
    ORDERED: collections.OrderedDict,
    ENUM: _enum,
    PATH: pathlib.Path,
    DATETIME: datetime.datetime.fromisoformat,
    NDARRAY: _numpy,
    NPSCALAR: lambda value: _numpy(value)[()],
    SIZE: torch.Size,
    DTYPE: lambda value: _torch_dtype(value),
    BIGINT: int,
    COMPLEX: lambda value: complex(*value),
    TENSOR: lambda value: tensor_from_bytes(*value),
    GENERATOR: _generator,
}


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch")
    return found


# --- naming what does not fit -------------------------------------------------------------------------------
def is_text(value: str) -> bool:
    return printable(value) == value


def printable(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode()


def find_foreign(value: Any, path: str, depth: int = 0) -> str | None:
    """A sentence about the first value that cannot be encoded, with its path; None when all can."""
    if depth > DEPTH_MAX:
        return f"{path}: nested deeper than {DEPTH_MAX}, or contains itself; {REMEDY}"
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        for key, item in value.items():
            found = find_foreign(key, f"{path} (key {key!r})", depth + 1) or find_foreign(
                item, f"{path}.{key}", depth + 1
            )
            if found:
                return found
        return None
    if isinstance(value, str) and not is_text(value):
        return f"{printable(path)}: {value!r} {NO_TEXT}"
    if type(value) in (list, tuple, set, frozenset):
        parts = (find_foreign(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
        return next((part for part in parts if part), None)
    try:
        _Encoder(path, lambda key, _: key).pack(value)
    except _Unfit as error:
        return f"{path}: {error}; {REMEDY}"
    except (TypeError, ValueError, KeyError, OverflowError):
        kind = type(value)
        return f"{path}: {kind.__module__}.{kind.__qualname__} cannot be saved without pickle; {REMEDY}"
    return None
