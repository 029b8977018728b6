"""A checkpoint, or a storage root, by its path as a person names it. The one place that knows what such a name may be."""

from __future__ import annotations

import os
from contextlib import suppress

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root
from ckptd.persist.consolidated import problems_in
from ckptd.persist.names import DAMAGED, EPOCHS, MANIFEST, is_aside, is_job, place_of, step_dir
from ckptd.persist.preflight import is_probe
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import NotFound, Sight, Storage, StorageError
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.verify import Progress, VerifyReport, mark_report, verify_at

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
    storage, directory = _below(where)
    place = place_of(where)
    try:
        if place is not None:
            _, job, snapshot = place
            return Checkpoint.open(storage, job, snapshot)
        return Checkpoint.at(storage, directory)
    except NotFound as error:
        below = find_checkpoints(where)
        hint = f"name one of the {len(below)} below it: {below[-1]}" if below else HINT
        raise CkptdError("no checkpoint here", where=where, hint=hint) from error


def verify(text: str, progress: Progress | None = None) -> VerifyReport:
    """Read the checkpoint of this path back. Below a storage root where this user may write a mark says from then on that it is
    damaged, or no more. Raises CkptdError: there is no such directory."""
    where = _place(text)
    storage, directory = _below(where)
    report = verify_at(storage, directory, progress)
    if in_bucket(where):
        report.place = storage.locate(directory)
    if place_of(where) is not None:
        mark_report(storage, directory, report)
        if report.ok:
            with suppress(StorageError):
                storage.unmark(directory, DAMAGED)
    report.problems += problems_in(storage, directory, report)  # of what was made from it: it is none the worse for them
    return report


def find_checkpoints(path: str) -> list[str]:
    """Directories with a manifest at ``path`` or below, sorted: what `ckptd verify PATH` goes through."""
    if in_bucket(path):
        return _in_bucket(path)
    found = []
    for where, below, names in os.walk(path):
        # What a killed preflight or commit left under a name of its own is no checkpoint.
        below[:] = [name for name in below if not (is_aside(name) or is_probe(where, name))]
        if MANIFEST in names:  # what lies inside is part of it
            found.append(where)
            below.clear()
    return sorted(found)


def _in_bucket(root: str) -> list[str]:
    above, _, name = root.rpartition("/")
    if not above.endswith(":/"):  # it may be a checkpoint itself
        with suppress(NotFound):
            storage_at(above).open(f"{name}/{MANIFEST}").close()
            return [root]
    storage, found, left = storage_at(root), [], [""]
    while left:
        path = left.pop()
        shown = [pointer.name for pointer in storage.pointers(path) if pointer.sight is Sight.SHOWN]
        found += [f"{root}/{path}/{name}" if path else f"{root}/{name}" for name in shown]
        below = [entry.name for entry in storage.list(path) if entry.is_dir and not is_aside(entry.name)]
        left += [f"{path}/{name}" if path else name for name in below if name not in shown and not is_probe(path, name)]
    return sorted(found)


def _below(where: str) -> tuple[Storage, str]:
    """A storage, and the checkpoint's directory below it: where it can be, the root, as files may lie in another checkpoint."""
    if not in_bucket(where) and not os.path.isdir(where):
        raise CkptdError("no such directory", where=where, hint=HINT)
    place = place_of(where)
    if place is not None:
        root, job, snapshot = place
        return storage_at(root), step_dir(job, snapshot)
    if in_bucket(where):
        root, _, name = where.rpartition("/")
        return storage_at(root), name
    return storage_at(where), ""


def _place(text: str) -> str:
    root = storage_root(text)
    return root if in_bucket(root) else os.path.abspath(root)
