"""One node of the bench: the machine that ships behind its codec, and a shell whose memory, storage and ranks always answer.

What is counted is what a daemon does for the control plane: decoding, handling, encoding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from bench.scale.maps import Clock, planned
from bench.scale.state import State
from ckptd.core.errors import CkptdError
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.source_index import Held
from ckptd.wire.codec import decode, encode

LINK_S = 0.001  # simulated
COPY_S = 0.2

Out = tuple[float, str, tuple[Any, ...]]  # in so many seconds, at this node, what


@dataclass
class Counts:
    """cpu: seconds by what was handled. sent: bytes, messages: how many, by their class."""

    cpu: dict[str, float] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    longest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")
    failed: Counter[str] = field(default_factory=Counter)
    fetched: int = 0  # bytes of layouts, over bulk

    def handled(self, what: str, seconds: float) -> None:
        self.cpu[what] = self.cpu.get(what, 0.0) + seconds
        self.longest = max(self.longest, (seconds, what))

    def said(self, what: str, nbytes: int) -> None:
        self.sent[what] += nbytes
        self.messages[what] += 1
        self.largest = max(self.largest, (nbytes, what))


class Node:
    def __init__(self, name: str, state: State, *, whole: bool) -> None:
        self.name, self.whole = name, whole
        self.state = state
        self.counts = Counts()
        me = next(node for node in state.members() if node.node == name)
        policy = Policy(replicas=1, own_slots=3, durable=True, flush_every_steps=0, steward_timeout_s=30.0,
                        inventory_timeout_s=60.0, join_timeout_s=600.0)  # fmt: skip
        self.machine = JobMachine("0/scale", me, policy)
        self.levels: dict[int, int] = {}  # step -> level that local ranks were told
        self.durable: set[int] = set()
        self.sealed = -1  # newest step that a local rank has sealed
        self.trains = False
        self.planned: dict[str, float] = {}  # seconds of one restore, by what
        self._out: list[Out] = []
        self._loop: dict[int, Any] = {}
        self._slots = self._looped = 0
        self.gone: set[str] = set()
        self._steps: dict[int, int] = {}  # rank -> newest step called
        self._granted: list[tuple[int, int, int, int]] = []  # rank, slot, grant, step that is not called yet
        self._encoded_last: tuple[object, bytes] = (None, b"")
        self._layouts: WeakValueDictionary[str, Layout] = WeakValueDictionary()
        self._worlds: dict[int, State] = {}  # by epoch

    # --- what happens -------------------------------------------------------------------------------------------
    def do(self, now: float, item: tuple[Any, ...]) -> list[Out]:
        self._out = []
        kind, *rest = item
        getattr(self, "_on_" + kind)(now, *rest)
        return self._out

    def _feed(self, now: float, what: str, make: Callable[[], ev.Event | None]) -> None:
        """``make`` decodes, where there is something to decode."""
        began = time.thread_time()
        event = make()
        done = self.machine.handle(event, now) if event is not None else []
        sent: list[tuple[str, str, bytes]] = []
        for do in done:
            if isinstance(do, ins.Send) and do.to != self.name:
                name = type(do.message).__name__
                try:
                    sent.append((do.to, name, self._encoded(do.message)))
                except CkptdError:
                    self.counts.failed[name] += 1
        self.counts.handled(what, time.thread_time() - began)
        for to, name, data in sent:
            self.counts.said(name, len(data))
            self._out.append((LINK_S, to, ("message", self.name, name, data)))
        for do in done:
            if not isinstance(do, ins.Send) or do.to == self.name:
                getattr(self, "_do_" + type(do).__name__, _nothing)(do)

    def _encoded(self, message: object) -> bytes:
        """As a link does it: the same message to many is encoded once."""
        if self._encoded_last[0] is not message:
            self._encoded_last = message, encode(message)
        return self._encoded_last[1]

    def _event(self, event: ev.Event, now: float) -> None:
        self._feed(now, type(event).__name__, lambda: event)

    def _later(self, seconds: float, *item: Any) -> None:
        self._out.append((seconds, self.name, item))

    def _on_event(self, now: float, event: ev.Event) -> None:
        self._event(event, now)

    def _on_message(self, now: float, sender: str, name: str, data: bytes) -> None:
        self._feed(now, name, lambda: ev.Received(sender, decode(data)))  # type: ignore[arg-type]

    def _on_loop(self, now: float, number: int) -> None:
        message = self._loop.pop(number)
        self._feed(now, type(message).__name__, lambda: ev.Received(self.name, message))

    def _on_join(self, now: float, state: State, attempt: str) -> None:
        """A start of the job. Ranks of an earlier one are gone."""
        for rank in self._steps:
            self._event(ev.RankLeft(rank, False), now)
        self.state, self.trains, self._steps, self._granted = state, False, {}, []
        ranks, nodes = state.ranks(), state.members()
        for rank, node in enumerate(ranks):
            if node == self.name:
                self._steps[rank] = -1
                self._event(ev.RankJoined(rank, attempt, ranks, nodes, msg.RestoreAsk(), running=False), now)

    def _on_step(self, now: float, step: int) -> None:
        """Every rank calls snapshot()."""
        for rank in self._steps:
            self._steps[rank] = step
            self._event(ev.RankProgress(rank, step), now)
        due = [granted for granted in self._granted if granted[3] <= step]
        self._granted = [granted for granted in self._granted if granted[3] > step]
        for granted in due:
            self._later(LINK_S, "sealed", *granted)

    def _on_sealed(self, now: float, rank: int, slot: int, grant: int, step: int) -> None:
        if self._steps.get(rank, -1) < step:
            self._granted.append((rank, slot, grant, step))
            return
        self.sealed = step
        layout = self.state.layout(rank)
        digests, decoded = self.state.digests(layout, step), self._decoded(layout)
        self._feed(now, "SlotSealed", lambda: ev.SlotSealed(rank, slot, grant, step, decoded(), digests))

    def _decoded(self, layout: Layout) -> Callable[[], Layout]:
        """A daemon decodes a layout once, as long as something has it."""
        found = self._layouts.get(layout.layout_id)
        if found is not None:
            return lambda: found
        name, data = layout.layout_id, layout.encoded

        def decode_now() -> Layout:
            made = self._layouts[name] = Layout.decode(data)
            return made

        return decode_now

    def _on_copy(self, now: float, sender: str, do: ins.Replicate) -> None:
        refused = self.machine.admits_replica(do.snapshot, do.rank)
        if not refused:
            self._slots += 1
            state = self._worlds[do.snapshot.epoch]
            layout = state.layout(do.rank)
            digests, decoded = state.digests(layout, do.snapshot.step), self._decoded(layout)
            more = do.snapshot, do.rank, do.tier, self._slots
            self._feed(now, "ReplicaArrived", lambda: ev.ReplicaArrived(*more, decoded(), digests))
        sent = ev.ReplicaSent(do.snapshot, do.rank, do.tier, do.to, not refused, refused)
        self._out.append((LINK_S, sender, ("event", sent)))

    def _on_tick(self, now: float) -> None:
        self._event(ev.Tick(), now)

    # --- what is to be done -------------------------------------------------------------------------------------
    def _do_Send(self, do: ins.Send) -> None:  # noqa: N802
        self._loop[self._looped] = do.message
        self._later(LINK_S, "loop", self._looped)
        self._looped += 1

    def _do_Connect(self, do: ins.Connect) -> None:  # noqa: N802
        for node in do.nodes:
            if node.node != self.name and node.node not in self.gone:
                self._later(LINK_S, "event", ev.NodeUp(node.node))

    def _do_Compute(self, do: ins.Compute) -> None:  # noqa: N802
        began = time.thread_time()
        done = ev.Computed(do.number, do.call())
        took = time.thread_time() - began  # it counts, and holds up nothing
        self.counts.cpu["computed"] = self.counts.cpu.get("computed", 0.0) + took
        self._later(LINK_S, "event", done)

    def _do_ReadDurable(self, do: ins.ReadDurable) -> None:  # noqa: N802
        self._later(LINK_S, "event", ev.DurableRead(do.attempt, True, turn=do.turn))

    def _do_ClaimEpoch(self, do: ins.ClaimEpoch) -> None:  # noqa: N802
        self._later(LINK_S, "event", ev.EpochClaimed(do.attempt, do.record.number, True))

    def _do_PrepareRestore(self, do: ins.PrepareRestore) -> None:  # noqa: N802
        self._worlds[do.record.number] = self.state
        if do.snapshot is None:
            return
        if self.whole:
            self._plan(do, self._worlds[do.snapshot.epoch])
        for rank in do.ranks:
            self._later(COPY_S, "event", ev.RankFetched(rank, do.round, True))

    def _do_LoadNow(self, do: ins.LoadNow) -> None:  # noqa: N802
        for rank in self._steps:
            self._later(LINK_S, "event", ev.RankLoaded(rank, do.round))

    def _do_FinishRestore(self, do: ins.FinishRestore) -> None:  # noqa: N802
        self.trains = True
        for rank in self._steps:
            first, self._slots = self._slots + 1, self._slots + 3
            self._later(LINK_S, "event", ev.SlotsReady(rank, tuple(range(first, first + 3))))

    def _do_FailJoin(self, do: ins.FailJoin) -> None:  # noqa: N802
        self.counts.failed[f"join: {do.code} {do.reason}"[:300]] += 1

    def _do_GiveSlot(self, do: ins.GiveSlot) -> None:  # noqa: N802
        self._later(LINK_S, "sealed", do.rank, do.slot, do.grant, do.from_step)

    def _do_TakeBack(self, do: ins.TakeBack) -> None:  # noqa: N802
        self._granted = [granted for granted in self._granted if granted[2] != do.grant]
        self._later(LINK_S, "event", ev.RankMissed(do.rank, do.grant, do.reason))

    def _do_TellLevel(self, do: ins.TellLevel) -> None:  # noqa: N802
        self.levels[do.snapshot.step] = do.level
        if do.durable:
            self.durable.add(do.snapshot.step)

    def _do_Replicate(self, do: ins.Replicate) -> None:  # noqa: N802
        self._out.append((COPY_S, do.to, ("copy", self.name, do)))

    def _do_WriteFiles(self, do: ins.WriteFiles) -> None:  # noqa: N802
        self._later(COPY_S, "event", ev.FilesWritten(do.snapshot, do.attempt, True))

    def _do_Commit(self, do: ins.Commit) -> None:  # noqa: N802
        self._later(LINK_S, "event", ev.CommitDone(do.snapshot, do.attempt, True))

    # --- restore ------------------------------------------------------------------------------------------------
    def _plan(self, do: ins.PrepareRestore, stored: State) -> None:
        """What each node does for its ranks (recover/rebuild.py): learn all layouts, read those that it lacks, index, plan."""
        known = {held.layout_id: held for held in self.machine.slots.layouts().values()}
        leaves = {}
        for source in do.sources:
            if source.layout_id not in known and source.layout_id not in leaves:
                leaves[source.layout_id] = stored.layout(source.rank).leaf
        self.counts.fetched += sum(map(len, leaves.values()))
        clock = Clock()
        tables = {table.digest: table for table in stored.tables()}
        known |= clock.of("read", lambda: {name: Layout.decode(data, tables.get) for name, data in leaves.items()})
        held = [Held(s.node, s.rank, s.tier, known[s.layout_id]) for s in do.sources if s.layout_id in known]
        wants = {rank: self.state.wants(rank) for rank in do.ranks}
        for rank, plan in planned(clock, held, wants, self.name, do.per_rank).items():
            asked = wants[rank]
            own = {f"t:{want.key}" for want in asked} & set(do.per_rank)  # as another world's ranks have them, or nobody
            missing = [number for number, _ in plan.uncovered if f"t:{asked[number].key}" not in own]
            if missing:
                self.counts.failed["wants nowhere"] += len(missing)
        self.planned = clock.took


def _nothing(do: ins.Instruction) -> None:
    """Its answer is not waited for."""
