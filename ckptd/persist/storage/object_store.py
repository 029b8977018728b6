"""A bucket as storage: S3 and what speaks its protocol, and Azure's containers, through obstore (D22; docs/FORMAT.md section 9).

Nothing is ever renamed: an attempt's files lie below the attempt's own prefix for good. The commit is one conditional PUT of the
pointer, ``step-N.pointer`` beside it. What readers see of it changes by a PUT that asks for the entity tag of the state before, so
of two that decide at once one wins. A pointer that is ``dropped`` stays so until all that it names is deleted, and goes last: while
it is there nothing can be committed in its place, and whoever died in between is made up for by the next one.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import obstore

from ckptd.persist.names import DAMAGED, MANIFEST, PART
from ckptd.persist.storage import object_pointer as pointers
from ckptd.persist.storage.base import (
    AWAY,
    Entry,
    NotFound,
    Pointer,
    Sight,
    StorageError,
    is_name,
    split_path,
)
from ckptd.persist.storage.object_errors import is_wordless, store_error
from ckptd.persist.storage.object_file import ObjectReader, ObjectWriter
from ckptd.persist.storage.object_pointer import POINTER, Commit, write_once
from ckptd.persist.storage.object_service import connect
from ckptd.persist.storage.object_windows import Windows
from ckptd.thread_pool import ThreadPool

OWN = ".ckptd"  # objects that are no part of any path
MARKER, CLOCK = f"{OWN}/root", f"{OWN}/clock"
IDENTITY_BYTES = 16
MARK = ".mark-"  # ATTEMPT.mark-keep
FREE_BYTES = 1 << 60  # a bucket has no end; a quota says so when it is reached
ROOT_SEEN_S = 30.0  # so long a marker that was seen is taken to be there still; where something is missing it is looked at anew
KNOWN_MAX = 65536  # pointers whose last state is remembered
LOOKS_AT_ONCE = 16  # pointers that are read
TURNS_MAX = 16  # of those who change one pointer at once
DROP_TURN_S = 300.0  # so long the end of a drop is left to who began it; longer than all its tries of one request take
DROP_WITHIN_S = 30.0  # and so soon it sends that

NEEDS = "ckptd needs a store with conditional PUT, If-None-Match as well as If-Match (AWS S3, MinIO, Ceph, Cloudflare R2, Azure)"
Entries: TypeAlias = list[Entry]  # as ``list`` is a method here
AWAY_HINT = "is it the bucket that was meant? daemons go on as soon as it is back"


class ObjectStorage:
    """root: in its one form. create, marked, identity, if_new: as PosixStorage. The bucket itself is never made."""

    needs = NEEDS

    def __init__(
        self,
        root: str,
        *,
        create: bool = True,
        marked: bool | None = None,
        identity: str = "",
        if_new: str = "",
    ) -> None:
        self.root = root
        self.identity = identity
        self._store = connect(root)
        self._marked = create if marked is None else marked
        self._away_hint = f"{AWAY_HINT}; {if_new}" if if_new else AWAY_HINT
        self._seen_at = -ROOT_SEEN_S
        self._windows = Windows()
        self._known: dict[str, Commit] = {}  # path of a pointer -> what it said last
        if create:
            write_once(self._store, MARKER, secrets.token_hex(IDENTITY_BYTES).encode(), self.locate(""))
            self._check_root()

    def locate(self, path: str) -> str:
        """Below a pointer: where its attempt's files are, if that was seen already."""
        above, _, name = path.rpartition("/")
        for pointer, below in ((path, ""), (above, f"/{name}")):
            commit = self._known.get(pointer)
            if commit is not None and not commit.damage:
                path = f"{self._attempt(pointer, commit)}{below}"
                break
        return f"{self.root}/{path}" if path else self.root

    def free_bytes(self) -> int:
        return FREE_BYTES

    def clock_s(self, path: str) -> float:
        """One small object is put again and again."""
        self._put(CLOCK, b"")
        found = [meta for meta in self._below(OWN)[1] if meta["path"] == CLOCK]
        if not found:
            hint = "ckptd needs a store that lists at once what was put"
            raise StorageError("what was put is not listed", where=self.locate(CLOCK), hint=hint)
        return float(found[0]["last_modified"].timestamp())

    # --- small files and what is there --------------------------------------------------------------------------
    def begin(self, path: str) -> None:
        split_path(path)  # nothing to do: there are no directories

    def put_if_absent(self, path: str, data: bytes) -> bool:
        split_path(path)
        self._check_root(ROOT_SEEN_S)
        return write_once(self._store, path, data, self.locate(path))

    def list(self, path: str) -> Entries:
        split_path(path)
        prefixes, objects = self._below(path)
        if not (prefixes or objects):
            self._check_root()
            commit = self._look(path) if path else None
            return [] if commit is None else self._inside(path, commit)
        own = self._pointers(path, objects)
        taken = {commit.attempt for commit in own.values()}
        taken |= {name for name in prefixes for of, commit in own.items() if commit.damage and name.startswith(f"{of}.")}
        found = {name: Entry(name, True, 0, 0.0) for name in prefixes if name not in taken and is_name(name)}
        found |= {name: Entry(name, True, 0, commit.at_s) for name, commit in own.items()}
        for meta in objects:
            name = meta["path"].rpartition("/")[2]
            if is_name(name) and not name.endswith(POINTER) and MARK not in name and name not in found:
                found[name] = Entry(name, False, meta["size"], meta["last_modified"].timestamp())
        return [found[name] for name in sorted(found)]

    def open(self, path: str) -> ObjectReader:
        split_path(path)
        above, _, name = path.rpartition("/")
        if not above or above.endswith(PART):
            return self._open(path, path)
        if name != MANIFEST:  # the attempt's other files are seen whether it is shown or not
            with suppress(NotFound):
                return self._open_first(self._places(above, self._known.get(above), name), path)
        commit = self._look(above)
        if commit is not None and commit.damage:
            raise self._damaged(above, commit)
        if commit is not None and name == MANIFEST and commit.sight is not Sight.SHOWN:
            raise NotFound("open: no such object", where=self.locate(path), errno=errno.ENOENT)
        return self._open_first(self._places(above, commit, name), path)

    def delete(self, path: str) -> None:
        split_path(path)
        self._delete([path], path)

    def discard(self, path: str) -> None:
        split_path(path)
        if not path.endswith(PART):
            every = self._all(path)
            self._delete([key for key in every if key.endswith(POINTER)], path)  # nothing is listed that is no longer whole
            self._delete(every, path)
            return
        pointer = path.removesuffix(PART).rpartition(".")[0]
        name = path.rpartition("/")[2]
        for _ in range(TURNS_MAX):
            commit = self._look(pointer)
            if commit is None:
                if not self._all(path):
                    return
                # Nothing can commit it from here on; whoever dies before all is deleted leaves a commit that is dropped.
                if not self._write(pointer, name, Sight.DROPPED):
                    continue
                self._finish_drop(pointer, name, since=time.monotonic())
            elif commit.damage:  # it may have named this one
                return
            elif commit.attempt != name:  # as long as that pointer stands, this attempt cannot be committed
                self._delete_attempt(pointer, name)
            elif commit.sight is Sight.DROPPED:
                self._finish_drop(pointer, name, commit=commit)
            return

    def secure(self, *paths: str) -> None:
        """Nothing to do: it was when it was put."""

    def sweep(self, path: str, before_s: float) -> None:
        """Marks of commits that were dropped meanwhile."""
        prefixes, objects = self._below(path)
        marks = [meta for meta in objects if MARK in meta["path"] and meta["last_modified"].timestamp() <= before_s]
        if marks:
            there = {*prefixes, *(commit.attempt for commit in self._pointers(path, objects).values())}
            lost = [meta["path"] for meta in marks if meta["path"].rpartition("/")[2].partition(MARK)[0] not in there]
            self._delete(lost, path)

    # --- a checkpoint -------------------------------------------------------------------------------------------
    def put(self, path: str) -> ObjectWriter:
        split_path(path)
        self._check_root(ROOT_SEEN_S)
        try:
            self._open(path, path)
        except NotFound:
            return ObjectWriter(self._store, path, self.locate(path))
        raise StorageError("put: the name is taken", where=self.locate(path), errno=errno.EEXIST)

    def commit_if_absent(
        self, attempt: str, pointer: str, names: Collection[str], beside: Mapping[str, bytes]
    ) -> bool:
        self._check_root()
        there = self._names(attempt)
        self._check_files(attempt, there, names)
        if self._look(pointer) is not None:
            return False
        self._delete([f"{attempt}/{name}" for name in there - {*names, *beside}], attempt)
        for name, data in beside.items():
            key = f"{attempt}/{name}" if "." in name else f"{attempt}{MARK}{name}"
            write_once(self._store, key, data, self.locate(f"{pointer}/{name}"))
        if not self._write(pointer, attempt.rpartition("/")[2], Sight.SHOWN):
            return False
        try:  # its files may have been deleted while this committer stood still, if another commit came and went meanwhile
            self._check_files(attempt, self._names(attempt), {*names, *(name for name in beside if "." in name)})
        except NotFound:
            self._turn(pointer, Sight.SHOWN, Sight.DROPPED)
            raise
        return True

    def _check_files(self, attempt: str, there: Collection[str], names: Collection[str]) -> None:
        missing = sorted({*names} - {*there})
        if missing or not there:
            self._check_root()
            raise NotFound(f"{missing[0] if missing else 'it'} is not there", where=self.locate(attempt), errno=errno.ENOENT)

    def place(self, pointer: str) -> str:
        return self._attempt(pointer, self._standing(pointer))

    def pointers(self, path: str) -> Sequence[Pointer]:
        """By one list, and one read of each pointer that has changed since: none of the files is looked at."""
        split_path(path)
        _, objects = self._below(path)
        if not objects:
            self._check_root()
        marks: dict[str, dict[str, float]] = {}
        for meta in objects:
            attempt, _, mark = meta["path"].rpartition("/")[2].partition(MARK)
            if mark:
                marks.setdefault(attempt, {})[mark] = meta["last_modified"].timestamp()
        found = []
        for name, commit in sorted(self._pointers(path, objects).items()):
            if commit.damage:
                found.append(Pointer(name, Sight.SHOWN, frozenset({DAMAGED}), None))
                continue
            own = marks.get(commit.attempt, {})
            hidden_s = None if commit.sight is Sight.SHOWN else max([commit.at_s, *own.values()])
            found.append(Pointer(name, commit.sight, frozenset(own), hidden_s))
        return found

    def mark(self, pointer: str, name: str, data: bytes) -> None:
        write_once(self._store, self._mark(pointer, name), data, self.locate(f"{pointer}/{name}"))

    def unmark(self, pointer: str, name: str) -> bool:
        key = self._mark(pointer, name)
        try:
            self._open(key, f"{pointer}/{name}")
        except NotFound:
            return False
        self._delete([key], f"{pointer}/{name}")
        return True

    def hide(self, pointer: str) -> bool:
        return self._turn(pointer, Sight.SHOWN, Sight.HIDDEN)

    def reveal(self, pointer: str) -> bool:
        return self._turn(pointer, Sight.HIDDEN, Sight.SHOWN)

    def drop(self, pointer: str) -> bool:
        began = time.monotonic()
        ours = self._turn(pointer, Sight.HIDDEN, Sight.DROPPED)
        commit = self._look(pointer)
        if commit is None or commit.sight is not Sight.DROPPED:
            return ours
        self._finish_drop(pointer, commit.attempt, since=began if ours else None, commit=commit)
        return True

    # --- pointers -----------------------------------------------------------------------------------------------
    def _look(self, pointer: str) -> Commit | None:
        split_path(pointer)
        commit = pointers.read(self._store, f"{pointer}{POINTER}", self.locate(pointer))
        if commit is None:
            self._known.pop(pointer, None)
        else:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[pointer] = commit
        return commit

    def _write(self, pointer: str, attempt: str, sight: Sight, over: str = "") -> bool:
        data = pointers.encode(attempt, sight)
        return write_once(self._store, f"{pointer}{POINTER}", data, self.locate(pointer), over=over)

    def _turn(self, pointer: str, old: Sight, new: Sight) -> bool:
        for _ in range(TURNS_MAX):
            commit = self._look(pointer)
            if commit is None or commit.damage or commit.sight is not old:
                return False
            if self._write(pointer, commit.attempt, new, over=commit.e_tag):
                return True
        raise StorageError("others change this pointer all the time", where=self.locate(pointer), errno=errno.EBUSY)

    def _finish_drop(
        self, pointer: str, attempt: str, *, since: float | None = None, commit: Commit | None = None
    ) -> None:
        """The pointer goes last, by one alone: two who delete it could meet a new commit of the same name in between. since: we
        have dropped it, then; None: another one did, who may be at it still."""
        self._delete_attempt(pointer, attempt)
        if since is None:
            may = commit is not None and self.clock_s("") - commit.at_s >= DROP_TURN_S
        else:
            may = time.monotonic() - since <= DROP_WITHIN_S
        if may:
            self._delete([f"{pointer}{POINTER}"], pointer)
            self._known.pop(pointer, None)

    def _delete_attempt(self, pointer: str, attempt: str) -> None:
        above = pointer.rpartition("/")[0]
        path = f"{above}/{attempt}" if above else attempt
        marks = [meta["path"] for meta in self._below(above)[1] if meta["path"].startswith(f"{path}{MARK}")]
        self._delete([*self._all(path), *marks], path)

    def _attempt(self, pointer: str, commit: Commit) -> str:
        above = pointer.rpartition("/")[0]
        return f"{above}/{commit.attempt}" if above else commit.attempt

    def _mark(self, pointer: str, name: str) -> str:
        return f"{self._attempt(pointer, self._standing(pointer))}{MARK}{name}"

    def _standing(self, pointer: str) -> Commit:
        """Raises NotFound, StorageError."""
        commit = self._look(pointer)
        if commit is None or commit.sight is Sight.DROPPED:
            raise NotFound("no such commit", where=self.locate(pointer), errno=errno.ENOENT)
        if commit.damage:
            raise self._damaged(pointer, commit)
        return commit

    def _places(self, pointer: str, commit: Commit | None, name: str) -> Sequence[str]:
        """Where a file of this name may lie."""
        if commit is None or commit.damage:
            return (f"{pointer}/{name}",)
        attempt = self._attempt(pointer, commit)
        return (f"{attempt}/{name}",) if "." in name else (f"{attempt}{MARK}{name}", f"{attempt}/{name}")

    def _pointers(self, path: str, objects: Sequence[Any]) -> dict[str, Commit]:
        """By name. Those that were seen already, in this very state, are not read again; the others side by side: a daemon that
        begins has seen none, and a restore waits for it."""
        found: dict[str, Commit | None] = {}
        unseen: dict[str, str] = {}
        for meta in objects:
            name = meta["path"].rpartition("/")[2].removesuffix(POINTER)
            pointer = f"{path}/{name}" if path else name
            if meta["path"].endswith(POINTER) and is_name(name):
                found[name] = self._known.get(pointer)
                if (commit := found[name]) is None or commit.e_tag != pointers.plain(meta["e_tag"]):
                    unseen[name] = pointer
        if len(unseen) == 1:
            found |= {name: self._look(pointer) for name, pointer in unseen.items()}
        elif unseen:
            with ThreadPool(min(len(unseen), LOOKS_AT_ONCE), "pointers") as pool:
                asked = [(name, pool.submit(self._look, pointer)) for name, pointer in unseen.items()]
                found |= {name: one.result() for name, one in asked}
        return {name: commit for name, commit in found.items() if commit is not None}

    def _damaged(self, pointer: str, commit: Commit) -> StorageError:
        hint = "delete this object where nobody needs the step; a copy of it from before brings the step back"
        return StorageError(commit.damage, where=f"{self.locate(pointer)}{POINTER}", hint=hint)

    def _inside(self, pointer: str, commit: Commit) -> Entries:
        if commit.damage:
            return []
        attempt = self._attempt(pointer, commit)
        objects = self._below(attempt)[1]
        names = ((meta, meta["path"].rpartition("/")[2]) for meta in objects)
        found = [(meta, name) for meta, name in names if not name.endswith(POINTER)]
        marks = [meta for meta in self._below(attempt.rpartition("/")[0])[1] if meta["path"].startswith(f"{attempt}{MARK}")]
        found += [(meta, meta["path"].partition(MARK)[2]) for meta in marks]
        entries = [Entry(name, False, meta["size"], meta["last_modified"].timestamp()) for meta, name in found if is_name(name)]
        if commit.sight is not Sight.SHOWN:
            entries = [entry for entry in entries if entry.name != MANIFEST]
        entries += [Entry(name, True, 0, inner.at_s) for name, inner in self._pointers(attempt, objects).items()]
        return sorted(entries, key=lambda entry: entry.name)

    # --- objects ------------------------------------------------------------------------------------------------
    def _put(self, key: str, data: bytes) -> None:
        try:
            obstore.put(self._store, key, data, use_multipart=False)
        except Exception as error:
            raise store_error(error, "put", self.locate(key)) from error

    def _open_first(self, keys: Sequence[str], path: str) -> ObjectReader:
        for key in keys[:-1]:
            with suppress(NotFound):
                return self._open(key, path)
        return self._open(keys[-1], path)

    def _open(self, key: str, path: str) -> ObjectReader:
        try:
            size = self._size(key)
        except Exception as error:
            found = store_error(error, "open", self.locate(path))
            if isinstance(found, NotFound):
                self._check_root()
            raise found from error
        return ObjectReader(self._store, key, self.locate(path), size, self._windows)

    def _size(self, key: str) -> int:
        try:
            return obstore.head(self._store, key)["size"]
        except FileNotFoundError:
            raise
        except Exception as error:
            if is_wordless(error):
                obstore.get_range(self._store, key, start=0, length=1)  # raises what the store has to say
            raise

    def _below(self, path: str) -> tuple[Sequence[str], Sequence[Any]]:
        """Names that more lies below, and the objects directly below ``path``."""
        try:
            found = obstore.list_with_delimiter(self._store, path or None)
        except Exception as error:
            raise store_error(error, "list", self.locate(path)) from error
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]], found["objects"]

    def _names(self, path: str) -> set[str]:
        return {meta["path"].rpartition("/")[2] for meta in self._below(path)[1]}

    def _all(self, path: str) -> Sequence[str]:
        try:
            return [meta["path"] for page in obstore.list(self._store, path or None) for meta in page]
        except Exception as error:
            raise store_error(error, "list", self.locate(path)) from error

    def _delete(self, keys: Sequence[str], path: str) -> None:
        """What is not there any more is none the worse. Azure says that it is not, when it has deleted some of the others."""
        if not keys:
            return
        try:
            obstore.delete(self._store, keys)
        except Exception as error:
            told = store_error(error, "delete", self.locate(path))
            if not isinstance(told, NotFound):
                raise told from error
            for key in keys if len(keys) > 1 else ():
                self._delete([key], path)

    def _check_root(self, seen_s: float = 0.0) -> None:
        """Is it the storage that was meant? seen_s: it need not be looked at if it was within that time. Raises StorageError."""
        if not self._marked or time.monotonic() - self._seen_at < seen_s:
            return
        try:
            found = bytes(obstore.get(self._store, MARKER).bytes()).decode("ascii", "replace")
        except Exception as error:
            told = store_error(error, "look for the storage", self.root)
            if isinstance(told, NotFound):
                told = StorageError(f"the storage has lost its {MARKER}", where=self.root, hint=self._away_hint, errno=AWAY)
            raise told from error
        self.identity = self.identity or found
        if found != self.identity:
            text = "another storage stands in the place of this one"
            raise StorageError(text, where=self.root, hint=self._away_hint, errno=AWAY)
        self._seen_at = time.monotonic()
