"""Tensors that another thread writes while they are copied before snapshot() returns (P1).

The training thread is inside snapshot() then and writes nothing, so a version counter that moves meanwhile proves that another
thread does. Such a tensor is copied again; where it is written each time the snapshot fails and names it.

torch moves a counter when the write is over, so one that stands still proves little: a copy can lie wholly within one long
write. A few bytes of each large tensor are compared for that. Whoever was caught, by this or by a write past a fence, is copied a
second time in each of the next snapshots: that copy waits for writes under way and is compared with all of its source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.machine.waiting import shown
from ckptd_client import _switches
from ckptd_client.copying import Copy
from ckptd_client.plan import Plan
from ckptd_client.versions import Versions, Watched

TRIES = 3  # second copies of what was written, before the snapshot fails
SETTLE_S = 0.1  # for so long no counter may move after a second copy, or twice as long as the copy took if that is longer,
SETTLE_MAX_S = 1.0  # but no longer than this
POLL_S = 0.001
QUIET_MAX = 8  # snapshots in a row in which a caught key was not written, until it is trusted again
SUSPECT = QUIET_MAX - 2  # what was written past a fence, most likely by the training thread, has only two of these to pass
LARGE_BYTES = 1 << 20  # a smaller copy takes less than 0.1 ms
SAMPLES, SAMPLE_BYTES = 16, 64  # of each larger one: compared in 1 us each, where the copy takes 100 us or more
CopyAgain = Callable[[Collection[int]], list[tuple[int, Copy]]]  # these entries of the plan; what was copied of which


class Races:
    """Of one client. ``_caught``: key of what another thread wrote -> snapshots in a row since in which it did not."""

    def __init__(self) -> None:
        self._caught: dict[str, int] = {}
        self._suspected: set[str] = set()
        self._plan: Plan | None = None

    def begin(self, plan: Plan, tensors: Sequence[Tensor]) -> Versions:
        """Before the first copy."""
        if plan is not self._plan:
            self._plan = plan
            past_fences = {one.key for one in plan.at_once if one.key in one.owner.written} - self._suspected
            self._suspected |= past_fences
            self._caught = dict.fromkeys(past_fences, SUSPECT) | self._caught
        return Versions(plan.at_once if _switches.VERSIONS else (), tensors)

    def end(
        self, noted: Versions, tensors: Sequence[Tensor], large: Sequence[tuple[int, Copy]], again: CopyAgain
    ) -> None:
        """After the last copy. ``large``: what was copied, by entry, of at least LARGE_BYTES. Raises CkptdError naming what another
        thread goes on writing."""
        moved = {one.entry for one in noted.moved()} | {at for at, copy in large if _differs_in_samples(copy)}
        if not moved and not self._caught:
            return
        watched = {one.entry: one for one in noted.watched}
        wrote = {one.key for one in watched.values() if one.entry in moved}
        doubted = [one for one in watched.values() if one.entry in moved or one.key in self._caught]
        for _ in range(TRIES):
            if not doubted:
                break
            doubted = _second_copy(doubted, tensors, again)
            wrote.update(one.key for one in doubted)
        self._count(wrote, {one.key for one in watched.values()})
        if doubted:
            raise goes_on_writing(one.key for one in doubted)

    def _count(self, wrote: set[str], keys: set[str]) -> None:
        quiet = {key: count + 1 for key, count in self._caught.items() if key in keys and count + 1 < QUIET_MAX}
        self._caught = quiet | dict.fromkeys(wrote, 0)


def goes_on_writing(keys: Iterable[str]) -> CkptdError:
    """Another thread does, however often these are copied."""
    return CkptdError(
        f"written by another thread while it was copied: {shown(keys)}",
        hint="stop that thread around snapshot(), or register a copy that it does not write",
    )


def _second_copy(doubted: Sequence[Watched], tensors: Sequence[Tensor], again: CopyAgain) -> list[Watched]:
    """Those of them that were written meanwhile."""
    noted, began = Versions(doubted, tensors), time.monotonic()
    copied = again({one.entry for one in doubted})
    now = time.monotonic()
    deadline = now + min(SETTLE_MAX_S, max(SETTLE_S, 2 * (now - began)))
    moved = noted.moved()
    while len(moved) < len(doubted) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        moved = noted.moved()
    written = {one.entry for one in moved}
    written |= {at for at, copy in copied if at not in written and any(copy.differs(*chunk) for chunk in copy.chunks())}
    return [one for one in doubted if one.entry in written]


def _differs_in_samples(copy: Copy) -> bool:
    """A write that goes through it has passed, since it was copied, at least one of these places."""
    if not copy.source.is_contiguous():
        return False
    places = range(0, copy.nbytes - SAMPLE_BYTES + 1, copy.nbytes // SAMPLES)
    return any(copy.differs(at, SAMPLE_BYTES) for at in places)
