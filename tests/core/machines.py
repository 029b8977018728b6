"""One machine of a running epoch under the test's hand, and the other daemons as the test plays them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import build_layout

TICK_S = 0.25
EPOCH = 5
I = TypeVar("I", bound=ins.Instruction)  # noqa: E741
M = TypeVar("M")


def member(name: str, domain: str = "") -> NodeInfo:
    return NodeInfo(name, f"tcp://{name}", name, domain or name, f"{name}#1")


def record_of(
    ranks: str = "ab",
    *,
    number: int = EPOCH,
    ancestry: tuple[SnapshotId, ...] = (),
    outside: str = "",
    nonce: str = "now",
) -> EpochRecord:
    """One letter per rank: the node it lives on."""
    nodes = tuple(member(name) for name in dict.fromkeys(ranks))
    return EpochRecord(number, nonce, tuple(ranks), nodes, ancestry, tuple(map(member, outside)))


def layout(rank: int, world: int = 2, *, plan: str = "") -> Layout:
    return build_layout(rank, world, [], 64, plan)


def fact(
    step: int, rank: int, tier: int = 0, *, epoch: int = EPOCH, grant: int | None = None, world: int = 2, **more: Any
) -> msg.HoldingFact:
    return msg.HoldingFact(at(step, epoch, grant), rank, tier, layout(rank, world).layout_id, **more)


def at(step: int, epoch: int = EPOCH, grant: int | None = None) -> SnapshotId:
    """grant None: the usual one."""
    return SnapshotId(epoch, step, usual_grant(step) if grant is None and epoch == EPOCH else grant or 0)


def usual_grant(step: int) -> int:
    """Most tests begin at step 6, and have each step after it granted."""
    return max(0, step - 6)


@dataclass
class Thread:
    """Where machines have things computed: done at once, unless ``slow``."""

    slow: bool = False
    asked: list[ins.Compute] = field(default_factory=list)

    def take(self, do: ins.Instruction) -> list[ev.Event]:
        self.asked += [do] if isinstance(do, ins.Compute) else []
        return [] if self.slow else self.ends()

    def ends(self) -> list[ev.Event]:
        """What took its time is done; from now on it takes none."""
        self.slow = False
        done, self.asked = self.asked, []
        return [ev.Computed(do.number, do.call()) for do in done]


class Node:
    """A daemon's machine. What it sends to itself arrives at once; ``done`` keeps every instruction."""

    def __init__(
        self, name: str, record: EpochRecord, policy: Policy | None = None, *, running: bool = True
    ) -> None:
        self.name, self.record = name, record
        self.machine = JobMachine("1/job", member(name), policy or Policy(replicas=1, durable=False))
        self.now = 100.0
        self.done: list[ins.Instruction] = []
        self.thread = Thread()
        self.feed(ev.Restarted(record))
        if running:
            for rank in self.ranks:
                self.join(rank)

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, where in enumerate(self.record.ranks) if where == self.name]

    def join(self, rank: int, **more: Any) -> list[ins.Instruction]:
        """A rank that comes back to its restarted daemon."""
        return self.feed(
            ev.RankJoined(
                rank, self.record.nonce, self.record.ranks, self.record.nodes, msg.RestoreAsk(), **more
            )
        )

    def feed(self, *events: ev.Event) -> list[ins.Instruction]:
        """What it did about these."""
        before, queue = len(self.done), list(events)
        while queue:
            for do in self.machine.handle(queue.pop(0), self.now):
                self.done.append(do)
                queue += self.thread.take(do)
                if isinstance(do, ins.Send) and do.to == self.name:
                    queue.append(ev.Received(self.name, do.message))
            self.machine.validate()
        return self.done[before:]

    def computed(self) -> list[ins.Instruction]:
        return self.feed(*self.thread.ends())

    def hear(self, sender: str, message: msg.Message) -> list[ins.Instruction]:
        return self.feed(ev.Received(sender, message))

    def tick(self, seconds: float = TICK_S) -> list[ins.Instruction]:
        before = len(self.done)
        for _ in range(max(1, round(seconds / TICK_S))):
            self.now += TICK_S
            self.feed(ev.Tick())
        return self.done[before:]

    def slots(self, rank: int, *ids: int) -> None:
        self.feed(ev.SlotsReady(rank, ids))

    def said(self, kind: type[M], to: str = "", since: int = 0) -> list[M]:
        return sent(self.done[since:], kind, to)

    @property
    def mark(self) -> int:
        return len(self.done)


def sent(done: list[ins.Instruction], kind: type[M], to: str = "") -> list[M]:
    """Messages of a kind, to one node or to anybody."""
    found = [do for do in done if isinstance(do, ins.Send) and to in ("", do.to)]
    return [do.message for do in found if isinstance(do.message, kind)]


def only(done: list[ins.Instruction], kind: type[I]) -> list[I]:
    return [do for do in done if isinstance(do, kind)]


class Member(Node):
    """Node b (or another) of an epoch whose steward, node a, is the test: ``order`` what it says."""

    def __init__(
        self, record: EpochRecord, policy: Policy | None = None, *, name: str = "b", **more: Any
    ) -> None:
        super().__init__(name, record, policy, **more)
        self.session = ""
        self._grant = 0
        self.hello("s1")

    def hello(self, session: str, sender: str = "a") -> list[ins.Instruction]:
        self.session = session
        return self.hear(sender, msg.OpenSession(self.record.number, session))

    def order(self, message: Any, **changed: Any) -> list[ins.Instruction]:
        """In the session, unless another one is named."""
        changed = {"session": self.session, **changed}
        return self.hear("a", replace(message, **changed))

    def grant(self, step: int) -> list[ins.Instruction]:
        self._grant = max(self._grant + 1, usual_grant(step))
        return self.order(msg.Grant(self.record.number, self._grant, step))

    def seal(self, slot: int, step: int, rank: int, **more: Any) -> list[ins.Instruction]:
        """The rank has filled the slot that it was given."""
        grant = more.pop("grant", self._grant)
        return self.feed(ev.SlotSealed(rank, slot, grant, step, layout(rank, self.record.world), (), **more))

    def capture(self, slot: int, step: int, rank: int) -> list[ins.Instruction]:
        return self.grant(step) + self.seal(slot, step, rank)

    def certify(self, serial: int, step: int, level: int, **more: Any) -> list[ins.Instruction]:
        changed = {key: more.pop(key) for key in ("session",) if key in more}
        durable, epoch = more.pop("durable", False), more.pop("epoch", EPOCH)
        return self.order(
            msg.Certificate(self.record.number, serial, at(step, epoch), level, 1, durable, **more), **changed
        )


class Steward(Node):
    """Node a, the steward. Rank 0 lives on it; the other daemons are played by the test."""

    def __init__(self, record: EpochRecord, policy: Policy | None = None, **more: Any) -> None:
        super().__init__("a", record, policy, **more)
        self.tick()
        self.others = {
            node.node: Other(self, node.node) for node in (*record.nodes, *record.holders) if node.node != "a"
        }

    def greet(self) -> Steward:
        """Every other daemon tells that it holds nothing."""
        for other in self.others.values():
            other.tell_inventory()
        return self

    def train(self, step: int = 6, free: int = 4) -> Steward:
        """Every rank is at this step and has so many free slots; so there are grants from the next step on."""
        for other in self.others.values():
            if not other.session:
                other.tell_inventory()
        for rank, where in enumerate(self.record.ranks):
            if where == "a":
                self.slots(rank, *range(100 * rank + 1, 100 * rank + 1 + free))
                self.feed(ev.RankProgress(rank, step))
            else:
                self.others[where].state(rank, step, free)
        return self

    def granted(self, step: int) -> int:
        """The number of the grant for this step."""
        return {grant.from_step: grant.grant for grant in self.said(msg.Grant, "a")}[step]

    def capture(self, step: int, *ranks: int, keep: bool = False) -> Steward:
        """These ranks (none named: all) seal it under its grant."""
        grant = self.granted(step)
        slots = {(do.grant, do.rank): do.slot for do in only(self.done, ins.GiveSlot)}
        for rank in ranks or range(self.record.world):
            where = self.record.ranks[rank]
            if where == "a":
                one = layout(rank, self.record.world)
                self.feed(ev.SlotSealed(rank, slots[grant, rank], grant, step, one, (), keep))
            else:
                self.others[where].sealed(grant, step, rank, keep=keep)
        return self

    def copy(self, step: int, rank: int, to: str) -> None:
        """A replica arrived at this node."""
        world = self.record.world
        if to == "a":
            self.feed(ev.ReplicaArrived(at(step), rank, 1, 1000 + 10 * step + rank, layout(rank, world), ()))
        else:
            self.others[to].held(fact(step, rank, 1, world=world))

    def protect(self, step: int) -> Steward:
        """Every rank's replica lies on the next member."""
        names = [node.node for node in self.record.nodes]
        for rank, where in enumerate(self.record.ranks):
            self.copy(step, rank, names[(names.index(where) + 1) % len(names)])
        return self

    def certificates(self, to: str = "b", since: int = 0) -> list[msg.Certificate]:
        return self.said(msg.Certificate, to, since)

    def level(self, step: int, to: str = "b", epoch: int = EPOCH) -> int | None:
        """The last that node ``to`` was told of a step."""
        found = [c.level for c in self.certificates(to) if c.snapshot == at(step, epoch)]
        return found[-1] if found else None


class Other:
    """Another daemon of the epoch: it answers the newest hello, and counts its messages."""

    def __init__(self, steward: Steward, name: str) -> None:
        self._steward, self.name = steward, name
        self.session, self.serial = "", 0

    def tell_inventory(self, *holdings: msg.HoldingFact, **more: Any) -> list[ins.Instruction]:
        """Also what makes a session begin anew."""
        newest = self._steward.said(msg.OpenSession, self.name)[-1]
        if newest.nonce != self.session:
            self.session, self.serial = newest.nonce, 0
        layouts = more.pop("layouts", None)
        if layouts is not None:
            self._steward.hear(
                self.name, msg.LayoutReply(EPOCH, {one.layout_id: one.encoded for one in layouts})
            )
        known = more.pop("known", self._steward.record)
        more = {"done": True, "turn": newest.turn, **more}
        return self.tell(msg.Inventory("", known, holdings, **more))

    def tell(self, message: Any, **changed: Any) -> list[ins.Instruction]:
        stamped = replace(message, **{"session": self.session, "serial": self.serial, **changed})
        self.serial += 1
        return self._steward.hear(self.name, stamped)

    def state(self, rank: int, step: int, free: int = 2, **more: Any) -> list[ins.Instruction]:
        return self.tell(msg.RankState(EPOCH, rank, step, free, **more))

    def sealed(self, grant: int, step: int, rank: int, **more: Any) -> list[ins.Instruction]:
        world = self._steward.record.world
        one = layout(rank, world, plan=more.pop("plan", ""))
        of = {k: more.pop(k) for k in ("digests", "keep") if k in more}
        told = replace(fact(step, rank, grant=grant, world=world, **of), layout_id=one.layout_id)
        return self.tell(msg.Sealed(EPOCH, told, one.plan_id, {one.layout_id: one.encoded}, **more))

    def missed(
        self, grant: int, rank: int, reason: str, written: dict[str, tuple[str, ...]] | None = None
    ) -> list[ins.Instruction]:
        return self.tell(msg.Missed(EPOCH, grant, rank, reason, written or {}))

    def held(self, what: msg.HoldingFact, *, lost: bool = False) -> list[ins.Instruction]:
        return self.tell(msg.Held(EPOCH, what, lost))
