"""The contract kept by a tree of files: a commit is a directory that gets its name, hiding is the manifest's rename (design D13).

An attempt is a directory; its files end in ``.part`` until the commit, so that a stock reader never takes one for a checkpoint's.
The order of renames and syncs is what a power cut can be read back from; a backend gives the single steps.
"""

from __future__ import annotations

import errno
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from ckptd.core.failpoint import failpoint
from ckptd.persist.names import GONE, MANIFEST, PART, PROBE_DIR
from ckptd.persist.storage.base import Entry, FileReader, FileWriter, NotFound, Pointer, Sight, StorageError

HIDDEN = "manifest.gone"  # what the manifest is called while its checkpoint is hidden ...
DROPPED = "manifest.dropped"  # ... and from when the checkpoint cannot come back any more
COMMITTERS_MAX = 4  # of one attempt at once: a steward that stood still, and its successors
_SIGHTS = {MANIFEST: Sight.SHOWN, HIDDEN: Sight.HIDDEN, DROPPED: Sight.DROPPED}


class TreeStorage(ABC):
    """Storage but for ``locate``, ``free_bytes`` and ``clock_s``. Subclasses give the steps."""

    identity = ""
    needs = "ckptd needs a file system with hard links and exclusive renames (local disk, NFS, Lustre, CephFS)"

    # --- the steps ----------------------------------------------------------------------------------------------
    @abstractmethod
    def make_dir(self, path: str) -> None:
        """Create it and its parents, each durable in its own parent. Existing ones are fine."""

    @abstractmethod
    def create(self, path: str) -> FileWriter:
        """A new file in an existing directory; its entry there is not durable yet."""

    @abstractmethod
    def publish(self, source: str, target: str) -> bool:
        """Give a finished file another name, exclusively, and drop the old one. False: the name was taken."""

    @abstractmethod
    def move_file(self, source: str, target: str) -> None:
        """Rename a file in one step; what had that name is gone. Nothing happens when both names are one file's."""

    @abstractmethod
    def move_dir(self, source: str, target: str) -> bool:
        """Rename a directory in one step. False: a directory that is not empty has that name already."""

    @abstractmethod
    def sync_dir(self, path: str) -> None:
        """Make the directory's entries durable. Raises SyncFailed."""

    @abstractmethod
    def open_file(self, path: str) -> FileReader:
        """A file of this very name."""

    @abstractmethod
    def entries(self, path: str) -> list[Entry]:
        """Of a directory, by name."""

    @abstractmethod
    def inside(self, path: str) -> tuple[list[str], float]:
        """The names of a directory's files, none of which is looked at, and when last one came, went or got another name."""

    @abstractmethod
    def unlink(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Remove a directory and all below it; a missing one is fine."""

    # --- small files and what is there --------------------------------------------------------------------------
    def begin(self, path: str) -> None:
        self.make_dir(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        done = self._put_small(path, data)
        if done:
            self.sync_dir(_above(path))
        return done

    def _put_small(self, path: str, data: bytes) -> bool:
        """Its entry in the directory is not durable yet."""
        part = f"{path}.{secrets.token_hex(8)}{PART}"
        writer = self.create(part)
        try:
            writer.write(data)
            writer.finish()
        except BaseException:
            writer.abort()
            self.unlink(part)
            raise
        if self.publish(part, path):
            return True
        self.unlink(part)
        return False

    def list(self, path: str) -> list[Entry]:
        try:
            return self.entries(path)
        except NotFound:
            return []

    def open(self, path: str) -> FileReader:
        if _above(path).endswith(PART):
            with suppress(NotFound):
                return self.open_file(f"{path}{PART}")
        return self.open_file(path)

    def delete(self, path: str) -> None:
        self.unlink(path)
        if _above(path).endswith(PART):
            self.unlink(f"{path}{PART}")

    def discard(self, path: str) -> None:
        if not path.endswith(PART):
            self.delete_tree(path)
            return
        with suppress(NotFound):  # it was committed meanwhile, or is gone: of two renames one wins
            self._delete_renamed(path)

    def secure(self, *paths: str) -> None:
        """The directories and all above them."""
        wanted = {""}
        for path in paths:
            while path:
                wanted.add(path)
                path = _above(path)
        for path in sorted(wanted, reverse=True):  # what is inside first
            self.sync_dir(path)

    def sweep(self, path: str, before_s: float) -> None:
        for entry in self.list(path):
            if entry.is_dir and entry.name.endswith(GONE):
                self._delete_gone(f"{path}/{entry.name}")
            elif not entry.is_dir and entry.name.endswith(PART) and entry.mtime_s <= before_s:
                self.unlink(f"{path}/{entry.name}")

    # --- a checkpoint -------------------------------------------------------------------------------------------
    def put(self, path: str) -> FileWriter:
        return _Put(self, self.create(f"{path}{PART}"), _above(path))

    def commit_if_absent(
        self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]
    ) -> bool:
        for name in names:
            self._give_final_name(f"{attempt}/{name}")
        failpoint(_of_a_checkpoint(pointer, "persist.commit.named"))
        for entry in self.entries(
            attempt
        ):  # a repeated or failed write's, which must not appear with the rest
            if entry.name not in {*names, *beside} and not entry.is_dir:
                self.unlink(f"{attempt}/{entry.name}")
        for name in beside.keys() - {MANIFEST}:
            self._put_unless_swept(f"{attempt}/{name}", beside[name])
        self.sync_dir(attempt)
        failpoint(_of_a_checkpoint(pointer, "persist.commit.synced"))
        self._put_unless_swept(f"{attempt}/{MANIFEST}", beside[MANIFEST])
        failpoint(_of_a_checkpoint(pointer, "persist.commit.manifest"))
        self.sync_dir(attempt)
        self.sync_dir(_above(pointer))
        failpoint(_of_a_checkpoint(pointer, "persist.commit.complete"))
        if not self.move_dir(attempt, pointer):
            return False
        failpoint(_of_a_checkpoint(pointer, "persist.commit.visible"))
        self.secure(_above(pointer))
        return True

    def _give_final_name(self, path: str) -> None:
        try:
            if not self.publish(f"{path}{PART}", path):  # an earlier committer died between link and unlink
                self.unlink(f"{path}{PART}")
        except NotFound:  # an earlier committer was here
            self.open_file(path).close()

    def _put_unless_swept(self, path: str, data: bytes) -> None:
        """Another committer of the attempt may sweep it while it is unfinished. Each sweeps once, and whoever was swept only
        writes again: sweeping again, they could go on so for ever."""
        for _ in range(COMMITTERS_MAX - 1):
            with suppress(NotFound):
                self._put_small(path, data)
                return
        self._put_small(path, data)

    def place(self, pointer: str) -> str:
        self.inside(pointer)
        return pointer

    def pointers(self, path: str) -> Sequence[Pointer]:
        found = []
        for entry in self.list(path):
            if entry.is_dir and not entry.name.endswith((PART, GONE)):
                with suppress(NotFound):
                    names, changed_s = self.inside(f"{path}/{entry.name}")
                    sight = next((sight for name, sight in _SIGHTS.items() if name in names), None)
                    if sight is not None:
                        marks = frozenset(name for name in names if "." not in name)
                        found.append(Pointer(entry.name, sight, marks, None if sight is Sight.SHOWN else changed_s))
        return found

    def mark(self, pointer: str, name: str, data: bytes) -> None:
        self.put_if_absent(f"{pointer}/{name}", data)

    def unmark(self, pointer: str, name: str) -> bool:
        had = name in self.inside(pointer)[0]
        if had:
            self.unlink(f"{pointer}/{name}")
        self.sync_dir(pointer)  # whoever removed it before may have died in between
        return had

    def hide(self, pointer: str) -> bool:
        shown, hidden = f"{pointer}/{MANIFEST}", f"{pointer}/{HIDDEN}"
        try:
            self.move_file(shown, hidden)
            if MANIFEST in self.inside(pointer)[0]:
                self._finish_link(shown, hidden)
            self.sync_dir(pointer)
        except NotFound:
            return False
        return True

    def _finish_link(self, shown: str, hidden: str) -> None:
        """Earlier versions hid by link and unlink. One that died in between left one file under both names, and renaming one of
        them to the other does nothing. Renamed aside first, the file never loses its last name."""
        aside = f"{shown}.{secrets.token_hex(8)}{PART}"
        self.move_file(shown, aside)
        self.move_file(aside, hidden)
        self.unlink(aside)

    def reveal(self, pointer: str) -> bool:
        try:
            self.move_file(f"{pointer}/{HIDDEN}", f"{pointer}/{MANIFEST}")
            self.sync_dir(pointer)
        except NotFound:
            return False
        return True

    def drop(self, pointer: str) -> bool:
        try:
            self.move_file(f"{pointer}/{HIDDEN}", f"{pointer}/{DROPPED}")
        except NotFound:
            if not any(entry.name == DROPPED for entry in self.list(pointer)):
                return False
        self._delete_renamed(pointer)
        return True

    def _delete_renamed(self, path: str) -> None:
        gone = f"{path}.{secrets.token_hex(4)}{GONE}"
        if self.move_dir(path, gone):  # in one step, so that neither a stock reader nor a commit meets half of it
            self.sync_dir(_above(path))
            failpoint(_of_a_checkpoint(path, "persist.retain.moved"))
            self._delete_gone(gone)

    def _delete_gone(self, gone: str) -> None:
        """NFS keeps what somebody on this node has open, under a name of its own (``.nfs...``): a later sweep deletes that."""
        try:
            self.delete_tree(gone)
        except StorageError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                raise


class _Put:
    """A file of an attempt; its entry in the directory is durable, too, when it is finished."""

    def __init__(self, tree: TreeStorage, out: FileWriter, directory: str) -> None:
        self._tree, self._out, self._directory = tree, out, directory
        self.space, self.advance, self.write, self.abort = out.space, out.advance, out.write, out.abort

    @property
    def position(self) -> int:
        return self._out.position

    def finish(self) -> int:
        size = self._out.finish()
        self._tree.sync_dir(self._directory)
        return size


def _of_a_checkpoint(pointer: str, name: str) -> str:
    """A storage that is probed goes the same way, with each daemon's start: who arms a failpoint means a checkpoint of a job."""
    return "" if pointer.startswith(f"{PROBE_DIR}/") else name


def _above(path: str) -> str:
    return path.rpartition("/")[0]
