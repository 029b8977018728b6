"""A checkpoint of another program becomes a job's first epoch, by the writer and the commit that daemons use. Its attempt is named
after what is imported, so that the same import goes on where it was killed (persist/parts.py)."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

from ckptd.choices import Share
from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.life import is_grave
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.catalogue import META
from ckptd.core.state_map.layout import UNIQUE, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.persist import parts as p
from ckptd.persist.commit import commit
from ckptd.persist.commits import list_all
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, highest_epoch, newest_record
from ckptd.persist.names import (
    PART,
    check_job,
    epoch_dir,
    epoch_of_dir,
    epoch_of_record,
    epochs_dir,
    step_dir,
)
from ckptd.persist.pieces import ObjectBlob, OutChunk
from ckptd.persist.report import REPORT_VERSION
from ckptd.persist.storage.base import NotFound, Storage

if TYPE_CHECKING:
    from ckptd.imports.optimizers import Named

NODE = "import"  # stands for the node that the only rank lived on
COMMITS_WITHIN_S = 60.0  # of its claim; who has not by then was killed, as far as other imports can know
TAKEN = "a job is imported before its first start: name another --job, or `ckptd forget JOB --storage` first"


class Imported(NamedTuple):
    """written, reused: bytes of tensors, by this process and by who wrote parts of the same import before."""

    snapshot: SnapshotId
    written: int
    reused: int


def write(
    storage: Storage,
    job: str,
    step: int,
    named: Named,
    progress: p.Progress,
    cancelled: threading.Event,
    share: Share | None = None,
    *,
    compress: bool = False,
) -> Imported:
    """share: this process's parts alone, and nothing is committed. What an earlier try wrote is read back. Raises CkptdError: the
    job has been started, or anything that storage has against it; the parts that are there stay for the next try."""
    objects, parts = _encoded(named, step), p.parts_of(_chunks(named), NODE)
    plan = _plan(job, step, named, objects, compress)
    attempt = f"{NODE}-{plan[:16]}"
    snapshot = SnapshotId(_epoch(storage, job, attempt), step)
    record = EpochRecord(snapshot.epoch, plan, (NODE,), (), before=(-1, ()))
    made = p.Attempt(storage, job, snapshot, attempt, NODE, cancelled)
    try:
        made.write(parts if share is None else share.among(parts), progress, compress=compress)
        if share is None:
            whole = made.whole(parts, objects)
            _claim(storage, job, record)
            commit(storage, job, snapshot, attempt, record, whole, {0: _layout(named, objects)}, frozenset(), keep=False)
            _check_newest(storage, job, snapshot)
            made.committed()
            _discard_others(storage, job)
    except NotFound as error:
        if list_all(storage, job):
            raise CkptdError("another process has imported the same meanwhile", where=job) from error
        raise
    return Imported(snapshot, made.written, made.reused)


def own_job(name: str) -> str:
    """``UID/NAME`` as it is; a name alone is this user's."""
    return check_job(name if "/" in name else f"{os.getuid()}/{name}")


def _chunks(named: Named) -> list[OutChunk]:
    return [
        OutChunk(key, None, stored.dtype, stored.shape, role, Box.whole(stored.shape), stored.places)
        for key, (stored, role) in named.tensors.items()
    ]


# --- which import this is -------------------------------------------------------------------------------------------
def _plan(job: str, step: int, named: Named, objects: list[ObjectBlob], compress: bool) -> str:
    """What decides the bytes: the files as they are now, and what is taken of them."""
    paths = sorted({place.path for stored, _ in named.tensors.values() for place in stored.places})
    stats = [(os.path.abspath(path), (facts := os.stat(path)).st_size, facts.st_mtime_ns) for path in paths]
    tensors = [(key, role, stored.dtype, stored.shape, stored.places) for key, (stored, role) in named.tensors.items()]
    blobs = [(blob.name, blob.data) for blob in objects]
    how = [REPORT_VERSION, p.PART_BYTES, compress, job, step, stats, tensors, sorted(named.aliases.items()), blobs]
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(how))


def _epoch(storage: Storage, job: str, attempt: str) -> int:
    """The one that imports have begun and none has claimed, or this very one has, or the one behind all that others took. What
    imports left that were killed is no start: attempts, or a claim without a checkpoint."""
    highest, newest, attempts = highest_epoch(storage, job), newest_record(storage, job), _attempts(storage, job)
    of_import = newest is None or is_grave(newest) or _is_imports(newest)
    if not of_import or list_all(storage, job) or not all(map(_is_import, attempts)):
        raise CkptdError(f"this job has been started: storage knows epoch {highest} of it", where=job, hint=TAKEN)
    here = [path for path in attempts if path.startswith(f"{epoch_dir(job, highest)}/")]
    claimed = newest is not None and newest.number == highest
    ours = any(f".{attempt}{PART}" in path for path in here)
    if newest is not None and claimed and not (ours or is_grave(newest)) and _age_s(storage, job, highest) < COMMITS_WITHIN_S:
        hint = f"if it was killed: the same again {COMMITS_WITHIN_S:.0f} s later"
        raise CkptdError("another import of this job is being committed", where=job, hint=hint)
    return highest if ours or (here and not claimed) else highest + 1


def _is_imports(record: EpochRecord) -> bool:
    return record.ranks == (NODE,) and not record.nodes


def _age_s(storage: Storage, job: str, epoch: int) -> float:
    """Of its claim."""
    path = epochs_dir(job)
    claims = [entry.mtime_s for entry in storage.list(path) if epoch_of_record(entry.name) == epoch]
    return storage.clock_s(path) - max(claims, default=-COMMITS_WITHIN_S)


def _check_newest(storage: Storage, job: str, snapshot: SnapshotId) -> None:
    """This one may have stood still between its claim and its commit, for so long that another import took it for dead: two have
    an epoch then, and the older one's checkpoint would be left behind. It goes, and the other one counts."""
    newest = newest_record(storage, job)
    if newest is not None and newest.number > snapshot.epoch and _is_imports(newest):
        pointer = step_dir(job, snapshot)
        if storage.hide(pointer):
            storage.drop(pointer)
        raise CkptdError("another import took the place of this one, which had stood still", where=job, hint=TAKEN)


def _attempts(storage: Storage, job: str) -> list[str]:
    forgotten = forgotten_epoch(storage, job)
    numbers = [number for entry in storage.list(job) if (number := epoch_of_dir(entry.name)) is not None and number > forgotten]
    return [f"{path}/{entry.name}" for path in (epoch_dir(job, number) for number in numbers) for entry in storage.list(path)]


def _discard_others(storage: Storage, job: str) -> None:
    """Imports that were begun otherwise and given up."""
    for path in _attempts(storage, job):
        if path.endswith(PART) and _is_import(path):
            storage.discard(path)


def _is_import(path: str) -> bool:
    return f".{NODE}-" in path


def _claim(storage: Storage, job: str, record: EpochRecord) -> None:
    if not claim_epoch(storage, job, record)[0]:
        raise CkptdError("the job was started meanwhile", where=job, hint=TAKEN)


# --- what it consists of --------------------------------------------------------------------------------------------
def _layout(named: Named, objects: list[ObjectBlob]) -> Layout:
    items = [
        LayoutItem(key, stored.dtype, stored.shape, Box.whole(stored.shape), role, UNIQUE, 0)
        for key, (stored, role) in named.tensors.items()
    ]
    return build_layout(0, 1, items, sum(len(blob.data) for blob in objects), aliases=list(named.aliases.items()))


def _encoded(named: Named, step: int) -> list[ObjectBlob]:
    from ckptd_client.tree import ForeignType, encode

    told = {META: {"step": step, "meta": named.meta, "contents": {}, "on_device": []}}
    try:
        return [ObjectBlob(0, name, encode(value, name)) for name, value in (named.objects | told).items()]
    except ForeignType as error:
        raise CkptdError(str(error)) from error
