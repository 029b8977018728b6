"""A start of the job at its steward-elect, node a; the test plays node b and the storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.machine import JobMachine
from tests.core.machines import TICK_S, Thread, at, layout, member, only, sent

OLD = 4
ASK = msg.RestoreAsk()
A, B, C = map(member, "abc")
BEFORE = EpochRecord(OLD, "before", ("a", "b"), (A, B), (), (), (-1, ()))
BOTH = tuple(msg.HoldingFact(at(5, OLD), rank, 0, layout(rank).layout_id) for rank in (0, 1))
LAYOUTS = {layout(rank).layout_id: layout(rank).encoded for rank in (0, 1)}


class Elect:
    """Node a, where rank 0 of a new start stands; what it says to itself arrives at once."""

    def __init__(self, known: EpochRecord | None = None, ask: Any = ASK, **policy: Any) -> None:
        wanted = {
            "replicas": 1,
            "durable": False,
            "inventory_timeout_s": 2.0,
            "restore_timeout_s": 20.0,
            **policy,
        }
        me = replace(A, incarnation="a#2")  # restarted, so that it may have forgotten what the records name it in
        self.machine, self.now, self.done = JobMachine("1/job", me, Policy(**wanted)), 50.0, []  # type: ignore[var-annotated]
        self.nodes: tuple[NodeInfo, ...] = (A, B)
        self.ask = ask
        self.thread = Thread()
        self.feed(ev.Restarted(known))

    def feed(self, *events: ev.Event) -> list[ins.Instruction]:
        before, queue = len(self.done), [self._as_asked(event) for event in events]
        while queue:
            for do in self.machine.handle(queue.pop(0), self.now):
                self.done.append(do)
                queue += self.thread.take(do)
                if isinstance(do, ins.Send) and do.to == "a":
                    queue.append(ev.Received("a", do.message))
        return self.done[before:]

    def computed(self) -> list[ins.Instruction]:
        return self.feed(*self.thread.ends())

    def _as_asked(self, event: ev.Event) -> ev.Event:
        """Storage answers the newest question, if the test names none."""
        if not isinstance(event, ev.DurableRead) or event.turn:
            return event
        asked = [do.turn for do in only(self.done, ins.ReadDurable) if do.attempt == event.attempt]
        return replace(event, turn=max(asked, default=0))

    def hear(self, sender: str, message: msg.Message) -> list[ins.Instruction]:
        return self.feed(ev.Received(sender, message))

    def tick(
        self, seconds: float = TICK_S, *, reporting: bool = True, attempt: str = "now"
    ) -> list[ins.Instruction]:
        """Node b goes on to report its rank."""
        before = len(self.done)
        for number in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.feed(ev.Tick())
            if reporting and number % 4 == 0:
                self.report(attempt, opened=True)
        return self.done[before:]

    def join(self, attempt: str = "now", **more: Any) -> list[ins.Instruction]:
        """Rank 0, here."""
        return self.feed(ev.RankJoined(0, attempt, ("a", "b"), self.nodes, self.ask, running=False, **more))

    def report(
        self, attempt: str = "now", *, sender: str = "b", here: tuple[int, ...] = (1,), **more: Any
    ) -> list[ins.Instruction]:
        known = more.pop("known", None)
        ask = more.pop("ask", self.ask)
        ranks, nodes = more.pop("ranks", ("a", "b")), more.pop("nodes", self.nodes)
        return self.hear(sender, msg.JoinReport(attempt, ranks, nodes, here, ask, known, **more))

    def start(self, **more: Any) -> Elect:
        self.join()
        self.report(**more)
        return self

    def answer(
        self, sender: str, *holdings: msg.HoldingFact, attempt: str = "now", **more: Any
    ) -> list[ins.Instruction]:
        """It says the same as often as it is asked."""
        known, layouts, before = more.pop("known", None), more.pop("layouts", LAYOUTS), len(self.done)
        turn = -1
        while turn < (turn := self._turn(sender, attempt)):
            self.hear(sender, msg.Inventory(attempt, known, holdings, layouts, **more, turn=turn))
        return self.done[before:]

    def _turn(self, node: str, attempt: str) -> int:
        asked = [m.turn for m in sent(self.done, msg.InventoryRequest, node) if m.attempt == attempt]
        return max(asked, default=0)

    def claimed(self, ok: bool = True, taken: int = 0, reason: str = "") -> list[ins.Instruction]:
        claim = only(self.done, ins.ClaimEpoch)[-1]
        return self.feed(ev.EpochClaimed(claim.attempt, claim.record.number, ok, taken, reason))

    def opens(self, to: str = "b") -> list[msg.EpochOpen]:
        return sent(self.done, msg.EpochOpen, to)

    def open(self) -> msg.EpochOpen:
        """The whole way to an open epoch, with node b's answer."""
        self.start().answer("b", *BOTH, known=BEFORE, done=True)
        self.claimed()
        return self.opens()[-1]

    def refusals(self, to: str = "b") -> list[tuple[str, str]]:
        return [(m.attempt, m.code) for m in sent(self.done, msg.JoinRefused, to)]

    def vote(self, rank: int, phase: str, ok: bool = True, **more: Any) -> list[ins.Instruction]:
        number = more.pop("round_", self.opens()[-1].record.number)
        return self.hear(
            "b", msg.Vote(number, number, rank, phase, ok, more.pop("code", ""), more.pop("reason", ""))
        )

    @property
    def claim(self) -> EpochRecord:
        return only(self.done, ins.ClaimEpoch)[-1].record
