"""All nodes of a job under one simulated clock: a start, snapshots, a flush, a loss, a restore into another world."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bench.scale.node import LINK_S, Counts
from bench.scale.process import At, Process
from bench.scale.state import State
from ckptd.core.protocol import events as ev

TICK_S = 0.25  # simulated
STEP_S = 4.0
PHASE_S = 600.0  # at most
STEADY = 2  # snapshots
WHOLE = 6  # steward, successor and four members


@dataclass
class Phase:
    """One stretch of the job's life. By node: of the steward, of the busiest member that is whole, of all."""

    name: str
    ended: bool
    seconds: float  # simulated
    steward: Counts = field(default_factory=Counts)
    member: Counts = field(default_factory=Counts)
    sent: Counter[str] = field(default_factory=Counter)  # bytes of all nodes, by class
    messages: int = 0
    largest: tuple[int, str] = (0, "")
    failed: Counter[str] = field(default_factory=Counter)
    fetched: int = 0  # bytes of layouts, over bulk, of the whole nodes


class World:
    def __init__(self, state: State, whole: int) -> None:
        self.state, self.now, self._number = state, 0.0, count()
        names = [f"n{i}" for i in range(state.nodes)]
        self.processes = [Process([name], state, whole=True) for name in names[:whole]]
        if names[whole:]:
            self.processes.append(Process(names[whole:], state, whole=False))
        self._where = {name: process for process in self.processes for name in process.names}
        self._heap: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._tick_at, self._step_at, self._step = TICK_S, 1e18, 0
        self.gone: set[str] = set()

    def end(self) -> None:
        for process in self.processes:
            process.end()

    # --- the clock ----------------------------------------------------------------------------------------------
    def put(self, at: float, name: str, item: tuple[Any, ...]) -> None:
        if name not in self.gone:
            heapq.heappush(self._heap, (at, next(self._number), name, item))

    def _turn(self) -> None:
        """All that happens within the time that a message takes: nothing of it is the other's cause."""
        first = min(self._heap[0][0] if self._heap else 1e18, self._tick_at, self._step_at)
        self.now = first
        if self._tick_at == first:
            self._tick_at += TICK_S
            self._call_all("tick", first)
        if self._step_at == first:
            self._step, self._step_at = self._step + 1, self._step_at + STEP_S
            for name in self._where:
                self.put(first, name, ("step", self._step))
        batches: dict[int, list[At]] = {}
        while self._heap and self._heap[0][0] < first + LINK_S:
            at, _, name, item = heapq.heappop(self._heap)
            if name not in self.gone:
                batches.setdefault(self.processes.index(self._where[name]), []).append((at, name, item))
        for number, batch in batches.items():
            self.processes[number].begin("do", batch)
        for number in batches:
            self._take(self.processes[number].answer())

    def _call_all(self, call: str, *args: Any) -> None:
        for process in self.processes:
            process.begin(call, *args)
        for process in self.processes:
            self._take(process.answer() or [])

    def _take(self, outs: list[At]) -> None:
        for at, name, item in outs:
            self.put(at, name, item)

    # --- phases -------------------------------------------------------------------------------------------------
    def phase(self, name: str, ended: Callable[[], bool], every_s: float = TICK_S) -> Phase:
        began, looked = self.now, self.now
        done = False
        while not done and self.now < began + PHASE_S:
            self._turn()
            if self.now >= looked + every_s:
                looked, done = self.now, ended()
        found = Phase(name, done, self.now - began)
        for process in self.processes:
            for node, counts in process.ask("counts").items():
                self._count(found, node, counts, process.whole)
        return found

    def _count(self, found: Phase, node: str, counts: Counts, whole: bool) -> None:
        found.sent += counts.sent
        found.messages += counts.messages.total()
        found.largest = max(found.largest, counts.largest)
        found.failed += counts.failed
        found.fetched += counts.fetched
        if node == self.steward:
            found.steward = counts
        elif whole and sum(counts.cpu.values()) >= sum(found.member.cpu.values()):
            found.member = counts

    @property
    def steward(self) -> str:
        return next(name for name in self._where if name not in self.gone)

    def told(self) -> dict[str, Any]:
        """What those of the whole nodes know that have ranks."""
        some = set(self.state.ranks())
        asked = (process.ask("told") for process in self.processes if process.whole)
        return {name: told for found in asked for name, told in found.items() if name in some}

    def start(self, name: str, state: State, attempt: str) -> Phase:
        self._step_at, self.state = 1e18, state
        for node in set(state.ranks()):
            self.put(self.now + LINK_S, node, ("join", state, attempt))
        trains = lambda: all(told.trains for told in self.told().values())  # noqa: E731
        found = self.phase(name, trains)
        self._step_at = self.now + STEP_S
        return found

    def snapshot(self, name: str) -> Phase:
        """Until one that is newer than any is protected."""
        before = self._step
        return self.phase(name, lambda: all(self._safe(told, before) for told in self.told().values()))

    @staticmethod
    def _safe(told: Any, after: int) -> bool:
        return any(step > after and level >= 1 for step, level in told.levels.items())

    def seal(self) -> Phase:
        """Until all nodes that are whole have sealed a step of which none has heard yet that it can be restored."""
        before = max(told.sealed for told in self.told().values())
        found = self.phase("seal", lambda: min(told.sealed for told in self.told().values()) > before, every_s=0)
        told = self.told().values()
        newest = min(one.sealed for one in told)
        assert all(one.levels.get(newest, -1) < 0 for one in told), "a copy takes longer than a turn"
        return found

    def flush(self) -> Phase:
        step = max(next(iter(self.told().values())).levels)
        self.put(self.now, self.steward, ("event", ev.FlushAsked(step)))
        return self.phase("flush", lambda: all(step in told.durable for told in self.told().values()))

    def lose(self, names: set[str]) -> None:
        self.gone |= names
        self._call_all("lose", names)
        for process in self.processes:
            if set(process.names) <= self.gone:
                continue
            for name in process.names:
                for other in names:
                    self.put(self.now, name, ("event", ev.NodeDown(other)))

    def books(self) -> list[int]:
        """Of the whole nodes that live."""
        return [p.ask("books") for p in self.processes if p.whole and not set(p.names) <= self.gone]

    def planned(self) -> list[dict[str, float]]:
        return [found for p in self.processes if p.whole for found in p.ask("planned").values() if found]
