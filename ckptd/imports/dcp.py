"""torch.distributed.checkpoint's own files: `.metadata` and `*.distcp`, each tensor's boxes in zips of torch.save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.imports import torch_file
from ckptd.imports.stored import TORN, Place, Stored, joined
from ckptd.imports.unpickle import PICKLE_BYTES_MAX, DType, Record, unpickle

METADATA = ".metadata"
_TENSOR, _OBJECT = "TensorStorageMetadata", "BytesStorageMetadata"
_Places = dict[tuple[str, tuple[int, ...] | None], Record]


@dataclass(frozen=True)
class Plans:
    """What was saved, under the names that its plans had. Objects: bytes that nobody has looked into. paths: planner_data."""

    tensors: dict[str, Stored]
    objects: dict[str, bytes]
    paths: Any


def load(path: str, foreign: set[str]) -> dict[str, Any]:
    """What was saved, nested as it was, each tensor as ``Stored``. Raises CkptdError."""
    root, metadata = Path(path), _metadata(path, foreign)
    try:
        return _nested(root, metadata, foreign)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise _strange(root, error) from error


def load_plans(path: str, foreign: set[str]) -> Plans:
    """Raises CkptdError."""
    root, metadata = Path(path), _metadata(path, foreign)
    made = Plans({}, {}, metadata.state.get("planner_data"))
    try:
        if metadata.state.get("mcore_data"):
            hint = "load it with the release of Megatron-Core that saved it, and save it again with 0.16"
            raise CkptdError("Megatron-Core before 0.16 has changed the shapes of its tensors", where=path, hint=hint)
        held = _held(root, metadata)
        for key, facts in metadata.field("state_dict_metadata").items():
            if _kind(root, key, facts) == _TENSOR:
                made.tensors[key] = _tensor(root, key, facts, held, foreign)
            else:
                made.objects[key] = _bytes(root, held[key, None])
                torch_file.check(made.objects[key], f"{key} in {path}")
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise _strange(root, error) from error
    return made


def _metadata(path: str, foreign: set[str]) -> Record:
    root = Path(path)
    if not (root / METADATA).is_file():
        hint = "name the directory that .metadata lies in; a save that has none did not come to its end"
        raise CkptdError("torn, or no directory of torch.distributed.checkpoint: no .metadata", where=path, hint=hint)
    if (root / METADATA).stat().st_size > PICKLE_BYTES_MAX:
        raise CkptdError(f"more than {PICKLE_BYTES_MAX} bytes", where=str(root / METADATA))
    metadata = unpickle((root / METADATA).read_bytes(), str(root / METADATA), foreign)
    if not isinstance(metadata, Record) or not isinstance(metadata.state, dict):
        raise _strange(root, TypeError(f"a {type(metadata).__name__}"))
    return metadata


def _strange(root: Path, error: Exception) -> CkptdError:
    return CkptdError(f"this metadata is none that torch writes: {error!r}", where=str(root / METADATA))


def _held(root: Path, metadata: Record) -> _Places:
    """Raises CkptdError: the same box lies in two places, by what a plan of torch's has once."""
    found: _Places = {}
    for index, info in metadata.field("storage_data").items():
        key, offset = index.field("fqn"), index.state.get("offset")
        first = found.setdefault((key, None if offset is None else tuple(offset)), info)
        if any(first.field(name) != info.field(name) for name in ("relative_path", "offset", "length")):
            text = f"two places hold {key}: {first.field('relative_path')} and {info.field('relative_path')}"
            hint = "which of them is right stands nowhere: take another copy of it, or an older one"
            raise CkptdError(text, where=str(root / METADATA), hint=hint)
    return found


def _kind(root: Path, key: str, facts: Any) -> str:
    name = type(facts).name.rpartition(".")[2] if isinstance(facts, Record) else ""
    if name not in (_TENSOR, _OBJECT):
        raise CkptdError(f"{key} is saved as {facts!r}", where=str(root), hint="only tensors and values of torch are known")
    return name


def _nested(root: Path, metadata: Record, foreign: set[str]) -> dict[str, Any]:
    held, paths = _held(root, metadata), metadata.state.get("planner_data") or {}
    found: dict[str, Any] = {}
    for key, facts in metadata.field("state_dict_metadata").items():
        is_tensor = _kind(root, key, facts) == _TENSOR
        value: Any = _tensor(root, key, facts, held, foreign) if is_tensor else _value(root, held[key, None], foreign)
        way = paths.get(key, (key,))
        _put(found, [*way] if isinstance(way, tuple | list) else [key], value)
    return {key: _listed(value) for key, value in found.items()}


def _tensor(root: Path, key: str, facts: Record, held: _Places, foreign: set[str]) -> Stored:
    dtype, shape = _dtype(facts.field("properties"), key), tuple(map(int, facts.field("size")))
    places: list[Place] = []
    for chunk in facts.field("chunks"):
        offsets, sizes = (tuple(map(int, chunk.field(name))) for name in ("offsets", "sizes"))
        info = held.get((key, offsets)) or (held.get((key, None)) if not any(offsets) else None)
        if info is None:
            raise CkptdError(f"torn: nothing says where {key} from {offsets} on lies", where=str(root))
        stored = _value(root, info, foreign)
        if not isinstance(stored, Stored) or (stored.dtype, stored.shape) != (dtype, sizes):
            raise CkptdError(f"{key} from {offsets} on is not the tensor that its metadata tells of", where=str(root))
        places += [Place(Box(offsets, sizes), p.path, p.at, p.steps, p.dtype, p.wanted) for p in stored.places]
    return joined(dtype, shape, places)


def _dtype(properties: Record, key: str) -> str:
    """Its state is a tuple, or of other releases a dict."""
    found = properties.state.get("dtype") if isinstance(properties.state, dict) else properties.state[0]
    if not isinstance(found, DType) or not found.name:
        raise CkptdError(f"dtype {found!r} is not known", where=key)
    return found.name


def _value(root: Path, info: Record, foreign: set[str]) -> Any:
    return torch_file.load(str(_file(root, info)), foreign, int(info.field("offset")), int(info.field("length")))


def _bytes(root: Path, info: Record) -> bytes:
    file, at, length = _file(root, info), int(info.field("offset")), int(info.field("length"))
    if not 0 <= length <= PICKLE_BYTES_MAX or not 0 <= at <= file.stat().st_size - length:
        raise CkptdError(TORN, where=str(file))
    with open(file, "rb") as opened:
        opened.seek(at)
        return opened.read(length)


def _file(root: Path, info: Record) -> Path:
    if info.state.get("transform_descriptors"):
        raise CkptdError("its files are compressed by an extension", where=str(root), hint="load and save it again without one")
    name = str(info.field("relative_path"))
    if "/" in name or not (root / name).is_file():
        raise CkptdError(f"torn: {name} is named by the metadata, and not there", where=str(root))
    return root / name


def _put(root: dict[Any, Any], way: list[Any], value: Any) -> None:
    for part in way[:-1]:
        root = root.setdefault(part, {})
    root[way[-1]] = value


def _listed(value: Any) -> Any:
    """Dicts whose keys are all of 0, 1, ... were lists."""
    if not isinstance(value, dict):
        return value
    made = {key: _listed(item) for key, item in value.items()}
    is_list = made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made)))
    return [made[at] for at in range(len(made))] if is_list else made
