"""All that storage has of one job goes, by the operator's order (D19)."""

from __future__ import annotations

import secrets

from ckptd.core.errors import CkptdError
from ckptd.core.life import grave
from ckptd.persist.commits import list_epochs, list_pointers
from ckptd.persist.lineage import claim_epoch, highest_epoch
from ckptd.persist.names import epoch_dir, epoch_of_record, epochs_dir, record_path, step_dir
from ckptd.persist.storage.base import Storage

CLAIMS_MAX = 16  # numbers that other starts take before ours


def forget_on_storage(storage: Storage, job: str, epoch: int) -> tuple[int, int]:
    """(the epoch that stands for the order, checkpoints deleted). ``epoch``: the highest that nodes know.

    The claim comes first: a node that was away with an older epoch commits nothing any more. Then what readers look for, then
    the bytes. It may be repeated after a death in its middle. Raises StorageError, CkptdError: the job begins anew.
    """
    number = _claim(storage, job, epoch)
    standing = [step_dir(job, snapshot) for snapshot, _ in list_pointers(storage, job)]
    shown = [pointer for pointer in standing if storage.hide(pointer)]
    for pointer in standing:
        storage.drop(pointer)
    for written in list_epochs(storage, job):
        storage.discard(epoch_dir(job, written))
    for entry in storage.list(epochs_dir(job)):
        claimed = epoch_of_record(entry.name)
        if claimed is not None and claimed < number:
            storage.delete(record_path(job, claimed))
    storage.secure(epochs_dir(job))
    return number, len(shown)


def _claim(storage: Storage, job: str, epoch: int) -> int:
    nonce = f"forgotten-{secrets.token_hex(8)}"
    for _ in range(CLAIMS_MAX):
        number = 1 + max(epoch, highest_epoch(storage, job))
        if claim_epoch(storage, job, grave(number, nonce))[0]:
            return number
    raise CkptdError("starts of the job take every epoch number", where=job, hint="stop them, then forget it")
