"""Graphs that a device replays (CUDA graphs and their like): our threads stay away from devices while one is captured, and a
replay is seen, whoever captured it and when (design D16).

In torch's default mode ("global") whatever a thread asks of a device meanwhile, be it whether an event has happened, breaks the
capture (pytorch#104555 was that in NCCL's watchdog). In the other modes threads are on their own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

POLL_S = 0.1  # a capture that nobody ends is over when its graph is gone
ALONE = frozenset({"thread_local", "relaxed"})  # modes of a capture which other threads cannot break
AWAY_S_MAX = 30.0  # a capture waits so long at most for what our threads have begun: a device may hang


@dataclass
class _Capture:
    guarded: bool  # would our threads break it?
    counters: object  # at its beginning
    writes: bool = False  # what is fenced, as somebody has said
    since: float = field(default_factory=time.monotonic)


class _Known:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.captures: weakref.WeakKeyDictionary[Any, _Capture] = weakref.WeakKeyDictionary()  # under way, by graph
        self.inside = 0  # threads of ours that ask something of a device
        self.harmless: weakref.WeakSet[Any] = weakref.WeakSet()  # captured before our eyes, and writing nothing that is fenced
        self.stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # captured before our eyes, with what is fenced written in it
        self.replays = self.steps = 0  # of all that are not harmless, and of those
        self.installed = False


_known = _Known()
_mine = threading.local()


def replays() -> int:
    """How often graphs that may write what is fenced were replayed in this process."""
    return _known.replays


def steps() -> int:
    """How many of these were of graphs whose capture was seen to hold an optimizer's step, or a fence."""
    return _known.steps


def captured_s() -> float | None:
    """For how long a graph has been captured that our threads stay away for; None without one."""
    since = [capture.since for capture in list(_known.captures.values()) if capture.guarded]
    return time.monotonic() - min(since) if since else None


def install(fence: Callable[[], None], counters: Callable[[], object]) -> None:
    """Once per process. ``fence``: called before a replay that may write what is fenced, and before a capture, as what that moves
    of the counters is no write. ``counters``: that which a write moves, also while it is only captured; a replay moves none."""
    if _known.installed:
        return
    _known.installed = True
    kinds = [getattr(torch.accelerator, "Graph", None), torch.cuda.CUDAGraph]
    for kind in kinds:
        if kind is not None:
            _wrap(kind, fence, counters)


def writes() -> None:
    """What is captured now writes what is fenced: an optimizer's step, which may move no counter, or what the user fences."""
    for capture in list(_known.captures.values()):
        capture.writes = True


@contextlib.contextmanager
def away() -> Iterator[None]:
    """What a thread of ours asks of a device, within. Waits for the end of a capture; never call it under a lock that the trainer
    takes."""
    with _known.changed:
        while not _enter():
            _known.changed.wait(POLL_S)
    try:
        yield
    finally:
        _leave()


@contextlib.contextmanager
def unless_captured() -> Iterator[bool]:
    """The same, and waits for nothing: False while a graph is captured. Ask nothing of a device then."""
    with _known.changed:
        entered = _enter()
    try:
        yield entered
    finally:
        if entered:
            _leave()


def _enter() -> bool:
    """Under the lock."""
    depth = getattr(_mine, "depth", 0)
    if depth == 0:
        if captured_s() is not None:
            return False
        _known.inside += 1
    _mine.depth = depth + 1
    return True


def _leave() -> None:
    _mine.depth -= 1
    if _mine.depth == 0:
        with _known.changed:
            _known.inside -= 1
            _known.changed.notify_all()


def _ended(graph: Any, counters: object) -> None:
    with _known.changed:
        capture = _known.captures.pop(graph, None)
        writes = capture is not None and capture.writes
        (_known.stepping.add if writes else _known.stepping.discard)(graph)
        if capture is not None and not writes and capture.counters == counters:
            _known.harmless.add(graph)
        else:
            _known.harmless.discard(graph)
        _known.changed.notify_all()


def _mode(graph: Any, pool: object = None, capture_error_mode: str = "", *_: Any, **__: Any) -> str:
    """``torch.cuda.CUDAGraph`` is told it at the beginning, ``torch.accelerator.Graph`` when it is made."""
    return capture_error_mode or getattr(graph, "capture_error_mode", "global")


def _wrap(kind: Any, fence: Callable[[], None], counters: Callable[[], object]) -> None:
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in _known.captures:
            return begin(self, *args, **kwargs)  # which raises
        fence()
        capture = _Capture(_mode(self, *args, **kwargs) not in ALONE, counters())
        with _known.changed:
            _known.captures[self] = capture
            if capture.guarded:
                _known.changed.wait_for(lambda: _known.inside == 0, AWAY_S_MAX)
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            _ended(self, None)
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> Any:
        try:
            return end(self)
        finally:
            _ended(self, counters())

    @functools.wraps(replay)
    def replayed(self: Any) -> Any:
        if self not in _known.harmless:
            _known.replays += 1
            _known.steps += self in _known.stepping
            fence()
        return replay(self)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replayed
