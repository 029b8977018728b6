"""What is exported: a path, as people name it, becomes an open checkpoint. The one place that knows what such a name may be."""

from __future__ import annotations

from pathlib import Path

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.core.storage_root import local_root
from ckptd.persist.names import MANIFEST, epoch_of_dir, is_job, step_of_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.verify import find_checkpoints


def open_source(source: str) -> Checkpoint:
    """Below a storage root it holds a lease against retention, and finds files that lie in other checkpoints of the job. Raises
    CkptdError: nothing there, several, damaged, of a newer version."""
    path = Path(local_root(source)).absolute()
    if not path.is_dir():
        raise CkptdError("no such directory", where=str(path), hint="`ckptd ls STORAGE_ROOT` shows what there is")
    if not (path / MANIFEST).is_file():
        below = find_checkpoints(str(path))
        hint = f"name one of the {len(below)} below it: {below[-1]}" if below else "`ckptd ls STORAGE_ROOT` shows what there is"
        raise CkptdError("no checkpoint here", where=str(path), hint=hint)
    epoch, step = epoch_of_dir(path.parent.name), step_of_dir(path.name)
    job = "/".join(path.parts[-4:-2])
    if epoch is None or step is None or not is_job(job):
        return Checkpoint.at(storage_at(str(path)), "")
    return Checkpoint.open(storage_at(str(path.parents[3])), job, SnapshotId(epoch, step))
