"""Has training moved on since the newest snapshot, and by steps that passed the fence? (design D6)

An optimizer's hook says so, or a counter of a parameter that moved, or a registered gradient that changed, or the user
(``client.stepped()``). A replayed graph moves no counter: whose step may be in it is not skipped, and what that optimizer writes
is copied before snapshot() returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptd_client import fence, gradients, graphs, nested, watch
from ckptd_client.entries import Owner
from ckptd_client.registry import Registry
from ckptd_client.troubles import Troubles
from ckptd_client.versions import Seen

SKIPS_MAX = 8  # snapshots in a row without a step that anybody saw; gradients may be accumulated over some
UNSEEN = "unseen steps"  # the kind of trouble


class Progress:
    """The training thread's."""

    def __init__(self, registry: Registry, troubles: Troubles) -> None:
        self._registry, self._troubles = registry, troubles
        self._seen: Seen | None = None  # at the newest capture
        self._steps = -1  # optimizer steps at the newest capture
        self._gradients: list[Any] = []  # marks of registered ones then
        self._called = -1  # newest step of a snapshot()
        self._serial = self._before = 0  # of watch.py, at that call and at the one before
        self._replays, self._replayed = graphs.replays(), False  # at that call; and was a graph replayed since the one before?
        self._graph_steps, self._graph_stepped = graphs.steps(), False  # the same of those that are known to make steps
        self._fenced = False  # by the user, since the newest step that he told of
        self._skipped: set[int] = set()  # steps, since the newest capture

    def begin_anew(self) -> None:
        """After a restore: whatever step comes first may be captured."""
        self._seen, self._steps, self._called = None, -1, -1
        self._skipped.clear()

    def called(self, step: int) -> None:
        """snapshot(step) begins."""
        if step > self._called:
            self._called, self._before, self._serial = step, self._serial, watch.now()
            self._replayed, self._replays = graphs.replays() > self._replays, graphs.replays()
            self._graph_stepped, self._graph_steps = graphs.steps() > self._graph_steps, graphs.steps()
        for owner in self._registry.of_kind("optimizer"):
            owner.replayed = owner.captured or self._may_be_replayed(owner)

    def moved(self, looks: Iterable[Seen]) -> bool:
        """``looks``: at parameters and registered tensors, made when nothing else tells. One that finds all as it was is enough."""
        seen = self._seen
        if self.stepped_since or seen is None or self._gradients != gradients.marks(self._registry):
            return True
        return all(seen.other_in(now) for now in looks)

    @property
    def stepped_since(self) -> bool:
        """Since the newest capture, as far as hooks and the user tell; or may a graph have made steps?"""
        return self.replays or self._steps < 0 or fence.steps() != self._steps

    def taken(self, seen: Seen) -> None:
        self._seen, self._steps, self._gradients = seen, fence.steps(), gradients.marks(self._registry)
        self._skipped.clear()
        self._troubles.clear(UNSEEN)

    def skipped(self, step: int) -> None:
        self._skipped.add(step)
        if len(self._skipped) >= SKIPS_MAX:
            text = f"{len(self._skipped)} snapshots in a row were skipped: no optimizer step was seen since the newest one"
            remedy = "where steps are made without calling an optimizer's step() (a replayed graph), call client.stepped()"
            self._troubles.report(UNSEEN, f"not protected: {text}; {remedy} after each")

    def fenced(self) -> None:
        """The user called fence()."""
        self._fenced = True

    def stepped(self) -> bool:
        """The user made a step that no hook saw. True when this shows that such steps escape the fence, which was not known."""
        fence.count_step()
        fenced, self._fenced = self._fenced, False
        found = [owner for owner in self._registry.of_kind("optimizer") if not (fenced or owner.writes_unfenced)]
        for owner in found:
            owner.writes_unfenced = True
        return bool(found)

    @property
    def replays(self) -> bool:
        """Are steps made by graphs?"""
        return any(owner.replayed for owner in self._registry.of_kind("optimizer"))

    @property
    def left(self) -> bool:
        """May a graph have made steps since the newest call? None was replayed, and those before it are known to have been made by
        replays that are seen."""
        return graphs.replays() != self._replays or (self.replays and not self._graph_stepped)

    def _may_be_replayed(self, owner: Owner) -> bool:
        """A graph was replayed, or it is made for one, and nobody called its step() between the newest two snapshots."""
        inner = nested.optimizers(owner.value)
        made_for = self._replayed or any(group.get("capturable") for one in inner for group in one.param_groups)
        return made_for and all(watch.last(one) <= self._before for one in inner)
