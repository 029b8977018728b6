"""A storage whose power can be cut: what was not synced may be lost, file contents as well as directory entries.

Rules of a journalling file system, read strictly: a file's bytes are safe after finish(); a directory's changes reach
the disk in their order, but how many of those since its last sync is chance, for each directory apart.
"""

from __future__ import annotations

import itertools
import random

from ckptd.persist.storage.base import NotFound, split_path
from tests.node.memory_tree import MemoryDir, MemoryFile, MemoryReader, MemoryTree, MemoryWriter

Node = MemoryDir | MemoryFile


class PowerCut(BaseException):
    """The process is gone: nothing may catch it, nothing may still be done."""


class CrashStorage(MemoryTree):
    """``cut_at``: the power is cut right before this operation (0: never); ``operations`` counts them."""

    def __init__(self, cut_at: int = 0) -> None:
        super().__init__()
        self.operations = 0
        self.cut_at = cut_at
        self.trace: list[str] = []
        self._durable: dict[int, dict[str, Node]] = {}
        self._changes: dict[int, list[dict[str, Node | None]]] = {}
        self._alive: list[Node] = []  # so that ids stay unique
        self.finished: set[int] = set()

    def operation(self, text: str) -> None:
        with self._lock:
            self.operations += 1
            self.trace.append(text)
            if self.cut_at and self.operations >= self.cut_at:
                raise PowerCut(text)

    def restarted(self, seed: int) -> CrashStorage:
        """What a machine finds after the power cut."""
        noise = random.Random(seed)
        after = CrashStorage()
        after._clock = itertools.count(next(self._clock))
        after.root = self._survivor(self.root, noise, after)
        return after

    # --- the contract, recorded ---------------------------------------------------------------------------------
    def make_dir(self, path: str) -> None:
        self.operation(f"make_dir {path}")
        with self._lock:
            above = ""
            for name in split_path(path):
                here = self._dir(above)
                above = f"{above}/{name}" if above else name
                if name not in here.entries:
                    super().make_dir(above)
                    self._change(here, {name: here.entries[name]})
                    self._sync(here)

    def create(self, path: str) -> MemoryWriter:
        self.operation(f"create {path}")
        with self._lock:
            writer = super().create(path)
            above, name = self._parent(path)
            self._change(above, {name: above.entries[name]})
            return CrashWriter(self, writer._file, path)

    def publish(self, source: str, target: str) -> bool:
        self.operation(f"publish {target}")
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            done = super().publish(source, target)
            if done:
                self._change(target_above, {target_name: target_above.entries[target_name]})
                self._change(above, {name: None})
            return done

    def move_file(self, source: str, target: str) -> None:
        self.operation(f"move_file {target}")
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            assert above is target_above, "the model knows renames within one directory only"
            super().move_file(source, target)
            self._change(above, {name: None, target_name: above.entries[target_name]})

    def move_dir(self, source: str, target: str) -> bool:
        self.operation(f"move_dir {target}")
        with self._lock:
            above, name = self._parent(source)
            target_above, target_name = self._parent(target)
            assert above is target_above, "the model knows renames within one directory only"
            done = super().move_dir(source, target)
            if done:
                self._change(above, {name: None, target_name: above.entries[target_name]})
            return done

    def sync_dir(self, path: str) -> None:
        self.operation(f"sync_dir {path}")
        with self._lock:
            self._sync(self._dir(path))

    def open_file(self, path: str) -> MemoryReader:
        self._check_power()
        return super().open_file(path)

    def _drop(self, path: str, kind: type[MemoryDir | MemoryFile]) -> None:
        self.operation(f"delete {path}")
        with self._lock:
            super()._drop(path, kind)
            try:
                above, name = self._parent(path)
            except NotFound:
                return
            self._change(above, {name: None})

    # --- the model ----------------------------------------------------------------------------------------------
    def _check_power(self) -> None:
        if self.cut_at and self.operations >= self.cut_at:
            raise PowerCut("no power")

    def _change(self, directory: MemoryDir, change: dict[str, Node | None]) -> None:
        self._alive.append(directory)
        self._changes.setdefault(id(directory), []).append(change)

    def _sync(self, directory: MemoryDir) -> None:
        self._alive.append(directory)
        self._durable[id(directory)] = dict(directory.entries)
        self._changes[id(directory)] = []

    def _survivor(self, directory: MemoryDir, noise: random.Random, after: CrashStorage) -> MemoryDir:
        entries = dict(self._durable.get(id(directory), {}))
        changes = self._changes.get(id(directory), [])
        for change in changes[: noise.randint(0, len(changes))]:
            for name, node in change.items():
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        found = MemoryDir(mtime_s=directory.mtime_s)
        for name, node in entries.items():
            if isinstance(node, MemoryDir):
                found.entries[name] = self._survivor(node, noise, after)
            else:
                found.entries[name] = self._surviving_file(node, noise)
        after._sync(found)
        return found

    def _surviving_file(self, file: MemoryFile, noise: random.Random) -> MemoryFile:
        data = bytearray(file.data)
        if id(file) not in self.finished:
            data = data[: noise.randint(0, len(data))]
            if noise.random() < 0.5:
                data = bytearray(len(data))  # the size was journalled, the bytes were not written
        return MemoryFile(data, file.mtime_s)


class CrashWriter(MemoryWriter):
    def write(self, data: bytes | memoryview) -> None:
        self._crash_storage().operation(f"write {self._path}")
        super().write(data)

    def finish(self) -> int:
        self._crash_storage().operation(f"finish {self._path}")
        self._crash_storage().finished.add(id(self._file))
        return super().finish()

    def _crash_storage(self) -> CrashStorage:
        assert isinstance(self._storage, CrashStorage)
        return self._storage
