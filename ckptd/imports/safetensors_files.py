"""safetensors files: one, or a directory of them with an index or without; also what torch's HuggingFaceStorageWriter wrote."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.imports.stored import TORN, Place, Stored, joined

HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
INDEX = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
_NUMBERED = re.compile(r"(?:shard-[0-9]+-)?(.+)-([0-9]+)-of-([0-9]+)\.safetensors")  # torch's have the rank before it
_ZIP = b"PK\x03\x04"


def load(path: str) -> dict[str, Stored]:
    """Tensors by the names that they have there. Raises CkptdError."""
    places: dict[str, list[Place]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(Path(path)):
        for key, place, within in _entries(str(file)):
            places.setdefault(key, []).append(place)
            others = shapes.get(key, within)
            if len(others) != len(within) or places[key][0].dtype != place.dtype:
                raise CkptdError(f"{key} is of another kind in another file", where=str(file))
            shapes[key] = tuple(map(max, zip(others, within, strict=True))) if within else ()
    return {key: joined(found[0].dtype, shapes[key], found if 0 not in shapes[key] else ()) for key, found in places.items()}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        try:
            named = {path / str(name) for name in json.loads((path / INDEX).read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CkptdError(f"this index does not parse: {error!r}", where=str(path / INDEX)) from error
        missing = sorted(name.name for name in named if not name.is_file())
        if missing:
            raise CkptdError(f"torn: {', '.join(missing)} named by the index, and not there", where=str(path))
        found = sorted(named)
    else:
        _check_numbers(path, found)
    if not found:
        raise CkptdError("no *.safetensors here", where=str(path), hint="name the model's directory, or one file")
    return found


def _check_numbers(path: Path, found: list[Path]) -> None:
    """Raises CkptdError: of N files not all are there."""
    there: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, (_NUMBERED.fullmatch(file.name) for file in found)):
        there.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (name, count), numbers in there.items():
        lost = next((number for number in range(1, int(count) + 1) if number not in numbers), None)
        if lost is not None:
            text = f"torn: {len(numbers)} files of {count} are there, {name}-{lost:0{len(count)}}-of-{count}.safetensors is not"
            raise CkptdError(text, where=str(path), hint="fetch the rest, or import one file by its own name")


def _entries(path: str) -> list[tuple[str, Place, tuple[int, ...]]]:
    """(key, where it lies, the shape that it reaches to)"""
    try:
        with open(path, "rb") as file:
            size, first = os.fstat(file.fileno()).st_size, file.read(_LENGTH.size)
            length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else HEADER_BYTES_MAX + 1
            if first.startswith(_ZIP):
                raise CkptdError("a zip, as torch.save writes it, and no safetensors file", where=path, hint="--from torch")
            if length > min(HEADER_BYTES_MAX, size):
                raise CkptdError(TORN, where=path, hint="or it is no safetensors file")
            header = json.loads(file.read(length), object_pairs_hook=_once)
        start, meta = _LENGTH.size + length, header.pop("__metadata__", {})
        offsets = json.loads(meta.get("DCP_SHARDING_INFO", "{}"))
        _check_apart(path, header)
        return [_entry(path, start, key, row, offsets) for key, row in header.items()]
    except OSError as error:
        raise CkptdError(f"cannot be read: {error.strerror or error}", where=path) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CkptdError(f"this safetensors header does not parse: {error!r}", where=path) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError: a name twice, of which the later one would count."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is named twice")
        found[name] = value
    return found


def _check_apart(path: str, header: dict[str, Any]) -> None:
    """Raises CkptdError: two tensors share bytes, which safetensors itself refuses to open."""
    places = sorted((int(begin), int(end), key) for key, row in header.items() for begin, end in [row["data_offsets"]])
    for (_, end, key), (begin, _, other) in pairwise(place for place in places if place[0] < place[1]):
        if begin < end:
            raise CkptdError(f"{key} and {other} lie over each other", where=path, hint="the file is damaged: save it again")


def _entry(path: str, start: int, key: str, row: dict[str, Any], offsets: dict[str, Any]) -> tuple[str, Place, tuple[int, ...]]:
    dtype, sizes, (begin, end) = row["dtype"], tuple(map(int, row["shape"])), map(int, row["data_offsets"])
    if dtype not in ITEMSIZE:
        raise CkptdError(f"{key} has dtype {dtype}, which is not known", where=path)
    if min(begin, *sizes, 0) < 0:
        raise CkptdError(f"{key} begins before the data, or has a size below 0", where=path)
    if end - begin != math.prod(sizes) * ITEMSIZE[dtype]:
        raise CkptdError(f"{key} has {end - begin} bytes, and another shape", where=path)
    at = tuple(map(int, offsets[key]["saved_offsets"])) if key in offsets else (0,) * len(sizes)
    place = Place.packed(Box(at, sizes), path, start + begin, dtype)
    place.check()
    return key, place, tuple(a + b for a, b in zip(at, sizes, strict=True))
