"""What a writer tells the committer about its files: msgpack, typed, opaque to the core."""

from __future__ import annotations

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.persist.manifest import DataFile, Manifest, SideFile

REPORT_VERSION = 1
REPORT_BYTES_MAX = 1 << 30


class WrittenChunk(msgspec.Struct, array_like=True, frozen=True):
    key: str
    name: str
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    role: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    nbytes: int
    block: int
    codec: int = 0

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class WrittenFile(msgspec.Struct, frozen=True):
    """``path`` is the final name; until the commit the file is called that with names.PART at its end."""

    path: str
    size: int
    data_start: int
    header_sum: bytes
    blocks: int
    sums_at: int
    sums_sum: bytes
    chunks: list[WrittenChunk]


class WrittenObject(msgspec.Struct, array_like=True, frozen=True):
    name: str
    rank: int
    at: int
    nbytes: int
    sum: bytes


class WrittenSide(msgspec.Struct, frozen=True):
    path: str
    size: int
    sum: bytes
    objects: list[WrittenObject]


class KeptFile(msgspec.Struct, frozen=True):
    """A data file of the checkpoint ``of``, and what of it is in this one as well. Its sums are in ``side``."""

    of: SnapshotId
    file: DataFile
    side: SideFile
    chunks: list[WrittenChunk]


class WrittenRows(msgspec.Struct, frozen=True):
    """Tables that were written by rows. ``base``: where they are whole; None: in what was written. ``mixed``: some here, some
    there. ``since``: as the newest manifest has it."""

    base: SnapshotId | None
    mixed: bool
    since: int


class Report(msgspec.Struct, frozen=True):
    version: int
    node: str
    files: list[WrittenFile]
    side: WrittenSide | None  # None: nothing was written
    ranks: list[int]  # whose objects are in ``side`` (perhaps none)
    kept: list[KeptFile] = []
    rows: WrittenRows | None = None


def kept_file(of: SnapshotId, manifest: Manifest, file: DataFile, chunks: list[WrittenChunk]) -> KeptFile:
    """The same from every manifest that names the file."""
    alone, side = msgspec.structs.replace(file, side=0, of=None), msgspec.structs.replace(manifest.sides[file.side], of=None)
    return KeptFile(of, alone, side, chunks)


def encode(report: Report) -> bytes:
    return msgspec.msgpack.encode(report)


def decode(data: bytes) -> Report:
    """Raises CkptdError on anything that is not a report of this version."""
    if len(data) > REPORT_BYTES_MAX:
        raise CkptdError(f"a writer's report of {len(data)} bytes")
    try:
        report = msgspec.msgpack.decode(data, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CkptdError(f"malformed writer's report: {error}") from error
    if report.version != REPORT_VERSION:
        raise CkptdError(
            f"writer's report of version {report.version}",
            where=report.node,
            hint="run one version of ckptd on all nodes",
        )
    return report
