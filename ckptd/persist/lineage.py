"""Epoch claims on storage: exclusive, durable, one small file each (design D10)."""

from __future__ import annotations

import re

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.failpoint import failpoint
from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.life import is_grave
from ckptd.persist.manifest_file import lineage
from ckptd.persist.names import (
    epoch_dir,
    epoch_of_dir,
    epoch_of_record,
    epochs_dir,
    record_path,
    step_of_dir,
)
from ckptd.persist.storage.base import NotFound, Sight, Storage, StorageError, read_file
from ckptd.persist.sums import FileDamage, digest

FORMAT = "ckptd-epoch"
VERSION = 1
RECORD_BYTES_MAX = 64 << 20
GRAVE_BYTES_MAX = 1024  # of the claim of an epoch without ranks; those of large jobs need not be read to see that they are none


class _Claim(msgspec.Struct):
    format: str
    version: int
    record: EpochRecord


_FILE = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})","claim":(.*)\}\n', re.DOTALL)


def claim_epoch(storage: Storage, job: str, record: EpochRecord) -> tuple[bool, int]:
    """(ok, highest number taken). ok: the number is this record's alone, durably, and there is none above it.

    Repeating a claim with the same nonce is fine. Raises StorageError when the storage does not answer.
    """
    directory = epochs_dir(job)
    path = record_path(job, record.number)
    taken = highest_epoch(storage, job)
    if taken > record.number:
        return False, taken
    if taken == record.number and _claimed(storage, path, record.nonce):
        return True, taken
    storage.begin(directory)
    ok = storage.put_if_absent(path, _encode(record)) or _read(storage, path).nonce == record.nonce
    failpoint("persist.claim.published")
    storage.secure(directory)
    highest = highest_epoch(storage, job)
    return ok and highest == record.number, highest


def copy_claim(storage: Storage, job: str, record: EpochRecord) -> bool:
    """For a storage that checkpoints are copied to, of whatever epochs. False: another run of the job has that number there."""
    directory, path = epochs_dir(job), record_path(job, record.number)
    storage.begin(directory)
    ok = storage.put_if_absent(path, _encode(record)) or _read(storage, path).nonce == record.nonce
    storage.secure(directory)
    return ok


def _claimed(storage: Storage, path: str, nonce: str) -> bool:
    """Is it ours already? Its way is synced once more: whoever claimed may have died before."""
    try:
        ours = _read(storage, path).nonce == nonce
    except NotFound:
        return False
    storage.secure(path.rpartition("/")[0])
    return ours


def newest_record(storage: Storage, job: str) -> EpochRecord | None:
    """The record with the highest number; None when no epoch was ever claimed. Raises FileDamage, StorageError.

    A damaged or missing claim is replaced by the copy in any checkpoint of that epoch. An epoch that has neither a claim nor
    a checkpoint (its storage came back in the middle, its flush did not finish) leaves nothing to continue from.
    """
    for number in sorted(_epochs(storage, job), reverse=True):
        try:
            return _read(storage, record_path(job, number))
        except CkptdError as error:
            copy = _from_manifests(storage, job, number)
            if copy is not None:
                return copy
            if not isinstance(error, NotFound):
                raise
    return None


def forgotten_epoch(storage: Storage, job: str) -> int:
    """The newest epoch that stands for an order to forget the job; 0: none. Whatever storage has of earlier ones does not count,
    and goes (persist/forget.py). A claim that cannot be read is none. Raises StorageError."""
    small = [entry.name for entry in storage.list(epochs_dir(job)) if entry.size <= GRAVE_BYTES_MAX]
    for number in sorted((number for name in small if (number := epoch_of_record(name)) is not None), reverse=True):
        try:
            if is_grave(_read(storage, record_path(job, number))):
                return number
        except CkptdError as error:
            if isinstance(error, StorageError) and not isinstance(error, NotFound):
                raise
    return 0


def highest_epoch(storage: Storage, job: str) -> int:
    """Of claims, checkpoints and attempts; 0: none."""
    return max(_epochs(storage, job), default=0)


def _epochs(storage: Storage, job: str) -> set[int]:
    claimed = {epoch_of_record(entry.name) for entry in storage.list(epochs_dir(job))}
    written = {epoch_of_dir(entry.name) for entry in storage.list(job) if entry.is_dir}
    return {number for number in claimed | written if number is not None}


def _encode(record: EpochRecord) -> bytes:
    claim = msgspec.json.encode(_Claim(FORMAT, VERSION, record))
    return b'{"xxh3_128":"' + digest(claim).hex().encode() + b'","claim":' + claim + b"}\n"


def _read(storage: Storage, path: str) -> EpochRecord:
    where = storage.locate(path)
    found = _FILE.fullmatch(read_file(storage, path, RECORD_BYTES_MAX))
    if found is None or digest(found[2]).hex().encode() != found[1]:
        hint = "if the job shall go on, restore this file from a backup or move it away"
        raise FileDamage("damaged epoch record", where=where, hint=hint)
    try:
        claim = msgspec.json.decode(found[2], type=_Claim)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CkptdError(
            f"cannot read the epoch record: {error}", where=where, hint="upgrade ckptd"
        ) from error
    if claim.format != FORMAT or claim.version > VERSION:
        raise CkptdError(f"an epoch record of version {claim.version}", where=where, hint="upgrade ckptd")
    return claim.record


def _from_manifests(storage: Storage, job: str, number: int) -> EpochRecord | None:
    directory = epoch_dir(job, number)
    unread: StorageError | None = None  # which proves nothing
    for pointer in storage.pointers(directory):
        if step_of_dir(pointer.name) is None or pointer.sight is not Sight.SHOWN:
            continue
        try:
            return lineage(storage, f"{directory}/{pointer.name}")
        except (FileDamage, NotFound):
            continue
        except StorageError as error:
            unread = error
    if unread is not None:
        raise unread
    return None
