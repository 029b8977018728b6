"""A checkpoint of another program becomes a job's first epoch, by the writer and the commit that daemons use."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.life import is_grave
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.catalogue import META
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem, build_layout
from ckptd.persist.commit import commit
from ckptd.persist.commits import list_all
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, highest_epoch, newest_record
from ckptd.persist.names import attempt_dir, check_job, epoch_dir, epoch_of_dir
from ckptd.persist.pieces import ObjectBlob, OutChunk
from ckptd.persist.storage.base import Storage
from ckptd.persist.writer import write_chunks

if TYPE_CHECKING:
    from ckptd.imports.optimizers import Named

NODE = "import"  # stands for the node that the only rank lived on
TAKEN = "a job is imported before its first start: name another --job, or `ckptd forget JOB --storage` first"


def write(
    storage: Storage, job: str, step: int, named: Named, progress: Callable[[int, int], None], cancelled: threading.Event
) -> SnapshotId:
    """Raises CkptdError: the job has been started, or anything that storage has against it; then nothing of it is left."""
    number = _free_epoch(storage, job)
    snapshot, attempt = SnapshotId(number, step), f"import-{secrets.token_hex(6)}"
    objects = _encoded(named, step)
    items = [
        LayoutItem(key, stored.dtype, stored.shape, Box.whole(stored.shape), role, UNIQUE, 0)
        for key, (stored, role) in named.tensors.items()
    ]
    layout = build_layout(0, 1, items, sum(len(blob.data) for blob in objects), aliases=list(named.aliases.items()))
    record = EpochRecord(number, secrets.token_hex(16), (NODE,), (), before=(-1, ()))
    try:
        report = write_chunks(
            storage, job, snapshot, attempt, NODE, lambda: (_chunks(named), objects), [0], cancelled, progress
        )
        _claim(storage, job, record)
        commit(storage, job, snapshot, attempt, record, [report], {0: layout}, frozenset(), keep=False)
    except BaseException:
        storage.discard(attempt_dir(job, snapshot, attempt))
        raise
    return snapshot


def own_job(name: str) -> str:
    """``UID/NAME`` as it is; a name alone is this user's."""
    return check_job(name if "/" in name else f"{os.getuid()}/{name}")


def _free_epoch(storage: Storage, job: str) -> int:
    """The one behind all that others took. What imports left that were killed is no start: attempts, or a claim without a
    checkpoint."""
    highest, newest = highest_epoch(storage, job), newest_record(storage, job)
    of_import = newest is None or is_grave(newest) or (newest.ranks == (NODE,) and not newest.nodes)
    if not of_import or list_all(storage, job) or not all(f".{NODE}-" in name for name in _attempts(storage, job)):
        raise CkptdError(f"this job has been started: storage knows epoch {highest} of it", where=job, hint=TAKEN)
    return highest + 1


def _attempts(storage: Storage, job: str) -> list[str]:
    forgotten = forgotten_epoch(storage, job)
    numbers = [number for entry in storage.list(job) if (number := epoch_of_dir(entry.name)) is not None and number > forgotten]
    return [entry.name for number in numbers for entry in storage.list(epoch_dir(job, number))]


def _claim(storage: Storage, job: str, record: EpochRecord) -> None:
    if not claim_epoch(storage, job, record)[0]:
        raise CkptdError("the job was started meanwhile", where=job, hint=TAKEN)


def _chunks(named: Named) -> list[OutChunk]:
    return [
        OutChunk(key, None, stored.dtype, stored.shape, role, Box.whole(stored.shape), stored.places)
        for key, (stored, role) in named.tensors.items()
    ]


def _encoded(named: Named, step: int) -> list[ObjectBlob]:
    from ckptd_client.tree import ForeignType, encode

    told = {META: {"step": step, "meta": named.meta, "contents": {}, "on_device": []}}
    try:
        return [ObjectBlob(0, name, encode(value, name)) for name, value in (named.objects | told).items()]
    except ForeignType as error:
        raise CkptdError(str(error)) from error
