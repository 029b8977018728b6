"""Names that become keys and paths: checked once, where they come in."""

from __future__ import annotations

import re

from ckptd.core.errors import CkptdError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def job_key(uid: int, name: str) -> str:
    """The job as daemons and storage know it: "uid/name". Raises CkptdError for a name that could not be a directory."""
    if not _JOB_NAME.fullmatch(name):
        raise CkptdError(
            "job name is not usable", where=repr(name)[:120],
            hint="letters, digits, '.', '_', '-', starting with a letter or digit, at most 100",
        )  # fmt: skip
    return f"{uid}/{name}"
