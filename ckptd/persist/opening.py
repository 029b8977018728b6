"""A checkpoint by the path of its directory, as a person names it."""

from __future__ import annotations

import os

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.storage_root import local_root
from ckptd.persist.names import epoch_of_dir, is_job, step_of_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.factory import storage_at

HINT = "`ckptd ls STORAGE_ROOT` shows what there is; a checkpoint is ROOT/UID/NAME/epoch-NNNNNN/step-NNNNNNNNNN"


def open_at(path: str) -> Checkpoint:
    """Below a storage root it holds a lease against retention, and files that lie in another checkpoint of its job are found; a
    copy anywhere else is opened as it lies. Raises CkptdError: there is none, or its manifest is damaged (FileDamage)."""
    path = os.path.abspath(local_root(path))
    if not os.path.isdir(path):
        raise CkptdError("no such directory", where=path, hint=HINT)
    *above, uid, name, epoch_name, step_name = ("", "", "", "", *path.split(os.sep))
    epoch, step = epoch_of_dir(epoch_name), step_of_dir(step_name)
    if epoch is None or step is None or not is_job(f"{uid}/{name}"):
        return Checkpoint.at(storage_at(path), "")
    root = os.sep.join(above[4:]) or os.sep
    return Checkpoint.open(storage_at(root), f"{uid}/{name}", SnapshotId(epoch, step))
