"""What must be true of a storage before a job relies on it: rights, exclusive names, one storage for all nodes (D13)."""

from __future__ import annotations

import errno
import secrets
import threading
from contextlib import suppress

from ckptd.core.errors import CkptdError
from ckptd.persist.names import MANIFEST, PART, PROBE_DIR
from ckptd.persist.storage.base import AWAY, FULL, NotFound, Storage, StorageError, read_file
from ckptd.thread_pool import ThreadPool

TOKEN_BYTES_MAX = 256
PROBE = "probe-"
PATH_BYTES_MAX = 4096
SAYS_ITSELF = FULL | {AWAY, errno.EACCES, errno.EBUSY}  # an error that is no want of the storage's abilities
LISTS = "ckptd needs a storage that lists at once what was written: see that nothing between this node and it keeps old answers"
RACERS = 8  # who try to get one name at the same time
RACE_S = 5.0  # so long they wait for each other


def probe(storage: Storage) -> int:
    """One short life of a checkpoint and of a claim; the free bytes. Raises CkptdError with the remedy."""
    directory = f"{PROBE_DIR}/{PROBE}{secrets.token_hex(8)}"
    storage.begin(directory)
    try:
        _probe_names(storage, f"{directory}/name")
        _probe_commit(storage, directory)
    finally:
        storage.discard(directory)
    return storage.free_bytes()


def winners(storage: Storage) -> int:
    """How many of those who try to get one name at the same time are told that they have it. More than one: two starts of a job may
    both believe that they are its newest."""
    directory = f"{PROBE_DIR}/{PROBE}{secrets.token_hex(8)}"
    storage.begin(directory)
    start = threading.Barrier(RACERS, timeout=RACE_S)

    def race(number: int) -> bool:
        with suppress(threading.BrokenBarrierError):  # too few threads came: they race all the same
            start.wait()
        return storage.put_if_absent(f"{directory}/name", b"%d" % number)

    try:
        with ThreadPool(RACERS, "race") as pool:
            asked = [pool.submit(race, number) for number in range(RACERS)]
            return sum(one.result() for one in asked)
    finally:
        storage.discard(directory)


def is_probe(where: str, name: str) -> bool:
    """Did a preflight make the directory of this name in ``where``? One that was killed leaves it."""
    return name.startswith(PROBE) and where.rpartition("/")[2] == PROBE_DIR


def place_token(storage: Storage, node: str) -> str:
    """A fresh random token under this node's name, for the others to find through their own mounts."""
    token = secrets.token_hex(16)
    storage.begin(f"{PROBE_DIR}/tokens")
    path = _token_path(node)
    storage.delete(path)
    if not storage.put_if_absent(path, token.encode()):
        raise StorageError(
            "two daemons use one node id", where=storage.locate(path), hint="give each node its own id"
        )
    return token


def check_tokens(storage: Storage, tokens: dict[str, str]) -> list[str]:
    """tokens: node -> what it placed. The nodes whose token is not here: they write somewhere else."""
    return sorted(node for node, token in tokens.items() if read_token(storage, node) != token)


def read_token(storage: Storage, node: str) -> str | None:
    try:
        return read_file(storage, _token_path(node), TOKEN_BYTES_MAX).decode("ascii", "replace")
    except NotFound:
        return None


def _token_path(node: str) -> str:
    return f"{PROBE_DIR}/tokens/{node}"


def _probe_names(storage: Storage, path: str) -> None:
    try:
        won, lost = storage.put_if_absent(path, b"first"), storage.put_if_absent(path, b"second")
    except StorageError as error:
        if error.errno in SAYS_ITSELF:
            raise
        raise CkptdError(
            "the storage cannot give a name exclusively", where=error.where, hint=storage.needs
        ) from error
    if not won or lost or read_file(storage, path, TOKEN_BYTES_MAX) != b"first":
        raise CkptdError(
            "the storage lets a second writer take a name", where=storage.locate(path), hint=storage.needs
        )


def _probe_commit(storage: Storage, directory: str) -> None:
    """The first attempt is committed, the second one is not; what is hidden can be revealed or dropped, not both."""
    pointer, attempts = (
        f"{directory}/pointer",
        [f"{directory}/pointer.{name}{PART}" for name in ("one", "other")],
    )
    for attempt in attempts:
        storage.begin(attempt)
        writer = storage.put(f"{attempt}/file")
        writer.write(attempt.encode())
        writer.finish()
        if not any(entry.name.startswith("file") for entry in storage.list(attempt)):  # until the commit it has a name of its own
            raise CkptdError("what was put is not listed", where=storage.locate(attempt), hint=LISTS)
    won, lost = (
        storage.commit_if_absent(attempt, pointer, ["file"], {MANIFEST: b""}) for attempt in attempts
    )
    if not won or lost or read_file(storage, f"{pointer}/file", PATH_BYTES_MAX) != attempts[0].encode():
        text = "the storage commits a second attempt over the first one, or none"
        raise CkptdError(text, where=storage.locate(pointer), hint=storage.needs)
    turns = [storage.hide(pointer), storage.reveal(pointer), storage.hide(pointer), storage.drop(pointer)]
    if not all(turns) or storage.reveal(pointer) or storage.pointers(directory):
        raise CkptdError(
            "the storage cannot take a checkpoint out of sight", where=storage.locate(pointer), hint=storage.needs
        )
