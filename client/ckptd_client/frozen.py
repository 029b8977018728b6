"""Which slot a snapshot's frozen part lies in: the one that holds it already, or a new one to capture it into (design D6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ckptd.wire import rank as wire
from ckptd_client.capture import Engine
from ckptd_client.entries import Mode
from ckptd_client.gather import local_tensor
from ckptd_client.handles import Skip, Thawed
from ckptd_client.plan import Plan, Source
from ckptd_client.segments import SlotView
from ckptd_client.session import Session
from ckptd_client.statics import Content, Look
from ckptd_client.troubles import Troubles

CHANGES_MAX = 3  # of parameters that were called frozen, before they are captured with everything else


class FrozenSlot(NamedTuple):
    slot: SlotView
    to_fill: bool
    content: Content


class FrozenCapture:
    def __init__(self, session: Session, engine: Engine, troubles: Troubles) -> None:
        self._session, self._engine, self._troubles = session, engine, troubles
        self._changes = 0
        self._look = Look()
        self._counted: Content | None = None  # what they were at the newest change
        self._asked = False  # for a slot, since the newest one that was not needed

    def slot_for(self, plan: Plan, tensors: Sequence[Tensor], patience_s: float) -> FrozenSlot:
        """For a plan with a frozen part; the slot comes pinned. Raises Skip: there is none now; Thawed: none is
        needed. ``patience_s``: to wait for one."""
        self._wait_until_filled(patience_s)
        session, statics = self._session, self._engine.statics
        with session.changed:
            statics.keep_only(set(session.segments.slots.values()))
        content = self._content(plan, tensors)
        held = statics.slot_of(content)
        if held is not None:
            return FrozenSlot(held, False, content)
        self._count(plan, statics.changed(content), content)
        kept = self._kept(content.layout_id)
        if kept is not None:
            statics.begin(kept, content, found=True)
            return FrozenSlot(kept, False, content)
        fresh = self._fresh(plan, patience_s)
        statics.begin(fresh, content)
        return FrozenSlot(fresh, True, content)

    def _content(self, plan: Plan, tensors: Sequence[Tensor]) -> Content:
        sources = _sources(plan)
        found = [(tensors[source.entry], local_tensor(source, tensors)) for source in sources]

        def boxes() -> list[Tensor]:
            return [source.part.view(local.detach()) for source, (_, local) in zip(sources, found, strict=True)]

        return self._look.at(plan.layout.frozen.layout_id, found, boxes)

    def _wait_until_filled(self, patience_s: float) -> None:
        """By an earlier snapshot. A device fills it beside training; nobody waits for that but who has patience."""
        job = self._engine.fills_frozen()
        if job is None:
            return
        bound_s = float(self._session.policy.get("fence_timeout_s", 0.0)) if job.device is None else 0.0
        if not self._engine.drain(max(bound_s, patience_s)):
            raise Skip("frozen parameters are still being captured")

    def not_needed(self, plan: Plan) -> None:
        """The plan has no frozen part (any more): its memory may go once no snapshot leans on it."""
        session = self._session
        if not (session.frozen_slot >= 0 or self._asked) or not self._engine.idle:
            return  # never had one, or a capture under way may still name it
        self._engine.statics.forget()
        with session.changed:
            session.frozen_slot, self._asked = -1, False
        session.link.send(wire.Resize(plan.layout.frozen_at, wire.NOTHING_FROZEN, plan.record_bytes))

    def _count(self, plan: Plan, changed: list[int], content: Content) -> None:
        """What changes again and again is not frozen: its owner's such parameters are copied with the others from then on.
        A change counts once, however many snapshots wait for the memory to capture it into."""
        if not changed or content == self._counted:
            return
        self._counted = content
        self._changes += 1
        if self._changes >= CHANGES_MAX:
            sources = _sources(plan)
            for at in changed:
                sources[at].owner.thawed = True
            raise Thawed(f"{sources[changed[0]].key} has requires_grad=False and changes: it is captured each time now")

    def _kept(self, layout_id: str) -> SlotView | None:
        """What an earlier life captured under the same layout, pinned; once."""
        session = self._session
        with session.changed:
            slot = session.segments.slots.get(session.frozen_slot)
            if slot is None or session.frozen_holds != layout_id or not self._engine.statics.may_fill(slot):
                return None
            slot.segment.pin()
            return slot

    def _fresh(self, plan: Plan, patience_s: float) -> SlotView:
        """A slot that no snapshot leans on. Asks for one where there is none."""
        fresh = self._pinned(plan)
        if fresh is not None:
            return fresh
        live, frozen = plan.layout.frozen_at, plan.layout.frozen_bytes
        self._asked = True
        self._session.link.send(wire.Resize(live, frozen, plan.record_bytes))
        if patience_s > 0:
            self._session.wait(lambda: self._find(plan) is not None, time.monotonic() + patience_s)
            fresh = self._pinned(plan)
        if fresh is None:
            text = f"{frozen} bytes of frozen parameters need a new slot; asked for it"
            self._troubles.report("memory", text)
            raise Skip("no memory")
        return fresh

    def _pinned(self, plan: Plan) -> SlotView | None:
        with self._session.changed:
            slot = self._find(plan)
            if slot is not None:
                slot.segment.pin()
        return slot

    def _find(self, plan: Plan) -> SlotView | None:
        """Under the session's lock."""
        slot = self._session.segments.slots.get(self._session.frozen_slot)
        large = slot is not None and slot.capacity >= plan.layout.frozen_bytes
        free = not self._session.frozen_holds and slot is not None and self._engine.statics.may_fill(slot)
        return slot if large and free else None


def _sources(plan: Plan) -> list[Source]:
    return [source for source in plan.sources if source.mode is Mode.STATIC]
