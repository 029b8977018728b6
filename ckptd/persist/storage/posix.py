"""A POSIX directory as storage: local disk, NFS, Lustre (design D13).

Every operation starts at the root's path and walks down by dir_fd without following links, so that nobody who can write
below the root can lead the daemon elsewhere, and a root that was moved away or unmounted is noticed: its marker is gone, or has
another identity.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptd.directory import make_directories
from ckptd.persist.names import PART
from ckptd.persist.storage.base import AWAY, Entry, StorageError, is_name, split_path, storage_error
from ckptd.persist.storage.posix_file import PosixReader, PosixWriter, ScratchPool, sync_entries
from ckptd.persist.storage.tree import TreeStorage

MARKER = ".ckptd-root"
IDENTITY_BYTES = 16  # random, written as hex digits; of roots that were made before there were identities the marker is empty
AWAY_HINT = "is it mounted? daemons go on as soon as it is back"
DIR_MODE = 0o700  # a job's state is its user's alone (P13)
FILE_MODE = 0o600
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a planted FIFO must not hang us


class PosixStorage(TreeStorage):
    """create: make ``root`` and its marker if need be. marked: insist on the marker at every operation (default: as
    ``create``; without it any directory is taken as it is). identity: what the marker must say ("": what it says when it is
    first seen). if_new: what to do if it is to be another one from now on. direct: try O_DIRECT. chown: give what is created
    below ``<root>/<uid>`` to that uid (default: when we are root), so that users can read their checkpoints with stock tools.
    """

    def __init__(
        self,
        root: str,
        *,
        create: bool = True,
        marked: bool | None = None,
        identity: str = "",
        if_new: str = "",
        direct: bool = True,
        chown: bool | None = None,
    ) -> None:
        self.root = os.path.abspath(root)
        self._direct = direct
        self._marked = create if marked is None else marked
        self.identity = identity
        self._away_hint = f"{AWAY_HINT}; {if_new}" if if_new else AWAY_HINT
        self._seen: tuple[int, int, int] | None = None  # device, inode and time of the marker that was read last
        self._chown = os.geteuid() == 0 if chown is None else chown
        self._scratch = ScratchPool()
        if create:
            with self._mapped("create the storage root", ""):
                self._create_root()

    def locate(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def make_dir(self, path: str) -> None:
        with self._mapped("create the directory", path), self._at("") as root:
            fd = os.dup(root)
            for name in split_path(path):
                fd = self._step_in(fd, name, path)
            os.close(fd)

    def create(self, path: str) -> PosixWriter:
        with self._mapped("create the file", path), self._parent(path) as (fd, name):
            file = os.open(name, _NEW, FILE_MODE, dir_fd=fd)
            try:
                self._give(file, path)
                return PosixWriter(file, self.locate(path), self._scratch, direct=self._direct)
            except BaseException:
                os.close(file)
                raise

    def publish(self, source: str, target: str) -> bool:
        with (
            self._mapped("publish the file", target),
            self._parent(source) as (source_fd, source_name),
            self._parent(target) as (target_fd, target_name),
        ):
            try:
                os.link(
                    source_name,
                    target_name,
                    src_dir_fd=source_fd,
                    dst_dir_fd=target_fd,
                    follow_symlinks=False,
                )
            except FileExistsError:
                return False
            os.unlink(source_name, dir_fd=source_fd)
            return True

    def move_file(self, source: str, target: str) -> None:
        with (
            self._mapped("rename the file", target),
            self._parent(source) as (source_fd, source_name),
            self._parent(target) as (target_fd, target_name),
        ):
            os.rename(source_name, target_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def move_dir(self, source: str, target: str) -> bool:
        with (
            self._mapped("rename the directory", target),
            self._parent(source) as (source_fd, source_name),
            self._parent(target) as (target_fd, target_name),
        ):
            try:
                os.rename(source_name, target_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    return False
                raise
            return True

    def sync_dir(self, path: str) -> None:
        with self._mapped("open the directory", path), self._at(path) as fd:
            sync_entries(fd, self.locate(path))

    def open_file(self, path: str) -> PosixReader:
        with self._mapped("open the file", path), self._parent(path) as (fd, name):
            file = os.open(name, _READ, dir_fd=fd)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise StorageError("not a plain file", where=self.locate(path))
                return PosixReader(file, self.locate(path))
            except BaseException:
                os.close(file)
                raise

    def entries(self, path: str) -> list[Entry]:
        with self._mapped("list the directory", path), self._at(path) as fd, os.scandir(fd) as found:
            entries = [entry for item in found if (entry := _entry(item)) is not None]
        return sorted(entries, key=lambda entry: entry.name)

    def inside(self, path: str) -> tuple[list[str], float]:
        with self._mapped("list the directory", path), self._at(path) as fd, os.scandir(fd) as found:
            names = [item.name for item in found if item.is_file(follow_symlinks=False)]
            return names, os.fstat(fd).st_mtime

    def unlink(self, path: str) -> None:
        with (
            self._mapped("delete the file", path),
            suppress(FileNotFoundError),
            self._parent(path) as (fd, name),
        ):
            os.unlink(name, dir_fd=fd)

    def delete_tree(self, path: str) -> None:
        with (
            self._mapped("delete the directory", path),
            suppress(FileNotFoundError),
            self._parent(path) as (fd, name),
        ):
            _delete_below(fd, name)

    def free_bytes(self) -> int:
        with self._mapped("ask for free space", ""), self._at("") as fd:
            facts = os.fstatvfs(fd)
            return facts.f_bavail * facts.f_frsize

    def clock_s(self, path: str) -> float:
        """Whoever keeps the directory stamps it anew: a file made for that would need room, and might not be listed at once."""
        with self._mapped("ask for the time", path), self._at(path) as fd:
            os.utime(fd)
            return os.fstat(fd).st_mtime

    # --- walking ----------------------------------------------------------------------------------------------
    def _create_root(self) -> None:
        if not os.path.isdir(self.root):
            if os.path.lexists(self.root):
                hint = "name a directory, or move away what stands there"
                raise StorageError("the storage root is no directory", where=self.root, hint=hint, errno=errno.ENOTDIR)
            make_directories(Path(self.root), 0o755)
        marker = os.path.join(self.root, MARKER)
        if not os.path.lexists(marker):
            self._make_marker(marker)
        for left in glob.glob(f"{glob.escape(marker)}.*{PART}"):  # whoever made it died before its end, or comes too late
            with suppress(OSError):
                os.unlink(left)

    def _make_marker(self, marker: str) -> None:
        made = f"{marker}.{secrets.token_hex(8)}{PART}"
        fd = os.open(made, _NEW, 0o644)
        try:
            os.write(fd, secrets.token_hex(IDENTITY_BYTES).encode())
            os.fsync(fd)
            try:
                os.link(made, marker)
            except (FileExistsError, FileNotFoundError):  # another node was first, and may have taken ours away
                if not os.path.lexists(marker):
                    raise
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(made)
        self._sync_path(self.root)

    def _sync_path(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_entries(fd, path)
        finally:
            os.close(fd)

    @contextmanager
    def _mapped(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, what, self.locate(path)) from error

    @contextmanager
    def _at(self, path: str) -> Iterator[int]:
        """The directory's fd for the length of the block."""
        fd = self._open_root()
        try:
            for name in split_path(path):
                inner = os.open(name, _DIR, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        *above, name = split_path(path)
        with self._at("/".join(above)) as fd:
            yield fd, name

    def _open_root(self) -> int:
        try:
            fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise self._away("the storage directory has vanished") from error
        if self._marked:
            try:
                self._look_at_marker(fd)
            except OSError as error:
                os.close(fd)
                raise self._away(f"the storage directory has lost its {MARKER}") from error
            except StorageError:
                os.close(fd)
                raise
        return fd

    def _away(self, what: str) -> StorageError:
        return StorageError(what, where=self.root, hint=self._away_hint, errno=AWAY)

    def _look_at_marker(self, root: int) -> None:
        """Raises OSError without one, StorageError for another storage's. One that was read before is not read again."""
        facts = os.stat(MARKER, dir_fd=root, follow_symlinks=False)
        seen = facts.st_dev, facts.st_ino, facts.st_mtime_ns
        if seen == self._seen:
            return
        fd = os.open(MARKER, _READ, dir_fd=root)
        try:
            found = os.read(fd, 2 * IDENTITY_BYTES).decode("ascii", "replace")
        finally:
            os.close(fd)
        self.identity = self.identity or found
        if found != self.identity:
            raise self._away("another directory stands in the place of the storage")
        self._seen = seen

    def _step_in(self, fd: int, name: str, path: str) -> int:
        """The fd of the child directory, made and synced if it is new. Closes ``fd``."""
        try:
            try:
                return os.open(name, _DIR, dir_fd=fd)
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, DIR_MODE, dir_fd=fd)
                inner = os.open(name, _DIR, dir_fd=fd)
                try:
                    self._give(inner, path)
                    sync_entries(fd, self.locate(path))
                except BaseException:
                    os.close(inner)
                    raise
                return inner
        finally:
            os.close(fd)

    def _give(self, fd: int, path: str) -> None:
        owner = path.partition("/")[0]
        if not (self._chown and owner.isdecimal()):
            return
        try:
            os.fchown(fd, int(owner), -1)
        except PermissionError as error:
            hint = "the server maps root to nobody: run the daemon as the user whose job it is"
            raise StorageError(
                "cannot give the file to its user", where=self.locate(path), hint=hint
            ) from error


def _entry(item: os.DirEntry[str]) -> Entry | None:
    """None: it vanished meanwhile, or is neither a file nor a directory of ours: a snapshot of the file system, a copy that an
    operator made by hand."""
    if not is_name(item.name):
        return None
    try:
        facts = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    is_dir = stat.S_ISDIR(facts.st_mode)
    if not (is_dir or stat.S_ISREG(facts.st_mode)):
        return None
    return Entry(item.name, is_dir, facts.st_size, facts.st_mtime)


def _delete_below(parent: int, name: str) -> None:
    fd = os.open(name, _DIR, dir_fd=parent)
    try:
        with os.scandir(fd) as found:
            items = [(item.name, item.is_dir(follow_symlinks=False)) for item in found]
        for inner, is_dir in items:
            if is_dir:
                _delete_below(fd, inner)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(inner, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
