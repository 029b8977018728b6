"""The commit: every reported file is looked at through our own storage, coverage is proved, then all appears at once (D13).

Every step can be repeated, by this committer or by another one of the same attempt. Whoever is first has committed the
snapshot; a later attempt deletes its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.state_map.layout import Layout
from ckptd.persist import report as r
from ckptd.persist.assemble import assemble
from ckptd.persist.manifest import Contents
from ckptd.persist.manifest_file import encode, read
from ckptd.persist.names import DATA, ENCODED, GRANT, KEEP, LOSSY, OF, SIDE, WITHOUT, attempt_dir, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.side import check_side
from ckptd.persist.storage.base import FileReader, NotFound, Storage, StorageError
from ckptd.persist.sums import FileDamage, digest

COMMIT_TURNS = 4  # beside another committer of the same attempt
ADVICE = "every node must write below the same storage; `ckptd preflight` checks it"


def commit(
    storage: Storage,
    job: str,
    snapshot: SnapshotId,
    attempt: str,
    record: EpochRecord,
    reports: Sequence[bytes],
    layouts: Mapping[int, Layout],
    per_rank: Collection[str],
    keep: bool,
) -> None:
    """Returns when the snapshot is durable, by this attempt or by another one. Raises CkptdError otherwise; call it again.

    layouts: of every rank. per_rank: "t:key"/"o:name" that differ between ranks in this snapshot.
    """
    directory, pointer = attempt_dir(job, snapshot, attempt), step_dir(job, snapshot)
    decoded = [r.decode(report) for report in reports]
    with ExitStack() as leases:  # which whoever retains sees until the new checkpoint says itself what it needs
        needed = sorted({kept.of for report in decoded for kept in report.kept})
        older = {of: leases.enter_context(Checkpoint.open(storage, job, of)) for of in needed}

        def made() -> Contents:
            contents = assemble(job, snapshot, attempt, record, decoded, layouts, per_rank, keep)
            for report in decoded:
                check_report(storage, directory, report)
                for kept in report.kept:
                    _check_kept(older[kept.of], report.node, kept)
            return contents

        commit_made(storage, directory, pointer, made, keep)


def commit_made(
    storage: Storage, directory: str, pointer: str, made: Callable[[], Contents], keep: bool
) -> None:
    """As ``commit``. made: looks at the attempt's files and says what they amount to."""
    if _committed(storage, pointer):
        storage.secure(_above(pointer))
        ours = False
    else:
        ours = _publish_patiently(storage, directory, pointer, made)
    if keep and not ours:  # the other attempt may not have known; of ours the mark may have been released since
        storage.mark(pointer, KEEP, b"")
    storage.discard(directory)
    failpoint("persist.commit.done")


def _publish_patiently(storage: Storage, directory: str, pointer: str, made: Callable[[], Contents]) -> bool:
    """A second committer of this attempt may commit it under our hands, or sweep what we have not finished. False: somebody else
    has committed it."""
    for left in reversed(range(COMMIT_TURNS)):
        try:
            ours = _publish(storage, directory, pointer, made())
        except NotFound:
            ours = False
            if not left and not _committed(storage, pointer):
                raise
        if ours:
            return True
        if _committed(storage, pointer):
            break
    storage.secure(_above(pointer))
    return False


def _publish(storage: Storage, directory: str, pointer: str, contents: Contents) -> bool:
    manifest = contents.manifest
    failpoint("persist.commit.checked")
    names = [file.path for file in manifest.files if file.of is None]
    names += [side.path for side in manifest.sides if side.of is None]
    grant = manifest.snapshot.grant
    marks = (KEEP, manifest.keep), (WITHOUT, manifest.without), (LOSSY, manifest.lossy), (f"{GRANT}{grant}", grant)
    beside = {name: b"" for name, wanted in marks if wanted}
    others = {file.of for file in manifest.files} | {side.of for side in manifest.sides}
    beside |= {f"{OF}{of.epoch}-{of.step}": b"" for of in others if of is not None}
    if storage.commit_if_absent(directory, pointer, names, {**beside, **encode(contents)}):
        return True
    if not _committed(storage, pointer):
        hint = "it may be a checkpoint that retention is deleting"
        raise StorageError("a directory stands in the way", where=storage.locate(directory), hint=hint)
    return False


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _committed(storage: Storage, pointer: str) -> bool:
    """Is there a checkpoint with an intact manifest and index? A damaged one is dropped: it is worth nothing."""
    try:
        read(storage, pointer)
    except NotFound:
        return False
    except FileDamage:
        return not (storage.hide(pointer) and storage.drop(pointer))
    return True


def check_report(storage: Storage, directory: str, report: r.Report) -> None:
    """Open what a writer reports through our own mount: size, header and sums. Raises CkptdError."""
    if report.side is None:
        return
    with _Opened(storage, directory, report.node, report.side.path, report.side.size) as side:
        check_side(side.reader, report.side.sum, side.where)
        for file in report.files:
            sums = _read(side.reader, file.sums_at, file.blocks * 16)
            if digest(sums) != file.sums_sum:
                raise FileDamage("the block sums do not match", where=side.where)
    for file in report.files:
        with _Opened(storage, directory, report.node, file.path, file.size) as data:
            if digest(_read(data.reader, 0, file.data_start)) != file.header_sum:
                raise FileDamage("the header is not what was written", where=data.where)


def _check_kept(older: Checkpoint, node: str, kept: r.KeptFile) -> None:
    """Is it that checkpoint's own file, and still there? Raises CkptdError."""
    if kept not in (r.kept_file(kept.of, older.manifest, file, kept.chunks) for file in older.manifest.files if file.of is None):
        raise CkptdError(f"node {node} counts on {kept.file.path}, which {kept.of} does not have", where=older.where)
    with _Opened(older.storage, older.directory, node, kept.side.path, kept.side.size):
        pass
    with _Opened(older.storage, older.directory, node, kept.file.path, kept.file.size):
        pass


class _Opened:
    """A reported file, of the reported size."""

    def __init__(self, storage: Storage, directory: str, node: str, name: str, size: int) -> None:
        path = f"{directory}/{name}"
        if not name.endswith((DATA, ENCODED, SIDE)):
            raise CkptdError(f"node {node} reports a file named {name!r}")
        self.where = storage.locate(path)
        try:
            self.reader = storage.open(path)
        except NotFound as error:
            raise NotFound(f"what node {node} wrote is not here", where=self.where, hint=ADVICE) from error
        if self.reader.size != size:
            found = self.reader.size
            self.reader.close()
            text = f"node {node} wrote {size} bytes, here are {found}"
            raise FileDamage(text, where=self.where, hint=ADVICE)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def _read(reader: FileReader, at: int, nbytes: int) -> bytes:
    if at < 0 or at + nbytes > reader.size:
        raise FileDamage(f"{nbytes} bytes at {at} in a file of {reader.size}")
    data = bytearray(nbytes)
    reader.read_into(at, memoryview(data))
    return bytes(data)
