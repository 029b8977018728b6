"""Nodes in processes of their own: what each does takes that process' time and memory."""

from __future__ import annotations

import gc
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from bench.scale.node import Counts, Node, Out
from bench.scale.state import State
from ckptd.daemon.server import GARBAGE_SEARCHED_AFTER

At = tuple[float, str, tuple[Any, ...]]  # when, at which node, what


@dataclass
class Told:
    """Of one node."""

    trains: bool
    levels: dict[int, int]
    durable: set[int]
    sealed: int


class Process:
    """``names``: of its nodes. Calls go through ``begin`` and ``answer``, so that several work at once."""

    def __init__(self, names: list[str], state: State, *, whole: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, names, state, whole), daemon=True)
        self._process.start()
        there.close()
        self.names, self.whole = names, whole

    def begin(self, call: str, *args: Any) -> None:
        self.link.send((call, args))

    def answer(self) -> Any:
        return self.link.recv()

    def ask(self, call: str, *args: Any) -> Any:
        self.begin(call, *args)
        return self.answer()

    def end(self) -> None:
        self.link.close()
        self._process.join()


class Served:
    def __init__(self, names: list[str], state: State, whole: bool) -> None:
        self._before = psutil.Process().memory_info().rss
        self.nodes = {name: Node(name, state, whole=whole) for name in names}

    def do(self, items: list[At]) -> list[Out]:
        """In this order. What comes of each is meant from its moment on."""
        found: list[Out] = []
        for now, name, item in items:
            node = self.nodes.get(name)
            found += [(now + after, to, what) for after, to, what in node.do(now, item)] if node is not None else []
        return found

    def tick(self, now: float) -> list[Out]:
        return self.do([(now, name, ("tick",)) for name in self.nodes])

    def told(self) -> dict[str, Told]:
        return {name: Told(node.trains, node.levels, node.durable, node.sealed) for name, node in self.nodes.items()}

    def lose(self, gone: set[str]) -> None:
        """These nodes die, and nobody reaches them any more."""
        for name in gone & self.nodes.keys():
            del self.nodes[name]
        for node in self.nodes.values():
            node.gone |= gone

    def counts(self) -> dict[str, Counts]:
        """Since the last time."""
        found = {name: node.counts for name, node in self.nodes.items()}
        for node in self.nodes.values():
            node.counts = Counts()
        return found

    def planned(self) -> dict[str, dict[str, float]]:
        return {name: node.planned for name, node in self.nodes.items()}

    def books(self) -> int:
        """Bytes that the process has grown by."""
        return int(psutil.Process().memory_info().rss - self._before)


def _serve(link: Connection, names: list[str], state: State, whole: bool) -> None:
    gc.freeze()  # as a daemon does
    gc.set_threshold(GARBAGE_SEARCHED_AFTER)
    served = Served(names, state, whole)
    while True:
        try:
            call, args = link.recv()
        except EOFError:
            return
        link.send(getattr(served, call)(*args))
