"""Reads what the ranks write down, in an order in which no effect comes before its cause."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = tuple[int, int, dict[str, Any]]  # generation, rank, fact
EFFECTS = frozenset({"level", "waited", "restored", "refused"})  # they may follow from another rank's lines


class Records:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._open: dict[tuple[int, int], tuple[Path, int]] = {}  # -> file, bytes read
        self._waiting: list[Line] = []

    def path(self, generation: int, rank: int) -> Path:
        made = self.folder / f"{generation}-{rank}.jsonl"
        self._open[generation, rank] = (made, 0)
        return made

    def read(self) -> Iterator[Line]:
        """What is new. An effect that one rank wrote down is given after all that was written anywhere before it, effects among
        themselves in the order of time: files are read twice, and what happened after the first reading began waits."""
        began = time.monotonic()
        lines = self._waiting + list(self._new()) + list(self._new())
        effects = sorted((line for line in lines if line[2]["k"] in EFFECTS), key=lambda line: float(line[2]["t"]))
        yield from (line for line in lines if line[2]["k"] not in EFFECTS)
        self._waiting = [line for line in effects if line[2]["t"] > began]
        yield from (line for line in effects if line[2]["t"] <= began)

    def close(self, generation: int) -> None:
        """Its ranks are dead, and all that they wrote was read."""
        for key in [key for key in self._open if key[0] == generation]:
            self._open.pop(key)[0].unlink(missing_ok=True)

    def _new(self) -> Iterator[Line]:
        for (generation, rank), (path, at) in list(self._open.items()):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a rank that is killed in its write leaves half a line
            self._open[generation, rank] = (path, at + len(whole))
            for line in whole.splitlines():
                yield generation, rank, json.loads(line)
