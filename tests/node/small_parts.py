"""Imported by a `ckptd` that a test starts (tests/node/started.py): its parts have PART_BYTES bytes, and it dies before the report
of part DIES_AT is written (from 0 on; -1: it does not)."""

from __future__ import annotations

import os
import signal
from typing import Any

from ckptd.persist import parts

_written: list[bytes] = []
_real = parts.write_chunks


def _counted(*args: Any, **more: Any) -> bytes:
    report = _real(*args, **more)
    if len(_written) == int(os.environ["DIES_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    _written.append(report)
    return report


parts.PART_BYTES = int(os.environ["PART_BYTES"])
parts.write_chunks = _counted
