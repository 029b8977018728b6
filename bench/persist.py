"""Flush and durable read next to what the disk gives in the same run: O_DIRECT writes, preadv. Verification is on.

python -m bench.persist --directory /mnt/checkpoints --json out.json
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from bench.common import Report, Row, arguments, interleave
from bench.state import JOB, make_arena, sealed_slot
from ckptd.arena.arena import Slot
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.persist.commit import commit
from ckptd.persist.names import step_dir
from ckptd.persist.pieces import HeldPiece
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.writer import WRITER_THREADS, write_pieces

CHUNK_BYTES = 8 << 20
FLUSH_FLOOR, READ_FLOOR = 0.6, 0.6
NODE = NodeInfo("bench", "", "", "bench")
SNAPSHOT = SnapshotId(1, 1)
RECORD = EpochRecord(1, "bench", ("bench",), (NODE,))


class Disk:
    """The machine's own limit: the same bytes, the same number of threads, nothing else done."""

    def __init__(self, directory: Path, slot: Slot) -> None:
        self._directory = directory
        self._view = slot.payload[: _payload(slot) // CHUNK_BYTES * CHUNK_BYTES]
        self._into = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(WRITER_THREADS)]

    def write(self) -> None:
        self._each(self._write_part)
        for index in range(WRITER_THREADS):
            (self._directory / f"limit-{index}").unlink()

    def prepare_read(self) -> None:
        self._each(self._write_part)

    def read(self) -> None:
        self._each(self._read_part)

    def _each(self, part: object) -> None:
        with ThreadPoolExecutor(WRITER_THREADS) as pool:
            list(pool.map(part, range(WRITER_THREADS)))  # type: ignore[arg-type]

    def _parts(self, index: int) -> range:
        chunks = len(self._view) // CHUNK_BYTES
        return range(index, chunks, WRITER_THREADS)

    def _write_part(self, index: int) -> None:
        fd = os.open(
            self._directory / f"limit-{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600
        )
        try:
            for at, chunk in enumerate(self._parts(index)):
                os.pwrite(fd, self._view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES], at * CHUNK_BYTES)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read_part(self, index: int) -> None:
        fd = os.open(self._directory / f"limit-{index}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            for at, chunk in enumerate(self._parts(index)):
                # Into the same memory that ckptd reads into, so that neither has the warmer pages.
                os.preadv(fd, [self._view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]], at * CHUNK_BYTES)
        finally:
            os.close(fd)


def _payload(slot: Slot) -> int:
    assert slot.record is not None
    return slot.record.layout.payload_bytes


class Flush:
    def __init__(self, storage: PosixStorage, slot: Slot) -> None:
        self._storage, self._slot, self._turn = storage, slot, 0

    def write(self) -> None:
        self.commit()
        shutil.rmtree(self._storage.locate(step_dir(JOB, SNAPSHOT)))

    def commit(self) -> None:
        self._turn += 1
        record = self._slot.record
        assert record is not None
        piece = WritePiece(0, record.layout.layout_id, None, True)
        held = HeldPiece(piece, self._slot.payload, record)
        attempt = f"bench{self._turn}"
        report = write_pieces(self._storage, JOB, SNAPSHOT, attempt, "bench", [held], threading.Event())
        commit(self._storage, JOB, SNAPSHOT, attempt, RECORD, [report], {0: record.layout}, (), False)

    def prove(self) -> None:
        """What was measured is a checkpoint: everything comes back bit by bit."""
        digests = self._digests()
        for view in self._fragments():
            np.frombuffer(view, np.uint8)[:] = 0
        self.read()
        assert self._digests() == digests, "what was read is not what was written"

    def _fragments(self) -> list[memoryview]:
        assert self._slot.record is not None
        return [self._slot.payload[f.offset : f.offset + f.nbytes] for f in self._slot.record.layout.fragments]

    def _digests(self) -> list[str]:
        return [xxhash.xxh3_64_hexdigest(view) for view in self._fragments()]

    def read(self) -> None:
        """Into the slot it was written from."""
        for path in Path(self._storage.locate(step_dir(JOB, SNAPSHOT))).iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        record = self._slot.record
        assert record is not None
        with Checkpoint.open(self._storage, JOB, SNAPSHOT) as checkpoint:
            for fragment, dest in zip(record.layout.fragments, self._fragments(), strict=True):
                checkpoint.read(fragment.key, Box.whole(fragment.shape), dest)


def main() -> int:
    args = arguments(__doc__ or "", directory={"type": Path, "default": None})
    directory = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir=args.directory))
    nbytes = int(args.bytes)
    report = Report("persist: flush and durable read")
    try:
        arena = make_arena(1, nbytes)
        slot = sealed_slot(arena, nbytes)
        storage = PosixStorage(str(directory / "root"))
        disk, flush = Disk(directory, slot), Flush(storage, slot)
        taken = interleave({"O_DIRECT": disk.write, "ckptd": flush.write}, args.repeats)
        limit = report.add(Row("O_DIRECT write + fsync, 2 threads", taken["O_DIRECT"], nbytes))
        report.add(
            Row("ckptd: verify, write, sums, commit", taken["ckptd"], nbytes, floor=FLUSH_FLOOR), limit
        )
        flush.commit()
        disk.prepare_read()
        taken = interleave({"preadv": disk.read, "ckptd": flush.read}, args.repeats)
        flush.prove()
        limit = report.add(Row("preadv, 2 threads, cold page cache", taken["preadv"], nbytes))
        report.add(Row("ckptd: read, verify", taken["ckptd"], nbytes, floor=READ_FLOOR), limit)
        report.facts["directory"] = str(directory.parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
