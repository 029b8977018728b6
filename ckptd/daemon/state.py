"""What a daemon must not forget over a restart: who it is and the newest epoch of each job (design D10).

One small file per fact in the state directory, replaced atomically and fsynced with its directory: a daemon that came back
and had forgotten an epoch could serve a stale trainer.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord
from ckptd.directory import make_directories, sync_path
from ckptd.wire.path_lock import PathLock

TEMPORARY = ".tmp"
TAKEN = "another daemon uses this state directory"
TAKEN_HINT = "stop it; a second one, here or on a node with the same home directory, needs a state_dir of its own"

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StateDir:
    """Raises CkptdError when the directory cannot be written, which is found out at start. One that was in use and is only full
    does not keep a daemon from starting again: it may hold memory that nobody else has (P7). Then ``trouble`` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self._lock = PathLock(path / "daemon", TAKEN, TAKEN_HINT)
        was_used = (path / "epochs").is_dir()
        try:
            make_directories(path / "epochs", 0o700)
            self.write("probe", b"ok")
        except OSError as error:
            if not was_used or error.errno not in FULL:
                raise CkptdError(
                    f"state directory is not writable: {error.strerror}", where=str(path), hint="set state_dir"
                ) from error
            self.trouble = str(error)

    def alone(self) -> None:
        """Keep other daemons out until ``leave`` or death: two with one directory would have one name and one pair of ports.
        Then sweep what an earlier life left behind. Raises CkptdError when another one is there, OSError."""
        if self._lock.held:
            return
        try:
            self._lock.take()
        except OSError as error:
            if error.errno not in FULL:
                raise
            return  # look() tries again
        for place in (self.path, self.path / "epochs"):
            for left in place.glob(f"*{TEMPORARY}"):  # of a life that ended in the middle of write()
                left.unlink(missing_ok=True)

    def leave(self) -> None:
        self._lock.drop()

    def look(self) -> bool:
        """Can it be written now?"""
        try:
            self.write("probe", b"ok")
            self.alone()
            self.trouble = ""
        except (OSError, CkptdError) as error:
            self.trouble = str(error)
        return not self.trouble

    def persist_epoch(self, job: str, record: EpochRecord, ran: EpochRecord | None) -> None:
        """``ran``: see instructions.PersistEpoch."""
        facts = {"job": job, "record": asdict(record), "ran": asdict(ran) if ran is not None else None}
        body = json.dumps(facts).encode()
        self.write("epochs/" + _file_name(job), body)

    def forget(self, job: str) -> None:
        (self.path / "epochs" / _file_name(job)).unlink(missing_ok=True)

    def epochs(self) -> dict[str, tuple[EpochRecord, EpochRecord | None]]:
        """Every job's newest epoch, and the one before it that ran. A file that does not parse is an error: guessing an older
        epoch would be unsafe."""
        found: dict[str, tuple[EpochRecord, EpochRecord | None]] = {}
        for path in sorted((self.path / "epochs").glob("*.json")):
            try:
                body = json.loads(path.read_bytes())
                record = msgspec.convert(body["record"], EpochRecord)
                job = msgspec.convert(body["job"], str)
                found[job] = record, msgspec.convert(body.get("ran"), EpochRecord | None)
            except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
                raise CkptdError(
                    f"epoch record does not parse: {error}",
                    where=str(path),
                    hint="remove the file only if no trainer of an older start of this job is alive",
                ) from error
        return found

    def write(self, name: str, body: bytes) -> None:
        """One file, replaced atomically and fsynced with its directory."""
        path = self.path / name
        temporary = path.with_name(path.name + f".{os.getpid()}{TEMPORARY}")
        try:
            with open(temporary, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def _file_name(job: str) -> str:
    return job.replace("/", ".", 1) + ".json"  # "uid/name": the name holds no slash, the uid no dot
