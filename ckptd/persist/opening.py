"""A checkpoint by the path of its directory, as a person names it. The one place that knows what such a name may be."""

from __future__ import annotations

from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.storage_root import local_root
from ckptd.persist.names import MANIFEST, epoch_of_dir, is_job, step_of_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.verify import find_checkpoints

HINT = "`ckptd ls STORAGE_ROOT` shows what there is; a checkpoint is ROOT/UID/NAME/epoch-NNNNNN/step-NNNNNNNNNN"


def open_at(path: str) -> Checkpoint:
    """Below a storage root it holds a lease against retention, and files that lie in another checkpoint of its job are found; a
    copy anywhere else is opened as it lies. Raises CkptdError: there is none, there are several, or its manifest is damaged
    (FileDamage)."""
    where = Path(local_root(path)).absolute()
    if not where.is_dir():
        raise CkptdError("no such directory", where=str(where), hint=HINT)
    if not (where / MANIFEST).is_file():
        below = find_checkpoints(str(where))
        hint = f"name one of the {len(below)} below it: {below[-1]}" if below else HINT
        raise CkptdError("no checkpoint here", where=str(where), hint=hint)
    epoch, step = epoch_of_dir(where.parent.name), step_of_dir(where.name)
    job = "/".join(where.parts[-4:-2])
    if epoch is None or step is None or not is_job(job):
        return Checkpoint.at(storage_at(str(where)), "")
    return Checkpoint.open(storage_at(str(where.parents[3])), job, SnapshotId(epoch, step))
