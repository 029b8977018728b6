"""What of an export is there already, a line for each part; and who may write it now: one process, or several that share it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ckptd.choices import Share
from ckptd.core.errors import CkptdError

NAME = "journal"
TURN_S, LOOKS_EACH_S = 2.0, 0.05  # so long who shares it waits for another to begin it
Row = dict[str, Any]


class Journal:
    """``rows``: of all who have written by this plan, by part. A share has a file of its own, and holds the first one's lock
    together with the others."""

    def __init__(self, folder: Path, plan: str, share: Share | None, forget: Callable[[], None]) -> None:
        """forget: takes away what was written by another plan. Raises CkptdError: somebody else writes it."""
        self._folder = folder
        self._common = open(folder / NAME, "a+", encoding="utf-8")  # noqa: SIM115 - it holds the lock
        self._own = self._common
        self.rows: dict[str, Row] = {}
        try:
            self._begin(plan, share, forget)
        except BaseException:
            self.close()
            raise

    def _begin(self, plan: str, share: Share | None, forget: Callable[[], None]) -> None:
        alone = _locked(self._common, fcntl.LOCK_EX)
        if not alone and (share is None or not self._joined()):
            raise self._taken()
        if _rows(self._common, repair=alone)[:1] != [{"plan": plan}]:
            if not alone:
                raise self._taken()
            for path in self._folder.glob(f"{NAME}-*"):
                path.unlink()
            self._common.truncate(0)
            forget()
            self.note({"plan": plan})
        if share is not None:
            name = f"{NAME}-{share.number + 1}-of-{share.of}"
            self._own = open(self._folder / name, "a+", encoding="utf-8")  # noqa: SIM115 - the same
            if not _locked(self._own, fcntl.LOCK_EX):
                raise self._taken()
            _rows(self._own, repair=True)
            fcntl.flock(self._common, fcntl.LOCK_SH)
        for path in sorted(self._folder.glob(f"{NAME}*")):
            with path.open(encoding="utf-8") as file:
                self.rows |= {row["part"]: row for row in _rows(file, repair=False) if "part" in row}

    def _joined(self) -> bool:
        """It is held alone by who begins it, for a moment, or by who writes all of it."""
        deadline = time.monotonic() + TURN_S
        while not _locked(self._common, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOKS_EACH_S)
        return True

    def _taken(self) -> CkptdError:
        return CkptdError("another export is writing it", where=str(self._folder), hint="wait for it, or stop it")

    def note(self, row: Row) -> None:
        if "part" in row:
            self.rows[row["part"]] = row
        self._own.write(json.dumps(row) + "\n")
        self._own.flush()

    @property
    def closed(self) -> bool:
        return self._common.closed

    def close(self) -> None:
        self._own.close()
        self._common.close()


def _locked(file: TextIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _rows(file: TextIO, *, repair: bool) -> list[Row]:
    """Up to a line that the death of who wrote it has torn. repair: that is cut off, so that the next one stands alone."""
    file.seek(0)
    rows, whole = [], 0
    for line in file.read().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            break
        rows.append(row)
        whole += len(line.encode())
    if repair:
        os.truncate(file.fileno(), whole)
    return rows
