"""A checkpoint, or a storage root, by its path as a person names it. The one place that knows what such a name may be."""

from __future__ import annotations

import os

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root
from ckptd.persist.names import EPOCHS, is_job, place_of
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import NotFound, Storage
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.verify import find_checkpoints

HINT = "`ckptd ls STORAGE_ROOT` shows what there is; a checkpoint is ROOT/UID/NAME/epoch-NNNNNN/step-NNNNNNNNNN"


def root_at(text: str) -> Storage:
    """Raises CkptdError: there is no such directory."""
    root = _place(text)
    place = place_of(root)
    if place is not None:
        hint = f"its root is {place[0]}; `ckptd ls --tensors '*' {root}` shows what is in it"
        raise CkptdError("a checkpoint, and no storage root", where=root, hint=hint)
    above, job = root.rsplit("/", 2)[0], "/".join(root.split("/")[-2:])
    if not in_bucket(root) and is_job(job) and os.path.isdir(f"{root}/{EPOCHS}"):
        raise CkptdError("a job's directory, and no storage root", where=root, hint=f"its root is {above or '/'}")
    if not in_bucket(root) and not os.path.isdir(root):
        raise CkptdError("no such directory", where=root, hint="name a storage root")
    return storage_at(root)


def open_at(text: str) -> Checkpoint:
    """Below a storage root it holds a lease against retention, and files that lie in another checkpoint of its job are found; a
    copy anywhere else is opened as it lies. Raises CkptdError: there is none, there are several, or its manifest is damaged
    (FileDamage)."""
    where = _place(text)
    if not in_bucket(where) and not os.path.isdir(where):
        raise CkptdError("no such directory", where=where, hint=HINT)
    place = place_of(where)
    try:
        if place is not None:
            root, job, snapshot = place
            return Checkpoint.open(storage_at(root), job, snapshot)
        if in_bucket(where):
            root, _, name = where.rpartition("/")
            return Checkpoint.at(storage_at(root), name)
        return Checkpoint.at(storage_at(where), "")
    except NotFound as error:
        below = find_checkpoints(where)
        hint = f"name one of the {len(below)} below it: {below[-1]}" if below else HINT
        raise CkptdError("no checkpoint here", where=where, hint=hint) from error


def _place(text: str) -> str:
    root = storage_root(text)
    return root if in_bucket(root) else os.path.abspath(root)
