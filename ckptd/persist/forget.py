"""All that storage has of one job goes, by the operator's order (D19).

The claim of a grave is the order: from then on nothing before it counts (persist/commits.py), and the job begins anew. Whoever dies
before all is deleted leaves the rest to the next one: to the same order given again, to the steward that reads storage next, and to
each pass of retention.
"""

from __future__ import annotations

import secrets

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.protocol.life import grave
from ckptd.persist.commits import list_epochs, list_pointers
from ckptd.persist.lineage import claim_epoch, forgotten_epoch, highest_epoch
from ckptd.persist.names import (
    epoch_dir,
    epoch_of_record,
    epochs_dir,
    record_path,
    released_dir,
    released_of,
    step_dir,
)
from ckptd.persist.storage.base import Storage

CLAIMS_MAX = 16  # numbers that other starts take before ours


def forget_on_storage(storage: Storage, job: str, epoch: int) -> tuple[int, int]:
    """(the epoch that stands for the order, checkpoints deleted). ``epoch``: the highest that nodes know. Raises StorageError,
    CkptdError: it may be repeated.

    The claim comes first: a node that was away with an older epoch commits nothing any more.
    """
    failpoint("persist.forget.asked")
    number = _claim(storage, job, epoch)
    failpoint("persist.forget.claimed")
    return number, len(delete_forgotten(storage, job))


def delete_forgotten(storage: Storage, job: str) -> list[str]:
    """What is older than the newest grave goes: first what readers look for, then the bytes. The places of the checkpoints that
    were still to be seen. Nothing of a start after the grave is touched. Raises StorageError."""
    forgotten = forgotten_epoch(storage, job)
    standing = [step_dir(job, snapshot) for snapshot, _ in list_pointers(storage, job) if snapshot.epoch < forgotten]
    shown = [storage.locate(pointer) for pointer in standing if storage.hide(pointer)]
    if shown:
        failpoint("persist.forget.hidden")
    for pointer in standing:
        storage.drop(pointer)
        failpoint("persist.forget.dropped")
    for entry in storage.list(released_dir(job)):
        noted = released_of(entry.name)
        if noted is not None and noted.epoch < forgotten:
            storage.delete(f"{released_dir(job)}/{entry.name}")
    written = [epoch for epoch in list_epochs(storage, job) if epoch < forgotten]
    for epoch in written:
        storage.discard(epoch_dir(job, epoch))
    claims = [epoch_of_record(entry.name) for entry in storage.list(epochs_dir(job))]
    old = [claimed for claimed in claims if claimed is not None and claimed < forgotten]
    for claimed in old:
        storage.delete(record_path(job, claimed))
    if old or written:
        storage.secure(epochs_dir(job))
    return shown


def _claim(storage: Storage, job: str, epoch: int) -> int:
    nonce = f"forgotten-{secrets.token_hex(8)}"
    for _ in range(CLAIMS_MAX):
        number = 1 + max(epoch, highest_epoch(storage, job))
        if claim_epoch(storage, job, grave(number, nonce))[0]:
            return number
    raise CkptdError("starts of the job take every epoch number", where=job, hint="stop them, then forget it")
