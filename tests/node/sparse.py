"""A checkpoint of any size that takes no room: its data are holes but for the first and the last bytes of each tensor, and its
sums are right."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist import manifest as m
from ckptd.persist.index import Chunk, Index, Tensor
from ckptd.persist.manifest_file import encode
from ckptd.persist.names import step_dir
from ckptd.persist.sums import digest
from tests.node.checkpoints import JOB, epoch_record

EDGE = b"edge of a tensor"
SNAPSHOT = SnapshotId(1, 10)


def sparse(root: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Of F32 tensors that are whole numbers of blocks. Returns the checkpoint's directory."""
    directory = root / step_dir(JOB, SNAPSHOT)
    directory.mkdir(parents=True)
    rows, header, at = [], {}, 0
    for key, shape in shapes.items():
        nbytes = 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        rows.append((Tensor(key, "F32", shape, "param"), at, nbytes))
        at += nbytes
    places = {key: {"saved_offsets": [0] * len(shape)} for key, shape in shapes.items()}
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    text = json.dumps(header).encode()
    head = struct.pack("<Q", len(text)) + text
    with (directory / "n0-0000.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + at)
        for _, start, nbytes in rows:
            for place in (start, start + nbytes - len(EDGE)):
                file.seek(len(head) + place)
                file.write(EDGE)
    sums = b"".join(_sums(nbytes) for _, _, nbytes in rows)
    side = b"CKPTSIDE" + struct.pack("<II", 1, 0) + sums
    (directory / "n0.side").write_bytes(side + digest(side))
    chunks = [Chunk(0, len(head) + start, nbytes, start // BLOCK_BYTES, (0,) * len(t.shape), t.shape) for t, start, nbytes in rows]
    blocks, size = at // BLOCK_BYTES, len(head) + at
    data = m.DataFile("n0-0000.safetensors", size, len(head), digest(head).hex(), blocks, 0, 16, digest(sums).hex())
    sides = [m.SideFile("n0.side", len(side) + 16, digest(side).hex())]
    record = epoch_record()
    manifest = m.Manifest(
        m.FORMAT, m.VERSION, "", "test", "", JOB, "a1", SNAPSHOT, False, 1, record, BLOCK_BYTES, [], {}, [], [data], sides
    )
    index = Index.of([(tensor, [chunk]) for (tensor, _, _), chunk in zip(rows, chunks, strict=True)])
    for name, content in encode(m.Contents(manifest, index)).items():
        (directory / name).write_bytes(content)
    return directory


def _sums(nbytes: int) -> bytes:
    """16 bytes per block."""
    blocks = nbytes // BLOCK_BYTES
    assert blocks * BLOCK_BYTES == nbytes and blocks > 1
    first, last = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    first[: len(EDGE)] = last[-len(EDGE) :] = EDGE
    return digest(first) + digest(bytes(BLOCK_BYTES)) * (blocks - 2) + digest(last)
