"""A tree of files in dictionaries: the steps that TreeStorage is made of, for what has to fail between two of them."""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass, field

from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist.storage.base import Entry, NotFound, StorageError, split_path
from ckptd.persist.storage.tree import TreeStorage

SPACE_BYTES = 1 << 16  # small, so that writers meet the end of their space often
CAPACITY_BYTES = 1 << 30


@dataclass
class MemoryFile:
    data: bytearray = field(default_factory=bytearray)
    mtime_s: float = 0.0


@dataclass
class MemoryDir:
    entries: dict[str, MemoryDir | MemoryFile] = field(default_factory=dict)
    mtime_s: float = 0.0


class MemoryTree(TreeStorage):
    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.root = MemoryDir()
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._clock = itertools.count(1)

    def locate(self, path: str) -> str:
        return f"memory:{path}"

    def make_dir(self, path: str) -> None:
        with self._lock:
            here = self.root
            for name in split_path(path):
                inner = here.entries.get(name)
                if inner is None:
                    inner = here.entries[name] = MemoryDir(mtime_s=self._now())
                if not isinstance(inner, MemoryDir):
                    raise StorageError("a file stands there", where=self.locate(path), errno=errno.ENOTDIR)
                here = inner

    def create(self, path: str) -> MemoryWriter:
        with self._lock:
            above, name = self._parent(path)
            if name in above.entries:
                raise StorageError("create: File exists", where=self.locate(path), errno=errno.EEXIST)
            file = above.entries[name] = MemoryFile(mtime_s=self._changed(above))
            return MemoryWriter(self, file, path)

    def publish(self, source: str, target: str) -> bool:
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            if name not in above.entries:
                raise NotFound("publish: no such file", where=self.locate(source), errno=errno.ENOENT)
            if target_name in target_above.entries:
                return False
            target_above.entries[target_name] = above.entries.pop(name)
            self._changed(target_above)
            return True

    def move_file(self, source: str, target: str) -> None:
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            if name not in above.entries:
                raise NotFound("rename: no such file", where=self.locate(source), errno=errno.ENOENT)
            target_above.entries[target_name] = above.entries.pop(name)
            self._changed(target_above)

    def move_dir(self, source: str, target: str) -> bool:
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            moved = above.entries.get(name)
            if not isinstance(moved, MemoryDir):
                raise NotFound("rename: no such directory", where=self.locate(source), errno=errno.ENOENT)
            there = target_above.entries.get(target_name)
            if there is not None and not (isinstance(there, MemoryDir) and not there.entries):
                return False
            target_above.entries[target_name] = above.entries.pop(name)
            self._changed(target_above)
            return True

    def sync_dir(self, path: str) -> None:
        with self._lock:
            self._dir(path)

    def open_file(self, path: str) -> MemoryReader:
        with self._lock:
            above, name = self._parent(path)
            file = above.entries.get(name)
            if not isinstance(file, MemoryFile):
                raise NotFound("open: no such file", where=self.locate(path), errno=errno.ENOENT)
            return MemoryReader(file, self.locate(path))

    def entries(self, path: str) -> list[Entry]:
        with self._lock:
            found = self._dir(path).entries
            return [_entry(name, found[name]) for name in sorted(found)]

    def inside(self, path: str) -> tuple[list[str], float]:
        with self._lock:
            found = self._dir(path)
            return [name for name, item in found.entries.items() if isinstance(item, MemoryFile)], found.mtime_s

    def unlink(self, path: str) -> None:
        self._drop(path, MemoryFile)

    def delete_tree(self, path: str) -> None:
        self._drop(path, MemoryDir)

    def free_bytes(self) -> int:
        with self._lock:
            return self.capacity_bytes - _bytes(self.root)

    def clock_s(self, path: str) -> float:
        with self._lock:
            return self._changed(self._dir(path))

    def _drop(self, path: str, kind: type[MemoryDir | MemoryFile]) -> None:
        with self._lock:
            try:
                above, name = self._parent(path)
            except NotFound:
                return
            if isinstance(above.entries.get(name), kind):
                del above.entries[name]
                self._changed(above)

    def _now(self) -> float:
        return float(next(self._clock))

    def _changed(self, directory: MemoryDir) -> float:
        directory.mtime_s = self._now()
        return directory.mtime_s

    def _dir(self, path: str) -> MemoryDir:
        here = self.root
        for name in split_path(path):
            inner = here.entries.get(name)
            if not isinstance(inner, MemoryDir):
                raise NotFound("no such directory", where=self.locate(path), errno=errno.ENOENT)
            here = inner
        return here

    def _parent(self, path: str) -> tuple[MemoryDir, str]:
        *above, name = split_path(path)
        return self._dir("/".join(above)), name


class MemoryWriter:
    def __init__(self, storage: MemoryTree, file: MemoryFile, path: str) -> None:
        self._storage = storage
        self._file = file
        self._path = path
        self._space = bytearray(SPACE_BYTES)

    @property
    def position(self) -> int:
        return len(self._file.data)

    def space(self) -> memoryview:
        return memoryview(self._space)

    def advance(self, nbytes: int) -> None:
        self.write(memoryview(self._space)[:nbytes])

    def write(self, data: bytes | memoryview) -> None:
        if len(data) > self._storage.free_bytes():
            raise StorageError(
                "write: No space left on device", where=self._storage.locate(self._path), errno=errno.ENOSPC
            )
        self._file.data += data

    def finish(self) -> int:
        return len(self._file.data)

    def abort(self) -> None:
        """Nothing is held."""


class MemoryReader:
    at_once = BLOCK_BYTES

    def __init__(self, file: MemoryFile, where: str) -> None:
        self._file = file
        self._where = where

    @property
    def size(self) -> int:
        return len(self._file.data)

    def read_into(self, at: int, dest: memoryview) -> None:
        found = self._file.data[at : at + len(dest)]
        if len(found) < len(dest):
            raise StorageError(f"the file ends at byte {at + len(found)}", where=self._where)
        dest[:] = found

    def close(self) -> None:
        """Nothing is held."""


def _entry(name: str, item: MemoryDir | MemoryFile) -> Entry:
    if isinstance(item, MemoryDir):
        return Entry(name, True, 0, item.mtime_s)
    return Entry(name, False, len(item.data), item.mtime_s)


def _bytes(item: MemoryDir | MemoryFile) -> int:
    if isinstance(item, MemoryFile):
        return len(item.data)
    return sum(_bytes(inner) for inner in item.entries.values())
