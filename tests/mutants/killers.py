"""What may kill a mutant: tests as pytest collected them, and seeds of the simulator. One runs at a time, in a forked child."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.mutants.targets import PACKAGE, SEEDS_LOOKED_AT, TRACED
from tests.sim.world import World

Lines = dict[str, list[int]]  # path below ckptd/ -> lines that ran


@dataclass(frozen=True)
class Killer:
    """``run`` returns what was found wrong, "" : nothing."""

    name: str
    run: Callable[[], str]


def killers_of(session: pytest.Session) -> dict[str, Killer]:
    found = [Killer(item.nodeid, _Item(item)) for item in session.items]
    found += [Killer(f"seed {seed}", Seed(seed)) for seed in range(SEEDS_LOOKED_AT)]
    return {killer.name: killer for killer in found}


class _Item:
    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(self) -> str:
        for report in runtestprotocol(self._item, nextitem=None, log=False):
            if report.failed:
                return f"{report.when}: {str(report.longrepr).strip().splitlines()[-1]}"
            if report.skipped:
                raise pytest.skip.Exception(str(report.longrepr))
        return ""


class Seed:
    """``mutant``: one of tests/sim/mutants.py."""

    def __init__(self, seed: int, mutant: str = "") -> None:
        self._seed, self._mutant = seed, mutant

    def __call__(self) -> str:
        try:
            World(self._seed, mutant=self._mutant).run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def reached_by(killer: Killer) -> tuple[float, Lines]:
    """Processor seconds, the tracing included, and the lines of the targets that ran."""
    seen: dict[str, _Seen] = {str(PACKAGE / path): _Seen() for path in TRACED}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        found = seen.get(frame.f_code.co_filename)
        return found.trace(frame) if found is not None else None

    threading.settrace(trace)
    sys.settrace(trace)
    began = time.process_time()
    try:
        wrong = killer.run()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    if wrong:
        raise AssertionError(f"without any mutant: {wrong}")
    seconds = time.process_time() - began
    lines = {path: sorted(seen[str(PACKAGE / path)].lines) for path in TRACED}
    return seconds, {path: found for path, found in lines.items() if found}


class _Seen:
    """Lines of one file. A function all of whose lines were seen is not traced any more."""

    def __init__(self) -> None:
        self.lines: set[int] = set()
        self._left: dict[CodeType, set[int]] = {}

    def trace(self, frame: FrameType) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = {line for _, _, line in code.co_lines() if line is not None}
        if not left:
            return None

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            self.lines.add(frame.f_lineno)
            left.discard(frame.f_lineno)
            return local

        return local(frame, "", None)
