"""Flush and durable read next to what the storage gives in the same run: O_DIRECT writes and preadv of a disk, plain obstore of a
bucket. Verification is on.

python -m bench.persist --directory /mnt/checkpoints --json out.json
python -m bench.persist --storage s3://bench/run        # AWS_ENDPOINT_URL, or a server of the bench's own
python -m bench.persist --compress                      # beside the same without, of numbers as a trained layer's
python -m bench.persist --frozen 0.9                    # dedup, where so much of the state does not train, beside the same without
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from bench import object_server
from bench.common import Report, Row, arguments, interleave
from bench.state import JOB, make_arena, sealed_slot
from ckptd.arena.arena import Slot
from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.protocol.messages import WritePiece
from ckptd.core.state_map.box import Box
from ckptd.persist.commit import commit
from ckptd.persist.names import step_dir
from ckptd.persist.pieces import HeldPiece
from ckptd.persist.reader import READER_THREADS, Checkpoint
from ckptd.persist.report import decode
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.posix import PosixStorage
from ckptd.persist.writer import WRITER_THREADS, write_pieces

CHUNK_BYTES = 8 << 20
FLUSH_FLOOR, READ_FLOOR = 0.6, 0.6
BUCKET_FLOOR, BUCKET_CPU_FLOOR = 0.85, 1.5
NODE = NodeInfo("bench", "", "", "bench")
RECORD = EpochRecord(1, "bench", ("bench",), (NODE,))


class Limit(Protocol):
    """What the storage gives: the same bytes, the same number of threads, nothing else done."""

    writes: str
    reads: str

    def write(self) -> None: ...
    def prepare_read(self) -> None: ...
    def read(self) -> None: ...


class Disk:
    writes, reads = f"O_DIRECT write + fsync, {WRITER_THREADS} threads", f"preadv, {WRITER_THREADS} threads, cold page cache"

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


class Bucket:
    """Parts, ranges and requests at once are ckptd's."""

    writes, reads = f"obstore, {WRITER_THREADS} uploads", f"obstore, {READER_THREADS} threads of ranges"

    def __init__(self, root: str, slot: Slot) -> None:
        from ckptd.persist.storage import object_file
        from ckptd.persist.storage.object_service import connect

        self._sizes = object_file
        self._store = connect(f"{root}-limit")
        view = slot.payload[: _payload(slot)]
        half = -(-len(view) // WRITER_THREADS)
        self._parts = {f"part-{at}": view[at : at + half] for at in range(0, len(view), half)}

    def write(self) -> None:
        import obstore

        self.prepare_read()
        obstore.delete(self._store, [*self._parts])

    def prepare_read(self) -> None:
        with ThreadPoolExecutor(WRITER_THREADS) as pool:
            list(pool.map(self._upload, self._parts))

    def _upload(self, name: str) -> None:
        import obstore

        size, data = self._sizes.PART_BYTES, self._parts[name]
        with obstore.open_writer(self._store, name, buffer_size=size, max_concurrency=self._sizes.PARTS_AT_ONCE) as file:
            for at in range(0, len(data), size):
                file.write(data[at : at + size])

    def read(self) -> None:
        step = self._sizes.SPAN_BYTES
        spans = [(name, at, min(step, len(part) - at)) for name, part in self._parts.items() for at in range(0, len(part), step)]
        with ThreadPoolExecutor(READER_THREADS) as pool:
            assert sum(pool.map(self._fetch, spans)) == sum(map(len, self._parts.values()))

    def _fetch(self, span: tuple[str, int, int]) -> int:
        import obstore

        name, at, nbytes = span
        return len(obstore.get_range(self._store, name, start=at, length=nbytes))


class Flush:
    def __init__(self, storage: Storage, slot: Slot, *, compress: bool = False, dedup: bool = False) -> None:
        self._storage, self._slot, self._turn = storage, slot, 0
        self._write = partial(write_pieces, compress=compress, dedup=dedup)
        assert slot.record is not None
        self._snapshot = slot.record.snapshot
        self._place = step_dir(JOB, self._snapshot)
        self.stored_bytes = 0  # of data files, by the last commit

    def write(self) -> None:
        self.commit()
        if isinstance(self._storage, PosixStorage):
            shutil.rmtree(self._storage.locate(self._place))
        else:
            assert self._storage.hide(self._place) and self._storage.drop(self._place)

    def commit(self) -> None:
        self._turn += 1
        record = self._slot.record
        assert record is not None
        piece = WritePiece(0, record.layout.layout_id, None, True)
        held = HeldPiece(piece, self._slot.payload, record)
        attempt = f"bench{self._turn}"
        report = self._write(self._storage, JOB, self._snapshot, attempt, "bench", [held], threading.Event())
        self.stored_bytes = sum(file.size for file in decode(report).files)
        commit(self._storage, JOB, self._snapshot, attempt, RECORD, [report], {0: record.layout}, (), False)

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
        if isinstance(self._storage, PosixStorage):
            for path in Path(self._storage.locate(self._place)).iterdir():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        record = self._slot.record
        assert record is not None
        with Checkpoint.open(self._storage, JOB, self._snapshot) as checkpoint:
            for fragment, dest in zip(record.layout.fragments, self._fragments(), strict=True):
                checkpoint.read(fragment.key, Box.whole(fragment.shape), dest)


class Timed:
    """Of each call the processor time, too, without the first, which warms up."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._all: list[float] = []

    def __call__(self) -> None:
        began = time.process_time()
        self._call()
        self._all.append(time.process_time() - began)

    @property
    def cpu(self) -> list[float]:
        return self._all[1:]


def compare(report: Report, limit: Limit, flush: Flush, nbytes: int, repeats: int, in_bucket: bool) -> None:
    def both(name: str, theirs: Callable[[], None], what: str, ours: Callable[[], None], floor: float) -> None:
        timed = Timed(theirs), Timed(ours)
        taken = interleave({"limit": timed[0], "ckptd": timed[1]}, repeats)
        row = report.add(Row(name, taken["limit"], nbytes))
        report.add(Row(f"ckptd: {what}", taken["ckptd"], nbytes, floor=floor), row)
        if in_bucket:
            row = report.add(Row(f"{name}, processor time", timed[0].cpu, nbytes))
            cpu = Row(f"ckptd: {what}, processor time", timed[1].cpu, nbytes, floor=BUCKET_CPU_FLOOR, kind="time")
            report.add(cpu, row)

    writes, reads = (BUCKET_FLOOR, BUCKET_FLOOR) if in_bucket else (FLUSH_FLOOR, READ_FLOOR)
    both(limit.writes, limit.write, "verify, write, sums, commit", flush.write, writes)
    flush.commit()
    limit.prepare_read()
    both(limit.reads, limit.read, "read, verify", flush.read, reads)
    flush.prove()


def compare_smaller(report: Report, plain: Flush, smaller: Flush, how: str, nbytes: int, repeats: int) -> None:
    def both(what: str, calls: Sequence[Callable[[], None]]) -> None:
        timed = [Timed(call) for call in calls]
        taken = interleave({"plain": timed[0], how: timed[1]}, repeats)
        row = report.add(Row(f"{what}, as it is", taken["plain"], nbytes))
        report.add(Row(f"{what}, {how}", taken[how], nbytes), row)
        row = report.add(Row(f"{what}, as it is, processor time", timed[0].cpu, nbytes))
        report.add(Row(f"{what}, {how}, processor time", timed[1].cpu, nbytes, kind="time"), row)

    each = (plain, smaller)
    both("verify, write, sums, commit", [flush.write for flush in each])
    for flush in each:
        flush.commit()
    both("read, verify", [flush.read for flush in each])
    report.facts[f"{how}: bytes written of state"] = f"{smaller.stored_bytes / nbytes:.3f}"
    for flush in each:
        flush.prove()


def main() -> int:
    help_text = "a bucket, in place of a directory"
    args = arguments(
        __doc__ or "", directory={"type": Path, "default": None},
        storage={"default": None, "metavar": "s3://...", "help": help_text},
        compress={"action": "store_true", "help": "numbers as a trained layer's, compressed, beside the same as they are"},
        frozen={"type": float, "default": 0.0, "metavar": "SHARE", "help": "of the state that does not train; dedup beside none"},
    )  # fmt: skip
    nbytes = int(args.bytes)
    report = Report("persist: flush and durable read")
    with ExitStack() as ends:
        arena = make_arena(1 + bool(args.frozen), nbytes)
        slot = sealed_slot(arena, nbytes, trained=args.compress)
        limit: Limit
        if args.storage is not None:
            ends.enter_context(object_server.running())
            storage, limit = storage_at(args.storage, create=True), Bucket(args.storage, slot)
            report.facts["endpoint"] = os.environ["AWS_ENDPOINT_URL"]
        else:
            directory = Path(tempfile.mkdtemp(prefix="ckptd-bench-", dir=args.directory))
            ends.callback(shutil.rmtree, directory, ignore_errors=True)
            storage, limit = storage_at(str(directory / "root"), create=True), Disk(directory, slot)
            report.facts["directory"] = str(directory.parent)
        if args.compress:
            other = storage_at(f"{storage.locate('')}-compressed", create=True)
            smaller = Flush(other, slot, compress=True)
            compare_smaller(report, Flush(storage, slot), smaller, "compressed", nbytes, args.repeats)
            return report.finish(args.json)
        if args.frozen:
            other = storage_at(f"{storage.locate('')}-dedup", create=True)
            Flush(other, slot).commit()
            trained = sealed_slot(arena, nbytes, step=2, frozen=args.frozen)
            smaller = Flush(other, trained, dedup=True)
            compare_smaller(report, Flush(storage, trained), smaller, "dedup", nbytes, args.repeats)
            return report.finish(args.json)
        compare(report, limit, Flush(storage, slot), nbytes, args.repeats, args.storage is not None)
    return report.finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
