"""Pickles of other programs, read without importing or calling anything of theirs (P13).

The one module that may import ``pickle``. Every global name in a pickle becomes something of ours: names that say how tensors and
plain values are put together are in a table of builders, any other one is the class of an inert record, which keeps what the pickle
says of it and does nothing. No callable that is not made here is ever reached.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.dtypes import TORCH_NAMES

PICKLE_BYTES_MAX = 1 << 30
DTYPES = {torch: name for name, torch in TORCH_NAMES.items()} | {"half": "F16", "float": "F32", "double": "F64"}
_STORAGES = {
    "Bool": "BOOL", "Byte": "U8", "Char": "I8", "Short": "I16", "Int": "I32", "Long": "I64", "Half": "F16", "BFloat16": "BF16",
    "Float": "F32", "Double": "F64", "ComplexFloat": "C64", "Untyped": "",
}  # fmt: skip
_DCP = "torch.distributed.checkpoint"
RECORDS = frozenset(  # classes that are known, and of which nothing but the values is wanted
    {f"{_DCP}.metadata.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    )} | {"deepspeed.utils.tensor_fragment.fragment_address", "deepspeed.runtime.zero.config.ZeroStageEnum"}
    | {f"{_DCP}.filesystem._StorageInfo", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)  # fmt: skip


@dataclass(frozen=True)
class DType:
    """``name``: safetensors' of a dtype; "": none of its own (an untyped storage)."""

    name: str
    torch: str


@dataclass(frozen=True)
class StorageRef:
    """A storage of a file that torch.save wrote. key: the entry's name there."""

    dtype: str
    key: str
    numel: int


@dataclass(frozen=True)
class TensorRef:
    """A strided view of a storage; in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """An object of a class that is not ours: what the pickle says of it. ``name``: its class, or the function that would have been
    called with ``args``."""

    name = ""

    def __new__(cls, *args: Any, **named: Any) -> Record:
        made = super().__new__(cls)
        made.args, made.state, made.items = (*args, *named.items()), None, []
        return made

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __init__(self, *args: Any, **named: Any) -> None:
        """``__new__`` has kept them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.items.extend(values)

    add = append

    def field(self, name: str) -> Any:
        """Of a dataclass. KeyError: it has none of that name."""
        return self.state[name]

    def __repr__(self) -> str:
        return f"<{self.name}>"


class _Builder:
    """A function of ours in the place of a known name. It has no attributes that a pickle could set."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("a pickle that changes what reads it")


def unpickle(data: bytes | BinaryIO, where: str, foreign: set[str] | None = None) -> Any:
    """The value. Raises CkptdError: it is no pickle. foreign: gets the names that are not known."""
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    reader = _Unpickler(stream, set() if foreign is None else foreign)
    try:
        return reader.load()
    except CkptdError:
        raise
    except Exception as error:  # whatever a pickle that lies makes ours raise
        text = f"this pickle does not parse: {type(error).__name__}: {error}"
        raise CkptdError(text, where=where, hint="the file is torn, or none that torch wrote") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BinaryIO, foreign: set[str]) -> None:
        super().__init__(stream, encoding="utf-8")
        self._foreign = foreign
        self._classes: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Imports nothing and looks nothing up."""
        module = {"__builtin__": "builtins"}.get(module, module)  # as protocols up to 2 call it
        full = f"{module}.{name}"
        if full not in self._classes:
            self._classes[full] = self._made(module, name, full)
        return self._classes[full]

    def _made(self, module: str, name: str, full: str) -> Any:
        if module in ("torch", "torch.storage") and name.endswith("Storage") and name[:-7] in _STORAGES:
            return DType(_STORAGES[name[:-7]], name)
        if module == "torch" and name in DTYPES:
            return DType(DTYPES[name], name)
        if full in _BUILDERS:
            return _Builder(_BUILDERS[full])
        if full in _PLAIN:
            return _PLAIN[full]
        if full not in RECORDS:
            self._foreign.add(full)
        return type(name, (Record,), {"name": full})

    def persistent_load(self, pid: Any) -> StorageRef:
        """A storage, as torch names it."""
        match pid:
            case ("storage", DType() as kind, str(key), _, int(numel)):
                return StorageRef(kind.name, key, numel)
        raise pickle.UnpicklingError("a persistent id that is no storage")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorRef:
    if not isinstance(storage, StorageRef) or not storage.dtype:
        raise pickle.UnpicklingError("a tensor without a storage of a known dtype")
    return TensorRef(storage, storage.dtype, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _tensor_v3(storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> TensorRef:
    if not isinstance(storage, StorageRef) or not isinstance(dtype, DType) or not dtype.name:
        raise pickle.UnpicklingError("a tensor without a storage of a known dtype")
    return TensorRef(storage, dtype.name, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _from_type(build: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes of its own, or of a class of its own."""
    name = getattr(kind, "name", "")
    if isinstance(build, _Builder) and name in RECORDS:
        return build(*args)
    made = type("subclass", (Record,), {"name": name or "a tensor subclass"})(build, args)
    made.state = state
    return made


def _bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    return text.encode("latin1") if isinstance(text, str) and encoding == "latin1" else bytes(memoryview(text))


_BUILDERS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.device": lambda *of: ":".join(map(str, of)),
    "torch.serialization._get_layout": str,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": lambda counts=(): dict(counts),
    "_codecs.encode": _bytes,
    "pathlib.PosixPath": lambda *parts: "/".join(parts),
    "pathlib.PurePosixPath": lambda *parts: "/".join(parts),
    "pathlib._local.PosixPath": lambda *parts: "/".join(parts),
}
_PLAIN: Mapping[str, type] = {  # of C: no pickle can change them
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
}
