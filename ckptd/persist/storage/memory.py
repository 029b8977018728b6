"""Storage in a dictionary, as an object store would do it: a pointer is a small object that names an attempt. For tests and the
simulator."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.core.state_map.layout import BLOCK_BYTES
from ckptd.persist.names import MANIFEST
from ckptd.persist.storage.base import Entry, NotFound, Pointer, Sight, StorageError, split_path

SPACE_BYTES = 1 << 16  # small, so that writers meet the end of their space often
CAPACITY_BYTES = 1 << 30


@dataclass(frozen=True)
class Stored:
    """One object. ``attempt``: it is a pointer, and names what was committed."""

    data: bytes
    at_s: float
    attempt: str = ""
    sight: Sight = Sight.SHOWN


class MemoryStorage:
    """``objects``: path -> what is stored there. None of them is ever changed, only replaced."""

    identity = ""
    needs = ""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.objects: dict[str, Stored] = {}
        self.capacity_bytes = capacity_bytes
        self._lock = threading.RLock()
        self._clock = itertools.count(1)

    def locate(self, path: str) -> str:
        return f"memory:{path}"

    def free_bytes(self) -> int:
        with self._lock:
            return self.capacity_bytes - sum(len(found.data) for found in self.objects.values())

    def clock_s(self, path: str) -> float:
        return self.now_s()

    def now_s(self) -> float:
        return float(next(self._clock))

    # --- small files and what is there --------------------------------------------------------------------------
    def begin(self, path: str) -> None:
        split_path(path)  # nothing to do: there are no directories

    def put_if_absent(self, path: str, data: bytes) -> bool:
        split_path(path)
        with self._lock:
            return self._store(path, data)

    def list(self, path: str) -> list[Entry]:
        split_path(path)
        with self._lock:
            pointer = self.objects.get(path)
            inside = pointer.attempt if pointer is not None and pointer.attempt else path
            hidden = pointer is not None and pointer.sight is not Sight.SHOWN
            found: dict[str, Entry] = {}
            for place, stored in self._below(inside):
                name, _, rest = place.partition("/")
                if not (hidden and name == MANIFEST):
                    is_dir = bool(rest or stored.attempt)
                    found[name] = Entry(name, is_dir, 0 if is_dir else len(stored.data), stored.at_s)
            return [found[name] for name in sorted(found)]

    def open(self, path: str) -> MemoryReader:
        split_path(path)
        with self._lock:
            above, _, name = path.rpartition("/")
            pointer = self.objects.get(above)
            stored = self.objects.get(self._place(path))
            hidden = pointer is not None and pointer.sight is not Sight.SHOWN and name == MANIFEST
            if stored is None or stored.attempt or hidden:
                raise NotFound("open: no such file", where=self.locate(path), errno=errno.ENOENT)
            return MemoryReader(stored.data, self.locate(path))

    def delete(self, path: str) -> None:
        split_path(path)
        with self._lock:
            self.objects.pop(path, None)

    def discard(self, path: str) -> None:
        split_path(path)
        with self._lock:
            if path not in self._committed():
                self._clear(path)

    def secure(self, *paths: str) -> None:
        """Nothing to do: it was when it was put."""

    def sweep(self, path: str, before_s: float) -> None:
        """Nothing to do: nothing dies in its middle."""

    # --- a checkpoint -------------------------------------------------------------------------------------------
    def put(self, path: str) -> MemoryWriter:
        split_path(path)
        with self._lock:
            if path in self.objects:
                raise StorageError("put: File exists", where=self.locate(path), errno=errno.EEXIST)
        return MemoryWriter(self, path)

    def commit_if_absent(
        self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]
    ) -> bool:
        with self._lock:
            missing = sorted({*names} - {place for place, _ in self._below(attempt)})
            if missing:
                raise NotFound(f"{missing[0]} is not there", where=self.locate(attempt), errno=errno.ENOENT)
            if pointer in self.objects:
                return False
            for place, _ in self._below(attempt):
                if place not in names:
                    del self.objects[f"{attempt}/{place}"]
            for name, data in beside.items():
                self._store(f"{attempt}/{name}", data)
            self.objects[pointer] = Stored(b"", self.now_s(), attempt)
            return True

    def place(self, pointer: str) -> str:
        with self._lock:
            return self._standing(pointer).attempt

    def pointers(self, path: str) -> Sequence[Pointer]:
        split_path(path)
        with self._lock:
            found = [
                (place, stored) for place, stored in self._below(path) if stored.attempt and "/" not in place
            ]
            return [self._pointer(place, stored) for place, stored in sorted(found, key=lambda item: item[0])]

    def _pointer(self, name: str, stored: Stored) -> Pointer:
        marks = frozenset(place for place, inner in self._below(stored.attempt) if "." not in place and not inner.attempt)
        return Pointer(name, stored.sight, marks, None if stored.sight is Sight.SHOWN else stored.at_s)

    def mark(self, pointer: str, name: str, data: bytes) -> None:
        with self._lock:
            found = self._standing(pointer)
            self._store(f"{found.attempt}/{name}", data)

    def unmark(self, pointer: str, name: str) -> bool:
        with self._lock:
            found = self._standing(pointer)
            return self.objects.pop(f"{found.attempt}/{name}", None) is not None

    def _standing(self, pointer: str) -> Stored:
        found = self.objects.get(pointer)
        if found is None or not found.attempt:
            raise NotFound("no such commit", where=self.locate(pointer), errno=errno.ENOENT)
        return found

    def hide(self, pointer: str) -> bool:
        return self._turn(pointer, Sight.SHOWN, Sight.HIDDEN)

    def reveal(self, pointer: str) -> bool:
        return self._turn(pointer, Sight.HIDDEN, Sight.SHOWN)

    def drop(self, pointer: str) -> bool:
        with self._lock:
            found = self.objects.get(pointer)
            if found is None or found.sight is not Sight.HIDDEN:
                return False
            del self.objects[pointer]
            self._clear(found.attempt)
            return True

    def _turn(self, pointer: str, old: Sight, new: Sight) -> bool:
        with self._lock:
            found = self.objects.get(pointer)
            if found is None or not found.attempt or found.sight is not old:
                return False
            self.objects[pointer] = replace(found, sight=new, at_s=self.now_s())
            return True

    def _clear(self, path: str) -> None:
        for place in [place for place in self.objects if place.startswith(f"{path}/")]:
            del self.objects[place]

    # --- the dictionary -----------------------------------------------------------------------------------------
    def _store(self, path: str, data: bytes) -> bool:
        if path in self.objects:
            return False
        if len(data) > self.free_bytes():
            raise full(self.locate(path))
        self.objects[path] = Stored(data, self.now_s())
        return True

    def _place(self, path: str) -> str:
        """Where an object of this path lies: below a pointer that is where its attempt's are."""
        above, _, name = path.rpartition("/")
        pointer = self.objects.get(above)
        return f"{pointer.attempt}/{name}" if pointer is not None and pointer.attempt else path

    def _below(self, path: str) -> Iterable[tuple[str, Stored]]:
        """(rest of the path, object); of committed attempts only when they are asked for by their name."""
        begin = f"{path}/" if path else ""
        mine = [
            (place[len(begin) :], stored) for place, stored in self.objects.items() if place.startswith(begin)
        ]
        hidden = tuple(f"{other[len(begin) :]}/" for other in self._committed() if other.startswith(begin))
        return [(place, stored) for place, stored in mine if not place.startswith(hidden)] if hidden else mine

    def _committed(self) -> set[str]:
        return {stored.attempt for stored in self.objects.values() if stored.attempt}


class MemoryWriter:
    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage, self._path = storage, path
        self._data = bytearray()
        self._space = bytearray(SPACE_BYTES)

    @property
    def position(self) -> int:
        return len(self._data)

    def space(self) -> memoryview:
        return memoryview(self._space)

    def advance(self, nbytes: int) -> None:
        self.write(memoryview(self._space)[:nbytes])

    def write(self, data: bytes | memoryview) -> None:
        if len(self._data) + len(data) > self._storage.free_bytes():
            raise full(self._storage.locate(self._path))
        self._data += data

    def finish(self) -> int:
        if not self._storage.put_if_absent(self._path, bytes(self._data)):
            raise StorageError("put: File exists", where=self._storage.locate(self._path), errno=errno.EEXIST)
        return len(self._data)

    def abort(self) -> None:
        """Nothing is held."""


class MemoryReader:
    at_once = BLOCK_BYTES

    def __init__(self, data: bytes, where: str) -> None:
        self._data, self._where = data, where

    @property
    def size(self) -> int:
        return len(self._data)

    def read_into(self, at: int, dest: memoryview) -> None:
        found = self._data[at : at + len(dest)]
        if len(found) < len(dest):
            raise StorageError(f"the file ends at byte {at + len(found)}", where=self._where)
        dest[:] = found

    def close(self) -> None:
        """Nothing is held."""


def full(where: str) -> StorageError:
    return StorageError("write: No space left on device", where=where, errno=errno.ENOSPC)
