"""A second reader of the durable format, written from docs/FORMAT.md alone: the standard library, numpy and xxhash."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

ITEM = dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"], 1)
ITEM |= dict.fromkeys(["I16", "U16", "F16", "BF16"], 2) | dict.fromkeys(["I32", "U32", "F32"], 4)
ITEM |= dict.fromkeys(["C64", "F64", "I64", "U64"], 8)
BLOCK = 1_048_576


def sum_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def manifest_of(directory: Path) -> dict[str, Any]:
    """Section 3."""
    data = (directory / "manifest.json").read_bytes()
    found: dict[str, Any] = json.loads(data)
    at = data.index(found["xxh3_128"].encode())
    assert at < 256
    assert sum_of(data[:at] + b"0" * 32 + data[at + 32 :]) == found["xxh3_128"]
    assert (found["format"], found["version"], found["block_bytes"]) == ("ckptd-checkpoint", 2, BLOCK)
    return found


def columns_of(directory: Path, manifest: dict[str, Any]) -> dict[str, list[int]]:
    """Section 4."""
    index = manifest["index"]
    data = (directory / index["path"]).read_bytes()
    assert (len(data), sum_of(data)) == (index["size"], index["sum"])
    return {name: np.frombuffer(data, kind, rows, at).tolist() for name, kind, at, rows in index["columns"]}


def tensors_of(directory: Path) -> dict[tuple[str, int | None], np.ndarray]:
    """(key, rank) -> elements as raw bytes, shape (*shape, itemsize). A per-rank tensor's missing part is zero."""
    manifest = manifest_of(directory)
    columns, names = columns_of(directory, manifest), manifest["names"]
    wholes, left = [], columns["shape"]
    for dtype, dims in zip(columns["dtype"], columns["dims"], strict=True):
        wholes.append(np.zeros((*left[:dims], ITEM[names["dtypes"][dtype]]), np.uint8))
        left = left[dims:]
    done = 0  # of offsets and sizes
    for row, index in enumerate(columns["tensor"]):
        dims, item = columns["dims"][index], wholes[index].shape[-1]
        offsets, sizes = columns["offsets"][done : done + dims], columns["sizes"][done : done + dims]
        done += dims
        data = chunk_of(directory, manifest, *(columns[name][row] for name in ("file", "at", "nbytes", "block")))
        if "codec" in columns and columns["codec"][row]:
            dtype = names["dtypes"][columns["dtype"][index]]
            if columns["codec"][row] == 3:
                data = rows_in(directory, manifest, data, sizes, item)
            else:
                data = dequantised(data, sizes, dtype) if columns["codec"][row] == 2 else decoded(data, item)
        place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        wholes[index][place] = np.frombuffer(data, np.uint8).reshape(*sizes, item)
    owners = [rank - 1 if rank else None for rank in columns["rank"]]
    return dict(zip(zip(names["keys"], owners, strict=True), wholes, strict=True))


def chunk_of(directory: Path, manifest: dict[str, Any], file: int, at: int, nbytes: int, block: int) -> bytes:
    """Section 3, "Reading a box": every block against its sum in the side file."""
    facts = manifest["files"][file]
    content = (place_of(directory, facts) / facts["path"]).read_bytes()
    assert len(content) == facts["size"]
    assert sum_of(content[: facts["data_start"]]) == facts["header_sum"]
    (length,) = struct.unpack("<Q", content[:8])
    assert facts["data_start"] == (0 if facts["path"].endswith(".encoded") else 8 + length)
    side = side_of(directory, manifest, facts["side"])
    sums = side[facts["sums_at"] : facts["sums_at"] + 16 * facts["blocks"]]
    assert sum_of(sums) == facts["sums_sum"]
    data = content[at : at + nbytes]
    for index in range(0, -(-nbytes // BLOCK)):
        found = sum_of(data[index * BLOCK : (index + 1) * BLOCK])
        assert found == sums[16 * (block + index) : 16 * (block + index + 1)].hex()
    return data


def place_of(directory: Path, facts: dict[str, Any]) -> Path:
    """Section 3, ``of``."""
    of = facts.get("of")
    return directory.parent.parent / f"epoch-{of['epoch']:06}" / f"step-{of['step']:010}" if of else directory


def rows_in(directory: Path, manifest: dict[str, Any], frame: bytes, sizes: list[int], item: int) -> bytes:
    """Section 2, "Rows that changed": row by row."""
    width, count = sizes[-1] * item, struct.unpack("<I", frame[4:8])[0]
    rows = math.prod(sizes[:-1])
    if frame[0] == 0:
        assert count == rows and len(frame) == 8 + rows * (16 + width)
        table = frame[8 + 16 * rows :]
        for row in range(rows):
            assert sum_of(table[row * width : (row + 1) * width]) == frame[8 + 16 * row : 24 + 16 * row].hex()
        return table
    assert frame[0] == 1
    at, block, length = struct.unpack("<QIH", frame[8:22])
    path, frame = frame[24 : 24 + length].decode(), frame[24 + length :]
    (file,) = (number for number, facts in enumerate(manifest["files"]) if facts["path"] == path)
    base = chunk_of(directory, manifest, file, at, 8 + rows * (16 + width), block)
    assert base[0] == 0
    found = bytearray(rows_in(directory, manifest, base, sizes, item))
    assert len(frame) == count * (4 + width)
    for number, row in enumerate(struct.unpack(f"<{count}I", frame[: 4 * count])):
        found[row * width : (row + 1) * width] = frame[4 * count + number * width :][:width]
    return bytes(found)


def decoded(frame: bytes, item: int) -> bytes:
    """Section 2, "Encoded chunks"."""
    import zstandard

    found = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
    return found.reshape(item, -1).T.tobytes()


def dequantised(frame: bytes, sizes: list[int], dtype: str) -> bytes:
    """Section 2, "Quantised chunks": number by number."""
    width, bits, at = sizes[-1] if sizes else 1, frame[0], 4
    rows = math.prod(sizes) // width
    values = np.empty((rows, width), np.float32)
    each = -(-width * bits // 8)
    assert len(frame) == 4 + rows * (8 + each)
    for row in range(rows):
        (low,) = np.frombuffer(frame, "<f4", 1, at + 4 * row)
        (step,) = np.frombuffer(frame, "<f4", 1, at + 4 * (rows + row))
        packed = int.from_bytes(frame[at + 8 * rows + each * row :][:each], "little")
        for column in range(width):
            values[row, column] = low + step * np.float32(packed >> (bits * column) & ((1 << bits) - 1))
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    if dtype == "F32":
        return values.tobytes()
    upper, lower = np.divmod(values.view("<u4"), 1 << 16)  # BF16
    return (upper + ((lower > 1 << 15) | ((lower == 1 << 15) & (upper % 2 == 1)))).astype("<u2").tobytes()


def side_of(directory: Path, manifest: dict[str, Any], index: int) -> bytes:
    """Section 5."""
    facts = manifest["sides"][index]
    data = (place_of(directory, facts) / facts["path"]).read_bytes()
    assert len(data) == facts["size"]
    assert data[:16] == b"CKPTSIDE" + struct.pack("<II", 1, 0)
    assert sum_of(data[:-16]) == data[-16:].hex() == facts["sum"]
    return data


def objects_of(directory: Path) -> dict[tuple[str, int], bytes]:
    """(name, rank) -> blob."""
    manifest = manifest_of(directory)
    result = {}
    for ref in manifest["objects"]:
        side = side_of(directory, manifest, ref["side"])
        blob = side[ref["at"] : ref["at"] + ref["nbytes"]]
        assert sum_of(blob) == ref["sum"]
        for rank in range(manifest["world"]) if ref["ranks"] is None else ref["ranks"]:
            result[ref["name"], rank] = blob
    return result


def record_of(path: Path) -> dict[str, Any]:
    """Section 7: the claim of an epoch."""
    data = path.read_bytes()
    claim = data[data.index(b'"claim":') + 8 : -2]
    assert data == b'{"xxh3_128":"' + sum_of(claim).encode() + b'","claim":' + claim + b"}\n"
    found: dict[str, Any] = json.loads(claim)["record"]
    return found
