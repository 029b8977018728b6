"""The commit: checked files get their final names, the manifest is written last, then the whole directory appears (D13).

Up to the rename nothing is visible; after it everything is. Every step can be repeated, by this committer or by
another one of the same attempt. Whoever renames first has committed the snapshot; a later attempt deletes its own files.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.layout import Layout
from ckptd.persist import manifest as m
from ckptd.persist import report as r
from ckptd.persist.assemble import assemble
from ckptd.persist.names import DATA, KEEP, MANIFEST, PART, SIDE, attempt_dir, epoch_dir, gone_dir, step_dir
from ckptd.persist.side import check_side
from ckptd.persist.storage.base import (
    FileReader,
    NotFound,
    Storage,
    StorageError,
    put_file,
    read_file,
    sync_above,
)
from ckptd.persist.sums import FileDamage, digest

COMMIT_TURNS = 4  # beside another committer of the same attempt
COMMITTERS_MAX = 4  # of one attempt at once: a steward that stood still, and its successors
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
    directory = attempt_dir(job, snapshot, attempt)
    if not _committed(storage, job, snapshot):
        decoded = [r.decode(report) for report in reports]
        manifest = assemble(job, snapshot, attempt, record, decoded, layouts, per_rank, keep)
        for turn in range(COMMIT_TURNS):
            try:
                _publish(storage, job, snapshot, directory, decoded, manifest)
                break
            except NotFound:
                # A second committer of this attempt has renamed it under our hands, or swept our unfinished manifest.
                if _committed(storage, job, snapshot):
                    break
                if turn == COMMIT_TURNS - 1:
                    raise
        failpoint("persist.commit.visible")
    if keep:  # the other attempt may not have known
        put_file(storage, f"{step_dir(job, snapshot)}/{KEEP}", b"")
        storage.sync_dir(step_dir(job, snapshot))
    sync_above(storage, epoch_dir(job, snapshot.epoch))
    storage.delete_tree(directory)
    failpoint("persist.commit.done")


def _publish(
    storage: Storage,
    job: str,
    snapshot: SnapshotId,
    directory: str,
    reports: Sequence[r.Report],
    manifest: m.Manifest,
) -> None:
    _complete(storage, directory, reports, manifest)
    storage.sync_dir(epoch_dir(job, snapshot.epoch))
    failpoint("persist.commit.complete")
    if not storage.move_dir(directory, step_dir(job, snapshot)) and not _committed(storage, job, snapshot):
        hint = "it may be a checkpoint that retention is deleting"
        raise StorageError("a directory stands in the way", where=storage.locate(directory), hint=hint)


def _committed(storage: Storage, job: str, snapshot: SnapshotId) -> bool:
    """Is there a checkpoint of that name with an intact manifest? A damaged one is put aside: it is worth nothing."""
    path = f"{step_dir(job, snapshot)}/{MANIFEST}"
    try:
        data = read_file(storage, path, m.MANIFEST_BYTES_MAX)
        m.decode(data, storage.locate(path))
    except NotFound:
        return False
    except FileDamage:
        return not storage.move_dir(
            step_dir(job, snapshot), gone_dir(step_dir(job, snapshot), secrets.token_hex(4))
        )
    return True


def _complete(storage: Storage, directory: str, reports: Sequence[r.Report], manifest: m.Manifest) -> None:
    """The attempt's directory as it shall appear: checked files under final names, the manifest, nothing else."""
    for report in reports:
        _check_report(storage, directory, report)
    failpoint("persist.commit.checked")
    names = [file.path for file in manifest.files] + [side.path for side in manifest.sides]
    for name in names:
        _give_final_name(storage, f"{directory}/{name}")
    failpoint("persist.commit.named")
    _drop_strangers(storage, directory, {*names, MANIFEST, KEEP})
    if manifest.keep:
        _put(storage, f"{directory}/{KEEP}", b"")
    storage.sync_dir(directory)
    failpoint("persist.commit.synced")
    _put(storage, f"{directory}/{MANIFEST}", m.encode(manifest))
    failpoint("persist.commit.manifest")
    storage.sync_dir(directory)


def _put(storage: Storage, path: str, data: bytes) -> None:
    """Another committer may sweep it while it is unfinished. Each sweeps once, and whoever was swept only writes again: sweeping
    again, they could go on so for ever."""
    for _ in range(COMMITTERS_MAX - 1):
        with suppress(NotFound):
            put_file(storage, path, data)
            return
    put_file(storage, path, data)


def _check_report(storage: Storage, directory: str, report: r.Report) -> None:
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


class _Opened:
    """A reported file under its first or its final name, of the reported size."""

    def __init__(self, storage: Storage, directory: str, node: str, name: str, size: int) -> None:
        if not name.endswith((DATA, SIDE)):
            raise CkptdError(f"node {node} reports a file named {name!r}")
        self.where = storage.locate(f"{directory}/{name}")
        self.reader = self._open(storage, f"{directory}/{name}", node)
        if self.reader.size != size:
            found = self.reader.size
            self.reader.close()
            raise FileDamage(
                f"node {node} wrote {size} bytes, here are {found}", where=self.where, hint=ADVICE
            )

    @staticmethod
    def _open(storage: Storage, path: str, node: str) -> FileReader:
        try:
            return storage.open(f"{path}{PART}")
        except NotFound:
            pass
        try:
            return storage.open(path)
        except NotFound as error:
            text = f"what node {node} wrote is not here"
            raise NotFound(text, where=storage.locate(path), hint=ADVICE) from error

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


def _give_final_name(storage: Storage, path: str) -> None:
    try:
        if not storage.publish(f"{path}{PART}", path):  # an earlier committer died between link and unlink
            storage.delete(f"{path}{PART}")
    except NotFound:  # an earlier committer was here
        storage.open(path).close()


def _drop_strangers(storage: Storage, directory: str, wanted: set[str]) -> None:
    """Files of a repeated or failed write of this attempt must not appear with the rest."""
    for entry in storage.list(directory):
        if entry.name not in wanted and not entry.is_dir:
            storage.delete(f"{directory}/{entry.name}")
