"""The plain model: what was promised, what is really held, and whether the two agree (P1, P2, P3, P6, P9, P12, P14).

It looks at the bytes in every daemon's memory (evidence.py), at what the trainers really trained (training.py) and at what the
daemons tell each other, and knows nothing of the protocol beyond what the promises say. Of ckptd it imports names and messages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import messages as msg
from tests.sim.broken import Broken
from tests.sim.decisions import Decisions
from tests.sim.evidence import OBJECTS_BYTES, Evidence, Piece
from tests.sim.judge import Judge
from tests.sim.training import Origin, Trail, begin, objects

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.state import Mem
    from tests.sim.trainer import Proc, Run
    from tests.sim.world import World

BLIND_S = 4.0  # a loss may stay unnoticed by the steward for this long
GIVEN_UP_KEPT = 4096  # slots that were freed last
ENDLESS = 1 << 62  # a step that no run reaches


@dataclass
class Promise:
    """The last certificate of one snapshot, and what was lost since."""

    level: int
    lost: set[str] = field(default_factory=set)  # failure domains


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.evidence = Evidence(world.model)
        self.decisions = Decisions()
        self.judge = Judge(self)
        self.origins: dict[SnapshotId, Origin] = {}  # what was trained and captured under that name
        self.promises: dict[SnapshotId, Promise] = {}
        self.unpromised: dict[SnapshotId, int] = {}  # the level last said of what was forgotten, where that order was not heard
        self.durable_at: dict[SnapshotId, float] = {}  # when it was committed
        self.ordered = 0  # the newest epoch that the operator has had forgotten
        self.certified_ever: dict[SnapshotId, int] = {}  # best level
        self.certified_steps: set[tuple[int, int]] = set()  # (epoch, step)
        self.known_at: dict[
            SnapshotId, float
        ] = {}  # when it was certified, or acknowledged as durable, for the first time
        self.complete_uncertified: set[SnapshotId] = set()
        self.records: dict[int, EpochRecord] = {}
        self.done: dict[int, Origin] = {}  # epochs that all ranks have loaded for -> the end of their line of training
        self.declared: set[int] = set()  # epochs that begin anew by their operator's word
        self.graves: list[tuple[float, Host, list[Mem]]] = []
        self.given_up: deque[tuple[float, Host, Mem]] = deque(maxlen=GIVEN_UP_KEPT)
        self.left: dict[str, tuple[float, bool]] = {}  # node that is to go -> when it was told what is left last; was it nothing
        self.turn = 0  # of the events that daemons have taken in
        self.told_at: dict[tuple[str, str], tuple[float, int]] = {}  # (attempt, node) -> when it first told what it holds; its turn
        self.told_void: dict[SnapshotId, set[object]] = {}  # which machines were: one made anew knows what memory holds
        self._held: dict[SnapshotId, dict[int, tuple[Host, Mem]]] = {}  # by id() of the slot
        self._went: set[SnapshotId] = set()  # durable when a node asked what a job that is over could spare
        self._trails: dict[str, Trail] = {}  # by attempt
        self._levels: dict[SnapshotId, int] = {}  # of what is there now, until something of it changes
        self._sources: dict[int, set[str]] = {}

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # --- what is held -------------------------------------------------------------------------------------------
    def sealed(self, host: Host, mem: Mem, origin: Origin) -> None:
        """A rank's own slot is complete. origin: what its trainer captured."""
        assert mem.fact is not None
        known = self.origins.setdefault(mem.fact.snapshot, origin)
        if known != origin:
            raise Broken(f"P12 {mem.fact.snapshot} names two states, of two starts of the job")
        self.held(host, mem)

    def held(self, host: Host, mem: Mem) -> None:
        assert mem.fact is not None
        snapshot, mem.since, mem.known = mem.fact.snapshot, self.world.clock.now, None
        self._held.setdefault(snapshot, {})[id(mem)] = host, mem
        self._levels.pop(snapshot, None)
        known = snapshot in self.certified_ever or snapshot in self.complete_uncertified
        if not known and self.truth(snapshot) >= 0:
            self.complete_uncertified.add(snapshot)
            self.world.on_complete(snapshot)

    def truth(
        self,
        snapshot: SnapshotId,
        *,
        among: set[str] | None = None,
        graves: float | None = None,
        attempt: str = "",
        stopped: float | None = None,
    ) -> int:
        """How many domains may be lost now, from the bytes that memory really has. graves: as one may believe who has not
        noticed what died after that moment, nor a flipped bit. attempt: what each node held when it told its inventory to this
        one. stopped: for a process that was, at that moment, just before it says what it had found."""
        origin = self.origins.get(snapshot)
        if origin is None:
            return -1
        plain = among is None and graves is None and not attempt and stopped is None
        if plain and snapshot in self._levels:
            return self._levels[snapshot]
        pieces: list[Piece] = []
        for host, mem in self._slots(snapshot, graves, stopped):
            payload = mem.sums if graves is not None else mem.payload if mem.intact else None
            if payload is None or (among is not None and host.name not in among):
                continue
            _, until = self.told_at.get((attempt, host.name), (0.0, self.turn))
            if not attempt or (mem.known is not None and mem.known <= until):
                pieces.append((host.domain, mem, payload))
        found = self.evidence.level(pieces, origin)
        if plain:
            self._levels[snapshot] = found
        return found

    def slots_of(self, snapshot: SnapshotId) -> list[tuple[Host, Mem]]:
        return list(self._held.get(snapshot, {}).values())

    def _slots(
        self, snapshot: SnapshotId, graves: float | None, stopped: float | None
    ) -> Iterator[tuple[Host, Mem]]:
        yield from self.slots_of(snapshot)
        for died, host, memory in self.graves if graves is not None else ():
            if died > graves:  # type: ignore[operator]
                yield from ((host, mem) for mem in memory if mem.snapshot == snapshot)
        yield from ((host, mem) for host, mem in self._given_up_since(stopped) if mem.snapshot == snapshot)

    def _given_up_since(self, stopped: float | None) -> Iterator[tuple[Host, Mem]]:
        for at, host, mem in reversed(self.given_up) if stopped is not None else ():
            if at <= stopped:  # type: ignore[operator]
                return
            yield host, mem

    def vanished(self, epoch: int) -> None:
        """Nothing is left of it anywhere, and its number comes again."""
        for known in (self.origins, self.promises, self.unpromised, self.certified_ever, self.known_at, self.told_void):
            for snapshot in [s for s in known if s.epoch == epoch]:
                del known[snapshot]  # type: ignore[attr-defined]
        self.complete_uncertified = {s for s in self.complete_uncertified if s.epoch != epoch}
        self.counts["an epoch of which nothing was left"] += 1
        del self.done[epoch]

    def lost(self, host: Host) -> None:
        """A node dies with its memory."""
        memory = [mem for mem in host.memory.values() if mem.state == "sealed"]
        self.graves.append((self.world.clock.now, host, memory))
        for mem in memory:
            self._gone(mem)
        for promise in self.promises.values():
            promise.lost.add(host.domain)

    def _gone(self, mem: Mem) -> None:
        assert mem.fact is not None
        self._held.get(mem.fact.snapshot, {}).pop(id(mem), None)
        self._levels.pop(mem.fact.snapshot, None)

    def damaged(self, host: Host, snapshot: SnapshotId) -> None:
        self._levels.pop(snapshot, None)
        if snapshot in self.promises:
            self.promises[snapshot].lost.add(host.domain)

    def gives_up(self, host: Host, mem: Mem, copy: Mem) -> None:
        """A sealed slot is freed, by a decision. copy: what it was."""
        self._gone(mem)
        self.given_up.append((self.world.clock.now, host, copy))
        if not copy.intact:
            self.graves.append((self.world.clock.now, host, [copy]))

    def may_go(self, commits: Iterable[SnapshotId]) -> None:
        """D19: the job is over, memory is short, and storage says that it has these: the promise of memory ends with them."""
        self._went.update(commits)

    def forgets(self, epoch: int) -> None:
        """D19: the operator has the job forgotten up to there."""
        self.ordered = max(self.ordered, epoch)
        self.promises = {snapshot: promise for snapshot, promise in self.promises.items() if snapshot.epoch > epoch}

    def forgotten(self, snapshot: SnapshotId) -> bool:
        """No memory of it is promised any more, nor of what ranks take in that epoch where the order was not heard. But a later
        start may have gone on from what storage had of it."""
        later = (self.records[number] for number in self.done if number > self.ordered)
        return snapshot.epoch <= self.ordered and not any(snapshot in record.ancestry for record in later)

    def freed(self, snapshot: SnapshotId) -> None:
        """P3: memory went. Does everything promised still hold?"""
        self.check_promise(snapshot)

    def check_all(self) -> None:
        for snapshot in list(self.promises):
            self.check_promise(snapshot)

    def check_promise(self, snapshot: SnapshotId) -> None:
        promise = self.promises.get(snapshot)
        if promise is None or promise.level < 0:
            return
        due = promise.level - len(promise.lost)
        if due < 0 or self.truth(snapshot) >= due or self.forgotten(snapshot):
            return
        if self._superseded(snapshot, due):
            del self.promises[snapshot]
            return
        raise Broken(
            f"P3 {snapshot} was certified at {promise.level}, {sorted(promise.lost)} were lost since, "
            f"and it survives only {self.truth(snapshot)} more"
        )

    # --- lineage ------------------------------------------------------------------------------------------------
    def _superseded(self, snapshot: SnapshotId, at: int) -> bool:
        """A newer one of the lineage was certified at that level, or is durable; or the job went on from before it."""
        origin = self.origins.get(snapshot)
        if origin is None:
            return False
        if any(other == snapshot or self.continues(other, origin) for other in self._went):
            return True
        if any(other > snapshot and self.continues(other, origin) for other in self.world.store.commits):
            return True
        for other, best in self.certified_ever.items():
            if other != snapshot and best >= min(at, self._wanted_since(other.epoch)) and self.continues(other, origin):
                return True
        return self._left_behind(snapshot)

    def _left_behind(self, snapshot: SnapshotId) -> bool:
        """The job went on from before it."""
        origin = self.origins.get(snapshot)
        return origin is not None and any(
            number > snapshot.epoch and not end.continues(origin) for number, end in self.done.items()
        )

    def _wanted_since(self, number: int) -> int:
        """The least that the nodes of a start since then can give: its steward lets go of what is older, also where the launcher
        has begun another start on more nodes, of which it has not heard (seed 5524)."""
        starts = (record for later, record in self.records.items() if later >= number)
        return min([self.world.wanted_now(), *(len({node.domain for node in record.nodes}) - 1 for record in starts)])

    def continues(self, snapshot: SnapshotId, origin: Origin) -> bool:
        newer = self.origins.get(snapshot)
        return newer is not None and newer.continues(origin)

    def in_line(self, lineage: Origin | None, snapshot: SnapshotId) -> bool:
        origin = self.origins.get(snapshot)
        return lineage is None or (origin is not None and lineage.continues(origin))

    # --- what is said -------------------------------------------------------------------------------------------
    def sent(self, host: Host, message: object, to: str = "") -> None:
        kind = type(message)
        if kind is msg.Certificate:
            self._certificate(host, message)  # type: ignore[arg-type]
        elif kind is msg.Inventory:
            self.told_at.setdefault((message.attempt, host.name), (self.world.clock.now, self.turn))  # type: ignore[attr-defined]
        elif kind is msg.InventoryRequest:
            self.decisions.asked(host.name, host.life, message)  # type: ignore[arg-type]
        elif kind is msg.EpochOpen:
            self.judge.decided(host, message)  # type: ignore[arg-type]
        elif kind is msg.JoinRefused:
            self.counts[f"refused {message.code}"] += 1  # type: ignore[attr-defined]
            self.judge.refused(host, message)  # type: ignore[arg-type]
        elif kind is msg.RestoreDone:
            self._completed(message)  # type: ignore[arg-type]
        elif kind is msg.Remainder:
            self._remainder(host, to, message)  # type: ignore[arg-type]
        elif kind is msg.Stale:
            self.counts["a stale epoch fenced"] += 1

    def taken_in(self, host: Host, event: object) -> None:
        """The next turn of a daemon: before it, its memory may have held what it could not tell of."""
        self.turn += 1
        mem = host.memory.get(getattr(event, "slot", -1)) if hasattr(event, "layout") else None
        if mem is not None and mem.known is None:
            mem.known = self.turn

    def heard(self, host: Host, sender: str, message: object) -> None:
        self.decisions.heard(host.name, host.life, sender, message, host.record)

    def _certificate(self, host: Host, message: msg.Certificate) -> None:
        """P2: what is said holds, but for what nobody could have noticed yet, and for what the operator had forgotten."""
        snapshot = message.snapshot
        if message.level >= 0:
            self.certified_steps.add(snapshot.at)
        if self.forgotten(snapshot):
            if message.level >= 0 or snapshot in self.unpromised:
                self.unpromised[snapshot] = message.level  # its ranks may live, and wait for it as any others do (P14)
            return
        before = self.promises.get(snapshot)
        if before is not None and before.level == message.level:
            return
        if message.level >= 0 and (before is None or message.level > before.level):
            now = self.truth(snapshot, graves=host.saw_at - BLIND_S, stopped=host.saw_at)
            if now < message.level and not self._superseded(snapshot, message.level):
                raise Broken(f"P2 {snapshot} is certified at {message.level}, in truth it is {now}")
        if message.level >= 0:
            self._count_new(snapshot)
            best = self.certified_ever.get(snapshot, -1)
            self.certified_ever[snapshot] = max(best, message.level)
            self.complete_uncertified.discard(snapshot)
        lost = {dead.domain for died, dead, _ in self.graves if died > host.saw_at - BLIND_S}
        lost |= {h.domain for h, mem in self.slots_of(snapshot) if not mem.intact}
        lost |= {h.domain for h, mem in self._given_up_since(host.saw_at) if mem.snapshot == snapshot}
        self.promises[snapshot] = Promise(message.level, lost)

    def _remainder(self, host: Host, to: str, message: msg.Remainder) -> None:
        """P3: who hears that nothing is left goes, and so do others that hear it in the same look. Without them some snapshot holds
        what is promised of the newest one, as far as the nodes that stay can, but for what nobody could have noticed yet."""
        now = self.world.clock.now
        self.left[to] = now, message.slots == 0
        if message.slots or host.record is None:
            return
        owed = {s: promise.level - len(promise.lost) for s, promise in self.promises.items() if s.epoch <= message.epoch}
        newest = max((s for s in owed if owed[s] >= 0 and not self.forgotten(s) and not self._left_behind(s)), default=None)
        if newest is None:
            return
        hosts = self.world.hosts
        leave = {name for name, said in self.left.items() if said == (now, True)}
        going = {name for name, other in hosts.items() if other.machine.view()["drain"]["leaving"]} | leave
        staying = {node.domain for node in host.record.nodes if node.node not in going}
        wanted = min(owed[newest], self.world.policy.tolerates, len(staying) - 1)
        self.counts["nothing left on a node that is to go"] += 1
        self.counts["nothing left on several"] += len(leave) > 1
        others = hosts.keys() - leave
        if all(self.truth(s, among=others, graves=host.saw_at - BLIND_S, stopped=host.saw_at) < wanted for s in self.origins):
            raise Broken(f"P3 {sorted(leave)} are to leave nothing, and without them {newest} does not survive {wanted} more")

    def certified(self) -> set[SnapshotId]:
        """All that a level was ever said of, whether or not memory of it is promised still."""
        return self.certified_ever.keys() | self.unpromised.keys()

    def _count_new(self, snapshot: SnapshotId) -> None:
        self.known_at.setdefault(snapshot, self.world.clock.now)
        if snapshot not in self.certified_ever:
            self.counts["certified"] += 1
            if any(old.step == snapshot.step and old.epoch < snapshot.epoch for old in self.certified_ever):
                self.counts["a retrained step after a fork"] += 1

    def told(self, host: Host, snapshot: SnapshotId, level: int, void: str) -> None:
        if void:
            self.counts["void"] += 1
            if snapshot in self.certified_ever or snapshot in self.complete_uncertified:
                self.counts["a void racing a certificate"] += 1
            self.check_promise(snapshot)
            self.told_void.setdefault(snapshot, set()).add(host.machine)
        elif level >= 0 and host.machine in self.told_void.get(snapshot, ()):
            raise Broken(f"P2 {host.name} reports {snapshot} at {level} after it was void")

    # --- epochs -------------------------------------------------------------------------------------------------
    def persisted(self, host: Host, record: EpochRecord) -> None:
        """P12: no way back to an older epoch, no two records of one number. A node that has forgotten one and could not write that
        down may enter the same one again."""
        known = host.record.number if host.record is not None else 0
        before, written = max(known, host.state.durable.number), host.state.durable.record
        again = host.record is None and record == written
        if (record.number <= before and not again) or record.number < host.tombstone.epoch:
            raise Broken(f"P12 {host.name} went from epoch {before} to {record.number}")
        self.records.setdefault(record.number, record)  # found claimed by its own steward, which was lost before it heard of that

    def claims(self, host: Host, record: EpochRecord) -> None:
        self.decisions.decided(host.name, host.life, record.nonce)

    # --- restores -----------------------------------------------------------------------------------------------
    def fetched(self, number: int, sources: set[str]) -> None:
        found = self._sources.setdefault(number, set())
        before = len(found)
        found |= sources
        if before < 3 <= len(found):
            self.counts["a restore mixing three sources"] += 1

    def loaded(self, run: Run) -> None:
        """A rank has loaded, or was told that there is nothing to load. When all have, the job goes on from there (P1, P9): the
        same step on all ranks, whole, and bit by bit what was trained."""
        if any(proc.loaded is None for proc in run.procs) or len({proc.epoch for proc in run.procs}) > 1:
            return
        restored = {proc.restored for proc in run.procs}
        if len(restored) != 1:
            raise Broken(f"P1 ranks restored different snapshots: {restored}")
        number, snapshot = run.procs[0].epoch, run.procs[0].restored
        self._goes_on(run.attempt, len(run.procs), number, self._trained(run, snapshot) if snapshot is not None else None)

    def let_go(self, proc: Proc) -> None:
        """Its restore() returns. A fresh start is nothing to load: it took effect although a rank may have died before it heard."""
        if proc.epoch in self.done:
            return
        if proc.restored is not None:
            raise Broken(f"P1 rank {proc.rank} trains on from {proc.restored}, which not all ranks have loaded")
        self._goes_on(proc.run.attempt, len(proc.run.procs), proc.epoch, None)

    def _completed(self, message: msg.RestoreDone) -> None:
        """A declared fresh start took effect although every rank may have died before it heard: the word was its operator's."""
        number = message.epoch
        if number in self.declared and number not in self.done:
            record = self.records[number]
            self._goes_on(record.nonce, len(record.ranks), number, None)

    def _goes_on(self, attempt: str, world: int, number: int, parent: Origin | None) -> None:
        trail = self._trails[attempt] = begin(self.world.job, attempt, world, parent)
        self.done[number] = Origin(trail, ENDLESS)
        opened = self.judge.opened.get((number, attempt))
        if opened is not None:
            self.records[number] = opened

    def _trained(self, run: Run, snapshot: SnapshotId) -> Origin:
        origin = self.origins[snapshot]
        state = self.world.model.state(origin)
        whole: Counter[str] = Counter()
        for proc in run.procs:
            for key, start, data in proc.loaded or ():
                base = self.world.model.all[key].base + start
                if data != state[base : base + len(data)]:
                    raise Broken(f"P1 the restore of {snapshot} loaded other bytes of {key} than were trained")
                whole[key] += len(data)
        for tensor in self.world.model.tensors(origin.step):
            if whole[tensor.key] < tensor.size:
                raise Broken(f"P1 the restore of {snapshot} lacks a part of {tensor.key}")
        return origin

    def restored(self, run: Run) -> Trail:
        """All ranks are let go. What they train from now on."""
        snapshot = run.procs[0].restored
        if snapshot is None:
            self.counts["fresh start"] += 1
            self._fresh(run)
        else:
            self.counts["restore"] += 1
            self.counts["restore into another world"] += self.origins[snapshot].trail.world != len(run.procs)
        return self._trails[run.attempt]

    def _fresh(self, run: Run) -> None:
        ask = run.ask
        if ask is None or ask.allow_fresh or ask.step is not None:
            return
        number = run.procs[0].epoch
        last = max((n for n in self.done if n < number), default=None)
        # What another start of the job, which this one supersedes, certified after it had been asked is lost with it.
        asked = min(at for (attempt, _), (at, _) in self.told_at.items() if attempt == run.attempt)
        stored = [s for s in self.world.store.commits if self.durable_at.get(s, ENDLESS) < asked]
        left = [s for s, at in self.known_at.items() if at < asked and (s in stored or not self.forgotten(s))]
        known = list(filter(self._claimed, left))
        if any(last is None or self.in_line(self.done[last], snapshot) for snapshot in known):
            raise Broken("P1 a fresh start was called proven although the job has had checkpoints")

    def _claimed(self, snapshot: SnapshotId) -> bool:
        """Storage has heard of a start that trained on the way to it. If not, the first was declared while storage was away, and
        nobody but its nodes can tell a later start that the job has run before."""
        heard = {claim.nonce for claim in self.world.store.claims.values()}
        line: list[str] = []  # attempts; one may have begun two trails, so that it is the attempts that are compared
        at = self.origins.get(snapshot)
        while at is not None:
            line.append(at.trail.attempt)
            at = at.trail.parent
        unheard = self.world.policy.durable and any(map(self._declared, line[-1:])) and heard.isdisjoint(line)
        self.counts["a line of which storage never heard"] += unheard
        return not unheard

    def _declared(self, attempt: str) -> bool:
        return any(self.records[number].nonce == attempt for number in self.declared)

    # --- storage ------------------------------------------------------------------------------------------------
    def published(
        self, snapshot: SnapshotId, slices: Iterable[tuple[str, int, bytes]], of_ranks: dict[int, bytes]
    ) -> None:
        """A commit is made of this (P1, P4): every byte of every tensor, and the objects of every rank. slices: (key, first
        element, bytes)."""
        origin = self.origins[snapshot]
        state, whole = self.world.model.state(origin), 0
        for key, start, data in slices:
            base = self.world.model.all[key].base + start
            if data != state[base : base + len(data)]:
                raise Broken(f"P1 the commit of {snapshot} has other bytes of {key} than were trained")
            whole |= ((1 << len(data)) - 1) << base
        for rank, data in of_ranks.items():
            if data != objects(origin, rank).ljust(OBJECTS_BYTES, b"\0"):
                raise Broken(f"P1 the commit of {snapshot} has other objects of rank {rank} than were captured")
            whole |= 1 << (self.world.model.nbytes + rank)
        if self.evidence.needed(origin) & ~whole:
            raise Broken(f"P4 the commit of {snapshot} lacks a part of the state")

    def committed(self, snapshot: SnapshotId) -> None:
        self.durable_at[snapshot] = self.world.clock.now
        self.known_at.setdefault(snapshot, self.world.clock.now)
        self.counts["committed"] += 1
