"""What the trainers write down while they run, one JSON line per fact, and how the demo reads it back.

A line is one ``write`` of a whole line to a file opened for appending: a rank killed by SIGKILL loses nothing it wrote.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Notebook:
    """Writer of one rank of one run: ``{folder}/{run}.{rank}.jsonl``."""

    def __init__(self, folder: Path, run: str, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(folder / f"{run}.{rank}.jsonl", flags, 0o600)

    def write(self, kind: str, **facts: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, "time": time.time(), **facts}) + "\n").encode())


@dataclass
class Pages:
    """Reader of a run's notebooks; ``refresh`` reads what was appended since."""

    folder: Path
    run: str
    facts: list[dict[str, Any]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def refresh(self) -> Pages:
        for path in sorted(self.folder.glob(f"{self.run}.*.jsonl")):
            rank = int(path.name.split(".")[-2])
            self.facts += [fact | {"rank": rank} for fact in self._new_lines(path)]
        return self

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for line in whole.splitlines():
            yield json.loads(line)

    def of(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [f for f in self.facts if f["kind"] == kind and rank in (None, f["rank"])]

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        return self.of("step", rank)

    def last_step(self) -> int:
        """The newest step that any rank finished; 0 before the first."""
        return max((f["step"] for f in self.of("step")), default=0)

    def last(self, rank: int) -> int:
        """The newest step this rank finished; 0 before the first."""
        return max((f["step"] for f in self.of("step", rank)), default=0)

    def losses(self) -> dict[int, float]:
        return {f["step"]: f["loss"] for f in self.steps()}

    def digests_at(self, step: int) -> dict[str, str] | None:
        """Rank 0's record of the full tensors just before ``snapshot(step)``."""
        found = [f for f in self.of("digests", 0) if f["step"] == step]
        return dict(found[-1]["digests"]) if found else None
