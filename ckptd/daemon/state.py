"""What a daemon must not forget over a restart: who it is, the newest epoch of each job and its life, and what it has forgotten
(design D10, D19).

One small file per fact in the state directory, replaced atomically and fsynced with its directory: a daemon that came back
and had forgotten an epoch could serve a stale trainer.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.life import Life, Tombstone
from ckptd.directory import make_directories, sync_path
from ckptd.persist.storage.base import FULL
from ckptd.wire.path_lock import PathLock

log = logging.getLogger("ckptd.daemon")

TEMPORARY = ".tmp"
LIVES = frozenset(life.value for life in Life)
TAKEN = "another daemon uses this state directory"
TAKEN_HINT = "stop it; a second one, here or on a node with the same home directory, needs a state_dir of its own"

TOMBSTONES = "forgotten.json"  # of all jobs that are forgotten, in the order in which that happened
TOMBSTONES_MAX = 4096  # jobs; the oldest go first


@dataclass(frozen=True)
class Kept:
    """One job's file. ``ran``: see instructions.PersistEpoch. ``since``: unix time from which on the job has been in ``life``."""

    record: EpochRecord
    ran: EpochRecord | None = None
    life: str = ""
    since: float = 0.0
    sealed: int = 0  # see instructions.PersistSealed


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

    def persist_job(self, job: str, kept: Kept) -> None:
        facts = {
            "job": job,
            "record": asdict(kept.record),
            "ran": asdict(kept.ran) if kept.ran is not None else None,
            "life": {"state": kept.life, "since": kept.since},
            "sealed": kept.sealed,
        }
        self.write("epochs/" + _file_name(job), json.dumps(facts).encode())

    def forget(self, job: str) -> None:
        """Its tombstone is written before (``bury``)."""
        (self.path / "epochs" / _file_name(job)).unlink(missing_ok=True)

    def bury(self, tombstones: dict[str, Tombstone]) -> None:
        """Write all of them down. The oldest beyond TOMBSTONES_MAX are dropped from ``tombstones``. Raises OSError."""
        while len(tombstones) > TOMBSTONES_MAX:
            del tombstones[next(iter(tombstones))]
        rows = [[job, stone.epoch, stone.ordered, stone.sealed] for job, stone in tombstones.items()]
        self.write(TOMBSTONES, json.dumps(rows).encode())

    def tombstones(self) -> dict[str, Tombstone]:
        """Of the jobs forgotten so far. Raises CkptdError when the file does not parse."""
        path = self.path / TOMBSTONES
        try:
            rows = msgspec.json.decode(path.read_bytes(), type=list[tuple[str, int, int, int]])
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            hint = "remove the file only if no node that was away still holds memory of a forgotten job"
            raise CkptdError(f"the list of forgotten jobs does not parse: {error}", where=str(path), hint=hint) from error
        return {job: Tombstone(epoch, ordered, sealed) for job, epoch, ordered, sealed in rows}

    def jobs(self) -> dict[str, Kept]:
        """Every job's newest epoch, the one before it that ran, and its life. A file that does not parse is an error: guessing
        an older epoch would be unsafe."""
        found: dict[str, Kept] = {}
        for path in sorted((self.path / "epochs").glob("*.json")):
            try:
                body = json.loads(path.read_bytes())
                record = msgspec.convert(body["record"], EpochRecord)
                job = msgspec.convert(body["job"], str)
                ran = msgspec.convert(body.get("ran"), EpochRecord | None)
                life = msgspec.convert(body.get("life") or {}, dict[str, str | float])
                state, since = str(life.get("state", "")), float(life.get("since", 0.0))
                sealed = msgspec.convert(body.get("sealed", 0), int)
                found[job] = Kept(record, ran, state if state in LIVES else "", since, sealed)
            except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError) as error:
                raise CkptdError(
                    f"epoch record does not parse: {error}",
                    where=str(path),
                    hint="remove the file only if no trainer of an older start of this job is alive",
                ) from error
        return found

    def keep(self, name: str, body: bytes) -> None:
        """What the next life can do without: not kept where there is no room. Raises OSError otherwise."""
        try:
            self.write(name, body)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.warning("%s is not kept: %s", self.path / name, error)

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
