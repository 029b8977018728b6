"""A checkpoint's parameters once more, as whole tensors under their registered keys, for whoever knows nothing of shards: a commit
of its own, inside the checkpoint's, which goes with it (docs/FORMAT.md section 8)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import msgspec
import xxhash

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.persist.index import Tensor
from ckptd.persist.manifest_file import MANIFEST_BYTES_MAX, read
from ckptd.persist.names import CONSOLIDATED, MANIFEST, PART, WHOLE, file_stem, header_name, step_dir
from ckptd.persist.reader import SEGMENT_BYTES, Checkpoint
from ckptd.persist.storage.base import FULL, NotFound, Storage, StorageError, read_file
from ckptd.persist.strided import slabs
from ckptd.persist.sums import FileDamage
from ckptd.persist.verify import VerifyReport
from ckptd.persist.whole_file import FILE_BYTES, INDEX, Whole, files_of, header, index_of
from ckptd.wire.bulk import Pace, wait_turn

FORMAT, VERSION = "ckptd-consolidated", 1
ROLES = ("param", "buffer")
ROOM = 2  # times its bytes must be free: it is to cost no checkpoint its room
AGAIN = "delete that folder and the file `whole` beside it: it is made anew from the checkpoint, which is another matter"


class File(msgspec.Struct, frozen=True):
    path: str
    size: int
    xxh3_128: str


class Folder(msgspec.Struct, frozen=True):
    """Its manifest. snapshot: epoch and step; of: the sum of that checkpoint's manifest; aliases: alias -> key."""

    format: str
    version: int
    snapshot: dict[str, int]
    of: str
    aliases: dict[str, str]
    files: list[File]


def consolidate(
    storage: Storage,
    job: str,
    snapshot: SnapshotId,
    node: str,
    pace: Pace | None = None,
    cancelled: threading.Event | None = None,
    file_bytes: int = FILE_BYTES,
) -> int:
    """How many bytes were written; 0: it had been done. node: who does it; what an earlier life of it left of that is deleted.
    Raises CkptdError: what is read is damaged, storage has no room, it was called off; then nothing is left of it."""
    pointer = step_dir(job, snapshot)
    with Checkpoint.open(storage, job, snapshot) as checkpoint:
        place = storage.place(pointer)
        attempt, target = f"{place}/{CONSOLIDATED}.{file_stem(node)}{PART}", f"{place}/{CONSOLIDATED}"
        storage.discard(attempt)
        done = 0
        if not storage.list(target):
            try:
                done = _Run(checkpoint, attempt, pace, cancelled or threading.Event()).write(target, file_bytes)
            except BaseException as error:
                with suppress(StorageError):
                    storage.discard(attempt)
                if not (isinstance(error, NotFound) and storage.list(target)):
                    raise  # else another node was first, and has swept this attempt
        for entry in storage.list(place):  # of other nodes, the dead among them: none of these can be committed any more
            if entry.is_dir and entry.name.startswith(f"{CONSOLIDATED}.") and entry.name.endswith(PART):
                storage.discard(f"{place}/{entry.name}")
        storage.mark(pointer, WHOLE, b"")
        return done


class _Run:
    def __init__(self, checkpoint: Checkpoint, attempt: str, pace: Pace | None, cancelled: threading.Event) -> None:
        self._checkpoint, self._attempt, self._storage = checkpoint, attempt, checkpoint.storage
        self._pace, self._cancelled = pace, cancelled
        self._files: list[File] = []

    def write(self, target: str, file_bytes: int) -> int:
        storage, found = self._storage, self._checkpoint.index.once().values()
        tensors = [tensor for tensor, whole in found if whole and tensor.role in ROLES]
        if not tensors:
            hint = "what was saved through torch.distributed.checkpoint has none that ckptd knows of: `ckptd export --to dcp`"
            raise CkptdError("no parameters in it", where=self._checkpoint.where, hint=hint)
        wholes = [Whole(header_name(tensor.key, None), tensor.dtype, tensor.shape, tensor) for tensor in tensors]
        total = sum(whole.nbytes for whole in wholes)
        if storage.free_bytes() < ROOM * total:
            text = f"no room to consolidate: {total} bytes, of which there is to be room for {ROOM} times as many"
            raise StorageError(text, where=storage.locate(target), errno=min(FULL))
        storage.begin(self._attempt)
        files = files_of(wholes, file_bytes)
        for name, inside in files.items():
            self._file(name, inside)
        manifest = self._checkpoint.manifest
        snapshot = {"epoch": manifest.snapshot.epoch, "step": manifest.snapshot.step}
        index = index_of(files)
        every = [*self._files, File(INDEX, len(index), xxhash.xxh3_128_hexdigest(index))]
        told = Folder(FORMAT, VERSION, snapshot, manifest.xxh3_128, dict(manifest.aliases), every)
        if storage.commit_if_absent(self._attempt, target, [*files], {MANIFEST: msgspec.json.encode(told), INDEX: index}):
            return total
        storage.discard(self._attempt)  # another node was first
        return 0

    def _file(self, name: str, wholes: Sequence[Whole[Tensor]]) -> None:
        writer, running = self._storage.put(f"{self._attempt}/{name}"), xxhash.xxh3_128()
        try:
            for piece in self._pieces(wholes):
                writer.write(piece)
                running.update(piece)
            self._files.append(File(name, writer.finish(), running.hexdigest()))
        except BaseException:
            writer.abort()
            raise

    def _pieces(self, wholes: Sequence[Whole[Tensor]]) -> Iterator[bytes | memoryview]:
        yield header(wholes)
        buffer = memoryview(bytearray(SEGMENT_BYTES))
        for tensor in (whole.of for whole in wholes):
            item, whole = ITEMSIZE[tensor.dtype], Box.whole(tensor.shape)
            for box in slabs(whole, whole, item, SEGMENT_BYTES) if whole.volume else ():
                if not wait_turn(self._pace, box.volume * item, self._cancelled.is_set) or self._cancelled.is_set():
                    raise CkptdError("consolidating was called off", where=self._checkpoint.where)
                piece = buffer[: box.volume * item]
                self._checkpoint.read(tensor.key, box, piece, tensor.rank)
                yield piece


def problems_in(storage: Storage, directory: str, report: VerifyReport) -> Iterator[str]:
    """What is wrong with the folder of a checkpoint that has one, every byte looked at, which ``report`` counts."""
    checkpoint = storage.locate(directory)
    try:
        of, place = read(storage, directory).manifest, storage.place(directory)
    except (FileDamage, StorageError):
        return  # the checkpoint's own, which was told
    try:
        target = f"{place}/{CONSOLIDATED}" if place else CONSOLIDATED
        folder = msgspec.json.decode(read_file(storage, f"{target}/{MANIFEST}", MANIFEST_BYTES_MAX), type=Folder)
    except NotFound:
        if any(entry.name in (WHOLE, CONSOLIDATED) for entry in storage.list(directory)):
            yield str(CkptdError(f"{CONSOLIDATED}/ is not there, or has no manifest", where=checkpoint, hint=AGAIN))
        return
    except (StorageError, msgspec.DecodeError, UnicodeDecodeError) as error:
        yield str(CkptdError(f"damaged manifest: {error}", where=storage.locate(target), hint=AGAIN))
        return
    if folder.version <= VERSION and (folder.of, folder.aliases) != (of.xxh3_128, dict(of.aliases)):
        yield str(CkptdError("it was made from another checkpoint", where=storage.locate(target), hint=AGAIN))
    for file in folder.files if folder.version <= VERSION else ():
        where = storage.locate(f"{target}/{file.path}")
        try:
            found = _sum(storage, f"{target}/{file.path}", file.size, report)
        except StorageError as error:
            yield str(CkptdError(error.what, where=where, hint=AGAIN))
        else:
            if found != file.xxh3_128:
                yield str(CkptdError("bytes do not match their sum", where=where, hint=AGAIN))


def _sum(storage: Storage, path: str, size: int, report: VerifyReport) -> str:
    running, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(size, SEGMENT_BYTES)))
    with closing(storage.open(path)) as reader:
        for at in range(0, size, SEGMENT_BYTES):
            part = buffer[: min(SEGMENT_BYTES, size - at)]
            reader.read_into(at, part)
            running.update(part)
            report.bytes_read += len(part)
        return running.hexdigest() if reader.size == size else f"{reader.size} bytes"
