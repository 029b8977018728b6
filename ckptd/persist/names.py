"""Where things lie below the storage root. docs/FORMAT.md shows the tree.

A checkpoint becomes visible when its directory gets the name ``step-...``; before that and while it is being deleted the
directory carries a suffix that no reader takes for a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId

MANIFEST = "manifest.json"
INDEX = "index.columns"  # the chunks that the manifest names; never *.safetensors, of which stock readers load all
WITHOUT = "without"  # marker file: optimizer state is left out on purpose; the manifest names the parameters
LOSSY = "lossy"  # marker file: values are as near as some bits come; the manifest names the tensors
KEEP = "keep"  # marker file: retention leaves this checkpoint alone; may be put there by hand
GRANT = "grant-"  # and a number, marker file: under which grant its step was captured
OF = "of-"  # and an epoch and a step, marker file: files of this checkpoint lie in that one's directory
VERIFIED = "verified"  # marker file: every byte was read back once
WHOLE = "whole"  # marker file: its parameters lie once more in CONSOLIDATED, as whole tensors
CONSOLIDATED = "consolidated"  # below a checkpoint
DAMAGED = "damaged"  # marker file: whoever read it back found damage; it holds the first word of it
READ = "read-"  # and the stem of a writer's files, marker file: it has read these back
EPOCHS = "epochs"  # of a job: the claims of its starts
PART = ".part"
GONE = ".gone"
DATA = ".safetensors"
ENCODED = ".encoded"  # data files of chunks that stock readers cannot read
SIDE = ".side"
PROBE_DIR = "preflight"  # where a daemon that starts tries out what its storage can do; no job has this name

_JOB = re.compile(r"[0-9]{1,10}/[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# A number has one form: two directories of one step would be taken for one.
_EPOCH_NUMBER, _STEP_NUMBER = r"([0-9]{6}|[1-9][0-9]{6,18})", r"([0-9]{10}|[1-9][0-9]{10,18})"
_EPOCH = re.compile(rf"epoch-{_EPOCH_NUMBER}")
_STEP = re.compile(rf"step-{_STEP_NUMBER}")
_ATTEMPT = re.compile(rf"step-{_STEP_NUMBER}\.[A-Za-z0-9_-]+\.part")
_ASIDE = re.compile(rf"step-{_STEP_NUMBER}\.[A-Za-z0-9_-]+\.(part|gone)")
_LEASE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})-.+")
_NOTE = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
_GRANT = re.compile(rf"{GRANT}([0-9]{{1,18}})")
_OF = re.compile(rf"{OF}([0-9]{{1,19}})-([0-9]{{1,19}})")
_RECORD = re.compile(rf"epoch-{_EPOCH_NUMBER}\.json")


def is_job(job: str) -> bool:
    return _JOB.fullmatch(job) is not None


def check_job(job: str) -> str:
    """``uid/name`` or CkptdError."""
    if not is_job(job):
        raise CkptdError(
            f"not a job: {job!r}", hint="a job is uid/name, the name of [A-Za-z0-9._-], at most 100"
        )
    return job


def check_attempt(attempt: str) -> str:
    if not _TOKEN.fullmatch(attempt):
        raise CkptdError(f"not an attempt: {attempt!r}", hint="1 to 64 of [A-Za-z0-9_-]")
    return attempt


def epochs_dir(job: str) -> str:
    return f"{check_job(job)}/{EPOCHS}"


def record_path(job: str, number: int) -> str:
    return f"{epochs_dir(job)}/epoch-{number:06d}.json"


def leases_dir(job: str) -> str:
    """One file per reader, named after the checkpoint it reads."""
    return f"{check_job(job)}/leases"


def released_dir(job: str) -> str:
    """One note per checkpoint that is to lose its mark KEEP as soon as it is there."""
    return f"{check_job(job)}/released"


def released_path(job: str, snapshot: SnapshotId) -> str:
    return f"{released_dir(job)}/{snapshot.epoch}-{snapshot.step}"


def released_of(name: str) -> SnapshotId | None:
    """The checkpoint that a note of this name is for."""
    found = _NOTE.fullmatch(name)
    return SnapshotId(int(found[1]), int(found[2])) if found else None


def lease_prefix(snapshot: SnapshotId) -> str:
    return f"{snapshot.epoch}-{snapshot.step}-"


def lease_of(name: str) -> SnapshotId | None:
    """The checkpoint that a lease of this name is for."""
    found = _LEASE.fullmatch(name)
    return SnapshotId(int(found[1]), int(found[2])) if found else None


def epoch_dir(job: str, epoch: int) -> str:
    return f"{check_job(job)}/epoch-{epoch:06d}"


def step_dir(job: str, snapshot: SnapshotId) -> str:
    return f"{epoch_dir(job, snapshot.epoch)}/step-{snapshot.step:010d}"


def attempt_dir(job: str, snapshot: SnapshotId, attempt: str) -> str:
    return f"{step_dir(job, snapshot)}.{check_attempt(attempt)}{PART}"


def place_of(path: str) -> tuple[str, str, SnapshotId] | None:
    """(storage root, job, checkpoint) of a path ROOT/UID/NAME/epoch-NNNNNN/step-NNNNNNNNNN. None: it is no such path."""
    *above, uid, name, epoch_name, step_name = ("", "", "", "", *path.split("/"))
    epoch, step, job = epoch_of_dir(epoch_name), step_of_dir(step_name), f"{uid}/{name}"
    if epoch is None or step is None or not is_job(job):
        return None
    return "/".join(above[4:]) or "/", job, SnapshotId(epoch, step)


def epoch_of_dir(name: str) -> int | None:
    found = _EPOCH.fullmatch(name)
    return int(found[1]) if found else None


def epoch_of_record(name: str) -> int | None:
    found = _RECORD.fullmatch(name)
    return int(found[1]) if found else None


def step_of_dir(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def grant_of(marks: Collection[str]) -> int:
    """Among a checkpoint's marker files. 0: it was written before they named it."""
    return next((int(found[1]) for found in map(_GRANT.fullmatch, marks) if found), 0)


def of_marks(marks: Collection[str]) -> frozenset[SnapshotId]:
    """Among a checkpoint's marker files: in whose directories files of it lie."""
    found = filter(None, map(_OF.fullmatch, marks))
    return frozenset(SnapshotId(int(of[1]), int(of[2])) for of in found)


def is_attempt(name: str) -> bool:
    return _ATTEMPT.fullmatch(name) is not None


def is_aside(name: str) -> bool:
    """An attempt, or a checkpoint that is being deleted; a job may end in the same letters."""
    return _ASIDE.fullmatch(name) is not None


def header_name(key: str, rank: int | None) -> str:
    """A tensor's name in the data files. ``__metadata__`` is the format's own word."""
    name = key if rank is None else f"{key}@rank{rank}"
    return f"{name}@tensor" if name == "__metadata__" else name


def writer_of(path: str) -> str:
    """The stem that all files of one writer's turn have in common."""
    return path.rpartition("-")[0]


def file_stem(node: str) -> str:
    """A node id as the beginning of a file name: what is unusual in it becomes ``_`` (the report keeps the real id)."""
    plain = re.sub(r"[^A-Za-z0-9-]", "_", node)[:64]
    return plain if plain[:1].isalnum() else f"n{plain}"
