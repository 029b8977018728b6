"""A committed checkpoint in sight, out of sight, or on its way out: one rename each, so that of two who disagree one wins.

Only what is hidden can be dropped, and dropping takes the very name that ``reveal`` would bring back: nobody finds a
checkpoint that somebody else is deleting.
"""

from __future__ import annotations

import secrets

from ckptd.core.failpoint import failpoint
from ckptd.persist.names import DROPPED, HIDDEN_MANIFEST, MANIFEST, RETIRED, gone_dir
from ckptd.persist.storage.base import NotFound, Storage, list_or_empty, put_file


def hide(storage: Storage, pointer: str) -> bool:
    """No reader opens it any more; those who have it open read on. False: it is not in sight."""
    shown, hidden = f"{pointer}/{MANIFEST}", f"{pointer}/{HIDDEN_MANIFEST}"
    try:
        storage.delete(f"{pointer}/{RETIRED}")  # of a pass that died before it hid the manifest
        put_file(storage, f"{pointer}/{RETIRED}", b"")  # its age is the grace time
        storage.move_file(shown, hidden)
        if any(entry.name == MANIFEST for entry in storage.list(pointer)):
            _finish_link(storage, shown, hidden)
        storage.sync_dir(pointer)
    except NotFound:
        return False
    return True


def reveal(storage: Storage, pointer: str) -> bool:
    """The opposite of ``hide``, durable. False: it is not hidden."""
    try:
        storage.move_file(f"{pointer}/{HIDDEN_MANIFEST}", f"{pointer}/{MANIFEST}")
        storage.delete(f"{pointer}/{RETIRED}")
        storage.sync_dir(pointer)
    except NotFound:
        return False
    return True


def drop(storage: Storage, pointer: str) -> bool:
    """Delete a hidden checkpoint, for ever. False: it is not hidden any more. May be repeated after a death in its middle."""
    try:
        storage.move_file(f"{pointer}/{HIDDEN_MANIFEST}", f"{pointer}/{DROPPED}")
    except NotFound:
        if not any(entry.name == DROPPED for entry in list_or_empty(storage, pointer)):
            return False
    gone = gone_dir(pointer, secrets.token_hex(4))
    if storage.move_dir(pointer, gone):  # in one step, so that no stock reader meets half of it
        storage.sync_dir(pointer.rpartition("/")[0])
        failpoint("persist.retain.moved")
        storage.delete_tree(gone)
    return True


def _finish_link(storage: Storage, shown: str, hidden: str) -> None:
    """Earlier versions hid by link and unlink. One that died in between left one file under both names, and renaming one of
    them to the other does nothing. Renamed aside first, the file never loses its last name."""
    aside = f"{shown}.{secrets.token_hex(8)}.part"
    storage.move_file(shown, aside)
    storage.move_file(aside, hidden)
    storage.delete(aside)
