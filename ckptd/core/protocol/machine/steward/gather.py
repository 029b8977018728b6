"""Before an epoch opens: wait for all ranks, ask everyone who may hold memory, read what is durable (design D10, D11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.protocol.events import DurableRead
from ckptd.core.protocol.instructions import ReadDurable
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone
from ckptd.core.protocol.machine.context import RESEND_S, Context
from ckptd.core.protocol.machine.joining import Joining
from ckptd.core.protocol.messages import Inventory, InventoryRequest, JoinReport, RestoreAsk
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_reader import TableNotHere

TABLES_SAID_MAX = 4096  # in one question; most ranks have the same, and pipeline stages and experts their own
FRESH_S = 3.0  # a rank's last report; they come every RESEND_S
NEWCOMER_S = 1.0  # for the answer of a node that was heard of last; well within what the others' freeze has to spare


@dataclass
class Gather:
    """One attempt, from its first report until its epoch opens or is refused."""

    attempt: str
    ranks: tuple[str, ...]
    nodes: tuple[NodeInfo, ...]
    since: float
    claims: bool = True  # there is storage on which numbers are claimed
    joined: dict[int, RestoreAsk | None] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)  # rank -> its last report
    told: set[bytes] = field(default_factory=set)  # digests of the reports that were said whole
    trains: bool = False  # some of its ranks were let into an epoch of it
    wrong: str = ""  # why these ranks cannot start together
    asking_since: float | None = None
    heard_of_at: float = -1e9  # when the last node to ask became known
    asked: dict[str, NodeInfo] = field(default_factory=dict)
    turn: int = 0  # rounds of questions; answers to an earlier one are late
    read_turn: int = 0  # the round in which storage was asked
    silent: frozenset[str] = frozenset()  # who did not answer the first look: the second one does not wait for them
    looked_twice: bool = False
    came: dict[tuple[str, int], dict[int, Inventory]] = field(default_factory=dict)  # (who answers, in how many parts) -> by number
    said: dict[str, Inventory] = field(default_factory=dict)
    answers: dict[str, Inventory] = field(default_factory=dict)  # the same without what was forgotten
    durable: DurableRead | None = None
    records: list[EpochRecord] = field(default_factory=list)
    tombstone: Tombstone = NO_TOMBSTONE  # the highest that any node has of this job
    buried: dict[str, SnapshotId] = field(default_factory=dict)  # node -> the newest that it holds and that was forgotten
    left_out: dict[int, tuple[EpochRecord, EpochRecord]] = field(default_factory=dict)  # number -> which start counts, which not
    said_at: float = -1e9
    read: dict[str, Layout] = field(default_factory=dict)  # by name, whoever answered with it
    tables: dict[str, Table] = field(default_factory=dict)  # those that answers need not bring, and that stay here until then

    def frozen(self) -> Gather:
        """As it is now, for who looks at it elsewhere while answers go on coming in. Times are left out: two that are equal lead to
        the same decision."""
        return replace(
            self, since=0.0, heard_at={}, told=set(), asking_since=None, heard_of_at=0.0, said_at=0.0, tables={}, came={},
            joined=dict(self.joined), asked=dict(self.asked), said=dict(self.said), answers=dict(self.answers),
            records=list(self.records), buried=dict(self.buried), read=dict(self.read),
        )  # fmt: skip

    def all_stood_here(self) -> bool:
        """An epoch was opened for it, perhaps in an earlier life of this daemon, and is to be restored still."""
        return not self.trains and any(record.nonce == self.attempt for record in self.records)

    def missing(self) -> list[str]:
        return [node for node in self.asked if node not in self.answers]

    def waited_for(self) -> set[str]:
        return set(self.missing()) - self.silent

    def ranks_on(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, where in enumerate(self.ranks) if where == node)

    def newest(self) -> EpochRecord | None:
        kept = [kept for kept, _ in self.left_out.values()]
        return max(self.records, key=lambda record: (record.number, record in kept), default=None)

    def record_of(self, number: int) -> EpochRecord | None:
        """Of two records of one number the one that was heard of last, or that has the most to go on with."""
        if number in self.left_out:
            return self.left_out[number][0]
        return next((record for record in reversed(self.records) if record.number == number), None)

    def lineage(self, *, proven: bool = False) -> EpochRecord | None:
        """The newest epoch that took effect. One that never completed its restore left nothing behind; what was decided upon before
        it counts, or what trained meanwhile without its knowledge (two starts, a partition). ``proven``: the state directory of a
        process that has been restarted is no witness, as it may have failed when the epoch was to be written down."""
        record = newest = self.newest()
        while record is not None and self.never_ran(record, proven):
            record = self._trained_between(record) or self._before(record)
        last = self._trained(newest.number if newest is not None else 0)
        return record if last is None else self._unrecorded(last, record)

    def _trained(self, least: int, below: float = inf) -> int | None:
        """The newest epoch above ``least`` that left something to lose, and that was not forgotten by order."""
        least = max(least, self.tombstone.ordered)
        return max((s.epoch for s in self.heard_of() if least < s.epoch < below), default=None)

    def _unrecorded(self, number: int, before: EpochRecord | None) -> EpochRecord:
        """It trained, and its record is lost: it continued what was there before it, as far as anybody can tell. That is the newest
        epoch below it with a record, and what others have left since whose records are lost as well. Not known is not nothing: what
        is promised would be nobody's past where the newest one is damaged (P3)."""
        least = max(before.number if before is not None else 0, self.tombstone.ordered)
        ran = (r for r in self.records if least < r.number < number and not self.never_ran(r, proven=False))
        before = max(ran, key=lambda record: record.number, default=before)
        least = max(before.number if before is not None else 0, least)
        own = {s.epoch: s for s in sorted(self.heard_of())}  # the last of each
        forks = [own[epoch] for epoch in sorted(own, reverse=True) if least < epoch < number]
        if before is not None:
            forks += [*([own[before.number]] if before.number in own else []), *before.ancestry]
        return EpochRecord(number, "", (), (), tuple(forks))

    def _before(self, record: EpochRecord) -> EpochRecord | None:
        number, ancestry = record.before
        if number <= 0:
            return None
        return self.record_of(number) or EpochRecord(number, "", (), (), ancestry)

    def _trained_between(self, record: EpochRecord) -> EpochRecord | None:
        """An epoch that ``record`` was decided without, and that left something to lose."""
        between = self._trained(record.before[0], record.number)
        if between is None:
            return None
        return self.record_of(between) or self._unrecorded(between, self._before(record))

    def never_ran(self, record: EpochRecord, proven: bool) -> bool:
        """A member with ranks knows that they did not load, or never entered it: then nobody can have completed it."""
        if any(snapshot.epoch == record.number for snapshot in self.heard_of()):
            return False
        members = [node for node in record.nodes if node.node in record.ranks and node.node in self.answers]
        return any(_did_not_load(self.answers[node.node], record, node.incarnation, proven) for node in members)

    def bury(self, tombstone: Tombstone) -> None:
        """What nodes know and hold up to there was forgotten by the operator's word; what storage has of it stays, and what a later
        start went on from."""
        self.tombstone = self.tombstone.over(tombstone)
        ordered, durable = self.tombstone.ordered, self.durable
        on_storage = durable.newest if durable is not None else None
        self.records = [record for record in self.records if record.number > ordered or record == on_storage]
        kept = {snapshot for record in self.records if record.number > ordered for snapshot in record.ancestry}
        self.buried, self.answers = {}, dict(self.said)
        for node, answer in self.said.items() if ordered else ():
            gone = {fact.snapshot for fact in answer.holdings if fact.snapshot.epoch <= ordered} - kept
            if gone:
                self.buried[node] = max(gone)
            self.answers[node] = _without(answer, ordered, kept)
        self._keep_apart()

    def _keep_apart(self) -> None:
        """Without storage nobody claims numbers: two starts that never heard of each other have the same ones, and so have their
        snapshots. Of each number what the nodes of one of them hold counts (P1)."""
        self.left_out = {}
        numbers = Counter(record.number for record in self.records)
        for number in [number for number, count in numbers.items() if count > 1 and not self.claims]:
            was_in = {node: record for node, answer in self.answers.items() for record in (answer.ran, answer.known)
                      if record is not None and record.number == number}  # fmt: skip
            facts = Counter(record.nonce for node, record in was_in.items() for fact in self.answers[node].holdings
                            if fact.snapshot.epoch == number)  # fmt: skip
            if len(facts) < 2:
                continue  # there is nothing to mix
            both = {record.nonce: record for record in was_in.values()}
            (kept, _), (other, _) = facts.most_common(2)
            self.left_out[number] = both[kept], both[other]
            for node in [node for node, record in was_in.items() if record.nonce != kept]:
                self.answers[node] = _without_epoch(self.answers[node], number)

    def heard_of(self) -> set[SnapshotId]:
        """Every snapshot that anyone holds, was told of (also one that has fallen since), or reads on storage."""
        found = {fact.snapshot for answer in self.answers.values() for fact in answer.holdings}
        found |= {snapshot for answer in self.answers.values() for snapshot, _, _ in answer.certified}
        return found | set(self.durable.commits if self.durable is not None else ())

    def highest(self) -> int:
        """The number of the newest epoch of which anything is known, be it only by what was sealed in it."""
        numbers = [record.number for record in self.records]
        numbers += [snapshot.epoch for snapshot in self.heard_of()]
        return max(numbers + [answer.sealed for answer in self.answers.values()], default=0)

    def sealed(self) -> int:
        """The newest epoch in which a complete snapshot may have been sealed, and that was not forgotten by order. 0: in none, as
        far as those know who answered: one node whose ranks did not all seal something proves it for its epoch, while the
        process lives that was in it."""
        for epoch in sorted({answer.sealed for answer in self.answers.values()}, reverse=True):
            record = self.record_of(epoch)
            lived = self.lived_through(record) if record is not None else ()
            if epoch > self.tombstone.ordered and all(answer.sealed >= epoch for answer in lived):
                return epoch
        return 0

    def lived_through(self, record: EpochRecord) -> list[Inventory]:
        """The answers of its members with ranks that have not been restarted since."""
        members = [node for node in record.nodes if node.node in record.ranks and node.node in self.answers]
        return [self.answers[n.node] for n in members if self.answers[n.node].incarnation == n.incarnation]

    def layouts(self) -> dict[str, Layout]:
        """Of what those who answered hold."""
        return {name: self.read[name] for answer in self.answers.values() for name in answer.layouts if name in self.read}


def _without(answer: Inventory, ordered: int, kept: Collection[SnapshotId]) -> Inventory:
    """Without what was forgotten."""
    holdings = tuple(fact for fact in answer.holdings if fact.snapshot.epoch > ordered or fact.snapshot in kept)
    certified = tuple(told for told in answer.certified if told[0].epoch > ordered or told[0] in kept)
    return replace(answer, holdings=holdings, certified=certified)


def _without_epoch(answer: Inventory, number: int) -> Inventory:
    holdings = tuple(fact for fact in answer.holdings if fact.snapshot.epoch != number)
    return replace(answer, holdings=holdings, certified=tuple(told for told in answer.certified if told[0].epoch != number))


def _did_not_load(answer: Inventory, record: EpochRecord, incarnation: str, proven: bool) -> bool:
    """incarnation: of the process that the record was made with. While it lives it remembers what it has entered; another
    one that knows of no epoch may have forgotten it. So may one that had let the job go (core.protocol.life.Tombstone)."""
    lives = bool(incarnation) and answer.incarnation == incarnation
    if answer.known is None:
        return lives and answer.buried < record.number
    return (answer.known.number < record.number and (lives or not proven)) or (answer.never and answer.known == record)


class Gathering:
    """Collects; ``Decision`` (decide.py) judges when it is enough."""

    def __init__(self, ctx: Context, joining: Joining) -> None:
        self._ctx, self._joining = ctx, joining
        self.gather: Gather | None = None

    def on_report(self, sender: str, message: JoinReport) -> None:
        gather = self.gather
        if gather is None or gather.attempt != message.attempt:
            gather = self.gather = Gather(
                message.attempt, message.ranks, message.nodes, self._ctx.now, self._ctx.policy.durable
            )
            self._ctx.learn(message.nodes, self._ctx.number + 1)
            gather.bury(self._ctx.forgotten)
            self._learn(gather, self._ctx.record)
        self._learn(gather, message.known)
        gather.trains |= message.trains
        if message.ranks:
            gather.told.add(message.digest)
            if (gather.ranks, gather.nodes) != (message.ranks, message.nodes):
                gather.wrong = f"ranks {list(message.here)} on {sender} name another world than the others"
        mine = [rank for rank in message.here if 0 <= rank < len(gather.ranks) and gather.ranks[rank] == sender]
        other = next((ask for rank, ask in gather.joined.items() if rank not in mine), message.ask)  # the others agree
        for rank in mine:
            gather.joined[rank] = message.ask
            gather.heard_at[rank] = self._ctx.now
        if mine and other != message.ask:
            gather.wrong = "ranks ask for different restores"

    def waited_long(self) -> bool:
        """As long as anybody is waited for. Whoever was heard of only now has not been asked for as long."""
        gather, now = self.gather, self._ctx.now
        assert gather is not None and gather.asking_since is not None, "somebody was asked"
        patience = self._ctx.policy.inventory_timeout_s
        return now - gather.asking_since >= patience and now - gather.heard_of_at >= min(NEWCOMER_S, patience)

    def known_down(self) -> set[str]:
        """Nodes that will not answer now. Where one was heard of only now, links that were lost before may be whole again."""
        gather = self.gather
        assert gather is not None, "only a gathering asks"
        heard_of = gather.heard_of_at if self._ctx.now - gather.heard_of_at < NEWCOMER_S else -1e9
        return {node for node, since in self._ctx.down.items() if since >= heard_of}

    def complete(self) -> bool:
        """Every rank stands there, and did so a moment ago (our own: now): a dead attempt must not supersede a living one."""
        gather, now = self.gather, self._ctx.now
        return (
            gather is not None
            and len(gather.heard_at) == len(gather.ranks)
            and all(now - heard < FRESH_S for heard in gather.heard_at.values())
            and self._joining.all_here(gather.attempt, gather.ranks_on(self._ctx.me.node))
        )

    def ask(self) -> None:
        """All ranks are here: ask for inventories. Also to ask once more, after a restore met damage."""
        gather = self.gather
        assert gather is not None, "only a gathering asks"
        gather.durable, gather.silent, gather.looked_twice = None, frozenset(), False
        for node in gather.nodes:
            gather.asked[node.node] = node
        if not self._ctx.policy.durable:
            gather.durable = DurableRead(gather.attempt, True)
        gather.read_turn = gather.turn + 1
        self._ask_everyone(gather)

    def look_again(self) -> None:
        """Those who answered told of different moments, and memory moved on between them: what one named the other had
        released already for a newer one, which the first did not hold yet. From its first answer on a node is frozen and
        gives nothing away, so the second answers together name all there is (a double collect: Afek et al., Atomic snapshots
        of shared memory, J. ACM 1993)."""
        gather = self.gather
        assert gather is not None, "only a gathering asks"
        gather.silent, gather.looked_twice = frozenset(gather.missing()), True
        self._ask_everyone(gather)

    def _ask_everyone(self, gather: Gather) -> None:
        gather.asking_since = self._ctx.now
        gather.said, gather.answers, gather.came = {}, {}, {}
        gather.turn += 1
        self._say(gather)

    def on_inventory(self, sender: str, message: Inventory) -> None:
        gather = self.gather
        if gather is None or gather.asking_since is None or message.attempt != gather.attempt:
            return
        if message.turn != gather.turn:
            return
        known, came = len(gather.read), gather.came.setdefault((sender, message.parts), {})
        came[message.part] = message
        there, last = self._read(gather, message), came.get(message.parts)
        if last is None:
            return
        if last is not message:
            there = self._read(gather, last)
        if not there or len(came) < message.parts:
            if len(gather.read) > known:  # what came is named from now on; or it answers another question of this number
                self._request(gather, [sender])
            return
        message = last
        gather.said[sender] = message
        gather.bury(Tombstone(message.buried, message.forgotten))
        for record in (message.known, message.ran):
            self._learn(gather, record)

    def _read(self, gather: Gather, message: Inventory) -> bool:
        """The layouts of a part. False: a table that one of them needs is not here."""
        there = True
        for name, data in message.layouts.items():
            try:
                gather.read[name] = gather.read.get(name) or self._ctx.tables.read(data)
            except TableNotHere:
                there = False
            except ValueError:
                pass  # what is no layout is none: its holdings are not used
        return there

    def on_durable(self, event: DurableRead) -> None:
        """A read that was begun before the last question may have seen less, and one that hung fail when another has answered."""
        gather = self.gather
        if gather is None or gather.asking_since is None or (event.attempt, event.turn) != (gather.attempt, gather.read_turn):
            return
        if event.ok or gather.durable is None:
            gather.durable = event
            gather.bury(Tombstone(event.forgotten, event.forgotten))
            self._learn(gather, event.newest, on_storage=True)

    def learn(self, record: EpochRecord) -> None:
        if self.gather is not None:
            self._learn(self.gather, record)

    def on_tick(self) -> None:
        gather = self.gather
        if gather is not None and gather.asking_since is not None and self._ctx.now - gather.said_at >= RESEND_S:
            self._say(gather)

    def _learn(self, gather: Gather, record: EpochRecord | None, *, on_storage: bool = False) -> None:
        """Members of every epoch somebody knows may hold memory, and are where the newest one that names them says."""
        if record is None or record in gather.records:
            return
        if on_storage or record.number > gather.tombstone.ordered:
            gather.records.append(record)
            gather.bury(gather.tombstone)
        self._ctx.learn_of(record)
        start = {node.node for node in gather.nodes}
        known = {info.node: self._ctx.nodes[info.node] for info in (*record.nodes, *record.holders) if info.node not in start}
        new = {node: info for node, info in known.items() if gather.asked.get(node) != info}
        gather.asked |= new
        unheard = [node for node in new if node not in gather.said]
        if unheard and gather.asking_since is not None:
            gather.heard_of_at = self._ctx.now
            self._request(gather, unheard)

    def _say(self, gather: Gather) -> None:
        gather.said_at = self._ctx.now
        self._request(gather, gather.missing())
        if gather.durable is None:
            self._ctx.emit(ReadDurable(gather.attempt, gather.read_turn))

    def _request(self, gather: Gather, nodes: Iterable[str]) -> None:
        everyone = tuple(gather.asked.values())
        gather.tables.update((table.digest, table) for table in self._ctx.tables.alive()[-TABLES_SAID_MAX:])
        tables = tuple(gather.tables)[-TABLES_SAID_MAX:]  # the newest, among them what the node brought
        request = InventoryRequest(gather.attempt, everyone, gather.turn, tables)
        for node in nodes:
            self._ctx.send(node, request)
