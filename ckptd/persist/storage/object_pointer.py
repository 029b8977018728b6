"""The small objects that must not be written twice, and the pointer, which is one of them: what was committed, and what readers see
of it.

A store says whether a conditional PUT was carried out, unless its answer is lost, or the library sends it once more after an answer
that came too late. So each such object carries a random token of the write that made it: whoever is refused looks whether it was
its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import obstore

from ckptd.persist.names import PART
from ckptd.persist.storage.base import NotFound, Sight, StorageError
from ckptd.persist.storage.object_errors import store_error

if TYPE_CHECKING:
    from ckptd.persist.storage.object_service import Service

TOKEN = "ckptdwrite"  # metadata of each small object: which write made it; Azure takes no hyphen there
FORMAT, VERSION = "ckptd-pointer", 1
POINTER = ".pointer"  # step-N.pointer
POINTER_BYTES_MAX = 1 << 16
WRITE_TRIES = 3  # where the store refuses an object for one that is gone when it is looked at


class _File(msgspec.Struct):
    format: str
    version: int
    attempt: str
    sight: str
    write: str  # no two states of a pointer have the same bytes, and so the same entity tag


@dataclass(frozen=True)
class Commit:
    """What a pointer says. attempt: the name of the directory beside it that was committed. e_tag: of this very state. at_s: since
    when it is so, on the store's clock. damage: why nothing can be made of it ("": it is whole); then it names no attempt, and
    nobody touches it, nor what it may have named."""

    attempt: str
    sight: Sight
    e_tag: str
    at_s: float
    damage: str = ""


def write_once(store: Service, key: str, data: bytes | memoryview, where: str, *, over: str = "") -> bool:
    """One conditional PUT. over: the entity tag of what it replaces; "": nothing may be there. False: it is not so."""
    token = secrets.token_hex(16)
    for left in reversed(range(WRITE_TRIES)):
        try:
            mode: obstore.PutMode = {"e_tag": over} if over else "create"
            obstore.put(store, key, data, mode=mode, attributes={TOKEN: token}, use_multipart=False)
            return True
        except Exception as error:
            refused = isinstance(error, obstore.exceptions.AlreadyExistsError | obstore.exceptions.PreconditionError)
            try:
                made = _token_of(store, key, where)
            except StorageError:
                if refused:
                    raise
                raise store_error(error, "put", where) from error  # it says more than that nobody answers who wrote it
            if made == token:
                return True
            if not refused:
                raise store_error(error, "put", where) from error
            if made is not None or over or not left:  # 409: of two at once the other one may have failed as well
                return False
    raise AssertionError("WRITE_TRIES is at least 1")


def _token_of(store: Service, key: str, where: str) -> str | None:
    """None: there is no such object."""
    try:
        return str(obstore.get(store, key).attributes.get(TOKEN, ""))
    except Exception as error:
        found = store_error(error, "look who wrote it", where)
        if isinstance(found, NotFound):
            return None
        raise found from error


def plain(e_tag: str | None) -> str:
    """As any request takes it. Azure quotes it where it answers for one object, and does not in lists."""
    return f'"{e_tag.strip(chr(34))}"' if e_tag else ""


def encode(attempt: str, sight: Sight) -> bytes:
    return msgspec.json.encode(_File(FORMAT, VERSION, attempt, sight.value, secrets.token_hex(8))) + b"\n"


def read(store: Service, key: str, where: str) -> Commit | None:
    """None: there is no such pointer. One that is damaged, also when it is read once more, stands for its step alone. Raises
    StorageError."""
    found = _read(store, key, where)
    return _read(store, key, where) if found is not None and found.damage else found


def _read(store: Service, key: str, where: str) -> Commit | None:
    try:
        found = obstore.get(store, key)
        meta = found.meta
        data = bytes(found.bytes()) if meta["size"] <= POINTER_BYTES_MAX else b""
    except Exception as error:
        told = store_error(error, "read the pointer", where)
        if isinstance(told, NotFound):
            return None
        raise told from error
    state = plain(meta["e_tag"]), meta["last_modified"].timestamp()
    try:
        file = msgspec.json.decode(data, type=_File)
        sight = Sight(file.sight)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        why = f"{meta['size']} bytes" if meta["size"] > POINTER_BYTES_MAX else str(error)
        return Commit("", Sight.SHOWN, *state, f"damaged pointer: {why}")
    if file.format != FORMAT or file.version > VERSION:
        return Commit("", Sight.SHOWN, *state, f"a pointer of version {file.version}, which wants a newer ckptd on this node")
    name = key.rpartition("/")[2].removesuffix(POINTER)
    if not (file.attempt.startswith(f"{name}.") and file.attempt.endswith(PART)) or "/" in file.attempt:
        return Commit("", Sight.SHOWN, *state, f"damaged pointer: it names {file.attempt!r}, no attempt at {name}")
    return Commit(file.attempt, sight, *state)
