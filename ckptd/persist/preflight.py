"""What must be true of a storage before a job relies on it: rights, exclusive names, one storage for all nodes (D13)."""

from __future__ import annotations

import secrets

from ckptd.core.errors import CkptdError
from ckptd.persist.names import file_stem
from ckptd.persist.storage.base import NotFound, Storage, StorageError, put_file, read_file, write_file

TOKEN_BYTES_MAX = 256
PROBE_DIR = "preflight"


def probe(storage: Storage) -> int:
    """Create, sync, publish exclusively, rename, read, delete; the free bytes. Raises CkptdError with the remedy."""
    directory = f"{PROBE_DIR}/probe-{secrets.token_hex(8)}"
    storage.make_dir(directory)
    try:
        _probe_links(storage, directory)
        _probe_rename(storage, directory)
        storage.sync_dir(directory)
    finally:
        storage.delete_tree(directory)
    return storage.free_bytes()


def place_token(storage: Storage, node: str) -> str:
    """A fresh random token under this node's name, for the others to find through their own mounts."""
    token = secrets.token_hex(16)
    storage.make_dir(f"{PROBE_DIR}/tokens")
    path = _token_path(node)
    storage.delete(path)
    if not put_file(storage, path, token.encode()):
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
    return f"{PROBE_DIR}/tokens/{file_stem(node)}"


def _probe_links(storage: Storage, directory: str) -> None:
    first, second, target = (f"{directory}/{name}" for name in ("first", "second", "target"))
    write_file(storage, first, b"first")
    write_file(storage, second, b"second")
    hint = "ckptd needs a file system with hard links (local disk, NFS, Lustre, CephFS)"
    try:
        won, lost = storage.publish(first, target), storage.publish(second, target)
    except StorageError as error:
        raise CkptdError(
            "the storage cannot publish a name exclusively", where=error.where, hint=hint
        ) from error
    if not won or lost or read_file(storage, target, TOKEN_BYTES_MAX) != b"first":
        raise CkptdError(
            "the storage lets a second writer take a name", where=storage.locate(target), hint=hint
        )


def _probe_rename(storage: Storage, directory: str) -> None:
    source, target = f"{directory}/one", f"{directory}/other"
    for path in (source, target):
        storage.make_dir(path)
        write_file(storage, f"{path}/file", b"")
    if storage.move_dir(source, target):
        text = "the storage renames a directory over another one"
        raise CkptdError(text, where=storage.locate(target), hint="ckptd needs a POSIX file system")
    storage.delete_tree(target)
    if not storage.move_dir(source, target):
        raise CkptdError("the storage cannot rename a directory", where=storage.locate(source))
