"""The plain model: what was promised, what is really held, and whether the two agree (P1, P2, P3, P6, P9, P12, P14).

It looks at the true content of every daemon's memory, which no machine can, and knows nothing of the protocol beyond what the
promises say.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptd.core import instructions as ins
from ckptd.core import messages as msg
from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.lanes import Part
from ckptd.core.layout import Layout
from ckptd.core.protection import level, slice_classes
from tests.sim.parity import spared
from tests.sim.state import Mem
from tests.sim.store import Broken

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.trainer import Run
    from tests.sim.world import World

BLIND_S = 4.0  # a loss may stay unnoticed by the steward for this long
GIVEN_UP_KEPT = 4096  # slots that were freed last


@dataclass
class Promise:
    """The last certificate of one snapshot, and what was lost since."""

    level: int
    lost: set[str] = field(default_factory=set)  # failure domains


class Oracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.counts: Counter[str] = Counter()
        self.layouts: dict[SnapshotId, dict[int, Layout]] = {}
        self.promises: dict[SnapshotId, Promise] = {}
        self.certified_ever: dict[SnapshotId, int] = {}  # best level
        self.known_at: dict[
            SnapshotId, float
        ] = {}  # when it was certified, or acknowledged as durable, for the first time
        self.complete_uncertified: set[SnapshotId] = set()
        self.records: dict[int, EpochRecord] = {}
        self.done: set[int] = set()  # epochs whose restore was completed
        self.graves: list[tuple[float, Host, list[Mem]]] = []
        self.given_up: deque[tuple[float, Host, Mem]] = deque(maxlen=GIVEN_UP_KEPT)
        self.told_at: dict[tuple[str, str], float] = {}  # (attempt, node) -> when it first told what it holds
        self.saw_certificate: dict[tuple[str, SnapshotId], bool] = {}
        self._refusals: set[str] = set()
        self._sources: dict[int, set[str]] = {}

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # --- what is held -------------------------------------------------------------------------------------------
    def held(self, mem: Mem) -> None:
        assert mem.fact is not None and mem.layout is not None
        snapshot, mem.since = mem.fact.snapshot, self.world.clock.now
        if mem.own:
            self.layouts.setdefault(snapshot, {}).setdefault(mem.rank, mem.layout)
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
        """How many domains may be lost now, from the real content of memory. graves: as one may believe who has not noticed
        what died after that moment, nor a flipped bit. attempt: what each node held when it told its inventory to this one.
        stopped: for a process that was, at that moment, just before it says what it had found."""
        layouts = self.layouts.get(snapshot, {})
        if not layouts or len(layouts) < next(iter(layouts.values())).world:
            return -1
        holders: dict[int, list[tuple[str, int]]] = {}
        parts: list[tuple[str, Part]] = []
        now = self.world.clock.now
        for host, memory in self._memories(graves) + self._given_up_since(stopped):
            if among is not None and host.name not in among:
                continue
            until = self.told_at.get((attempt, host.name), now) if attempt else now
            for mem in memory:
                if mem.since > until:
                    continue
                if (
                    mem.fact is None
                    or mem.snapshot != snapshot
                    or mem.state != "sealed"
                    or not (mem.intact or graves is not None)
                ):
                    continue
                if mem.fact.part is not None:
                    parts.append((host.domain, mem.fact.part))
                else:
                    holders.setdefault(mem.rank, []).append((host.domain, mem.fact.tier))
        return level(slice_classes(layouts), holders, spared(holders, parts))

    def _memories(self, graves: float | None) -> list[tuple[Host, list[Mem]]]:
        found = [(host, list(host.memory.values())) for host in self.world.hosts.values()]
        if graves is not None:
            found += [(host, memory) for died, host, memory in self.graves if died > graves]
        return found

    def _given_up_since(self, stopped: float | None) -> list[tuple[Host, list[Mem]]]:
        return [(host, [mem]) for at, host, mem in self.given_up if stopped is not None and at > stopped]

    def lost(self, host: Host) -> None:
        """A node dies with its memory."""
        self.graves.append(
            (self.world.clock.now, host, [mem for mem in host.memory.values() if mem.state == "sealed"])
        )
        for promise in self.promises.values():
            promise.lost.add(host.domain)

    def damaged(self, host: Host, snapshot: SnapshotId) -> None:
        if snapshot in self.promises:
            self.promises[snapshot].lost.add(host.domain)

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
        if self._superseded(snapshot, promise.level):
            del self.promises[snapshot]
            return
        due = promise.level - len(promise.lost)
        if due >= 0 and self.truth(snapshot) < due:
            raise Broken(
                f"P3 {snapshot} was certified at {promise.level}, {sorted(promise.lost)} were lost since, "
                f"and it survives only {self.truth(snapshot)} more"
            )

    def _superseded(self, snapshot: SnapshotId, at: int) -> bool:
        """A newer one of the lineage was certified at that level; or the lineage forked before it."""
        wanted = self.world.wanted_now()
        for other, best in self.certified_ever.items():
            if other > snapshot and best >= min(at, wanted) and self._same_lineage(snapshot, other):
                return True
        return any(
            number > snapshot.epoch
            and number in self.done
            and not self.records[number].is_candidate(snapshot)
            for number in self.records
        )

    def _same_lineage(self, old: SnapshotId, new: SnapshotId) -> bool:
        record = self.records.get(new.epoch)
        return record is not None and record.is_candidate(old)

    # --- what is said -------------------------------------------------------------------------------------------
    def sent(self, host: Host, do: ins.Send) -> None:
        message = do.message
        kind = type(message)
        if kind is msg.Certificate:
            self._certificate(host, message)  # type: ignore[arg-type]
        elif kind is msg.Inventory:
            self.told_at.setdefault((message.attempt, host.name), self.world.clock.now)  # type: ignore[union-attr]
        elif kind is msg.EpochOpen:
            self._decided(host, message)  # type: ignore[arg-type]
        elif kind is msg.RestoreDone:
            self._done(message)  # type: ignore[arg-type]
        elif kind is msg.JoinRefused:
            self.counts[f"refused {message.code}"] += 1  # type: ignore[union-attr]
            self._refused(host, message)  # type: ignore[arg-type]
        elif kind is msg.Stale:
            self.counts["a stale epoch fenced"] += 1

    def _certificate(self, host: Host, message: msg.Certificate) -> None:
        """P2: what is said holds, but for what nobody could have noticed yet."""
        snapshot = message.snapshot
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
        lost |= {h.domain for h in self.world.hosts.values() for m in h.memory.values()
                 if m.snapshot == snapshot and not m.intact}  # fmt: skip
        lost |= {h.domain for h, (m,) in self._given_up_since(host.saw_at) if m.snapshot == snapshot}
        self.promises[snapshot] = Promise(message.level, lost)

    def _count_new(self, snapshot: SnapshotId) -> None:
        self.known_at.setdefault(snapshot, self.world.clock.now)
        if snapshot not in self.certified_ever:
            self.counts["certified"] += 1
            if any(old.step == snapshot.step and old.epoch < snapshot.epoch for old in self.certified_ever):
                self.counts["a retrained step after a fork"] += 1

    def told(self, host: Host, do: ins.TellLevel) -> None:
        key = (f"{host.name}#{host.life}", do.snapshot)
        if do.void:
            self.counts["void"] += 1
            if do.snapshot in self.certified_ever or do.snapshot in self.complete_uncertified:
                self.counts["a void racing a certificate"] += 1
            self.check_promise(do.snapshot)
            self.saw_certificate[key] = True
        elif do.level >= 0 and self.saw_certificate.get(key):
            raise Broken(f"P2 {host.name} reports {do.snapshot} at {do.level} after it was void")

    # --- epochs -------------------------------------------------------------------------------------------------
    def persisted(self, host: Host, record: EpochRecord) -> None:
        """P12: no way back to an older epoch, no two records of one number."""
        before = max(host.record.number if host.record is not None else 0, host.state.durable.number)
        if record.number <= before:
            raise Broken(f"P12 {host.name} went from epoch {before} to {record.number}")

    def _done(self, message: msg.RestoreDone) -> None:
        if message.epoch not in self.done and message.epoch in self.records:
            self.done.add(message.epoch)

    def _decided(self, host: Host, message: msg.EpochOpen) -> None:
        """P3: what those who answered hold of a promised snapshot is not passed over."""
        if message.record.number in self.records:
            if self.records[message.record.number] != message.record:
                self.counts["one number, two records"] += 1
            return
        self.records[message.record.number] = message.record
        gather = host.machine.steward.restoring.gathering.gather
        assert gather is not None
        ask = next(iter(gather.joined.values()), None)
        if ask is None or ask.step is not None or host.machine.steward.restoring._tried:
            return
        answered = set(gather.asked) - _missing(message.errors)  # others may have answered since
        assumed = gather.lineage()
        if assumed is not None and assumed.number not in self.done:
            self.counts["an epoch of which nobody knows whether it ran"] += 1
            return
        commits = set(gather.durable.commits if gather.durable is not None else ())
        if any(error.startswith("storage did not answer") for error in message.errors):
            commits = set()  # it has answered since
        best = self._best_restorable(answered, commits, gather.attempt)
        if best is not None and (message.snapshot is None or message.snapshot < best):
            raise Broken(f"P3 {message.snapshot} was chosen although {best} was there")
        self._everyone_was_asked(host, set(gather.answers))

    def _best_restorable(
        self, answered: set[str], commits: set[SnapshotId], attempt: str
    ) -> SnapshotId | None:
        """The newest snapshot of the lineage that a level was promised for and that can be had from those who answered."""
        lineage = self._lineage()
        promised = [
            s
            for s, p in self.promises.items()
            if p.level >= 0 and (lineage is None or lineage.is_candidate(s))
        ]
        found = [s for s in promised if self.truth(s, among=answered, attempt=attempt) >= 0]
        found += [s for s in commits if lineage is None or lineage.is_candidate(s)]
        return max(found, default=None)

    def _lineage(self) -> EpochRecord | None:
        return self.records[max(self.done)] if self.done else None

    def _everyone_was_asked(self, host: Host, answered: set[str]) -> None:
        """Nodes that could answer and hold something promised did answer."""
        if self.world.trouble_since(self.world.policy.inventory_timeout_s + 1.0):
            return
        for other in self.world.hosts.values():
            promised = {snapshot for snapshot, promise in self.promises.items() if promise.level >= 0}
            holds = any(m.snapshot in promised for m in other.memory.values() if m.state == "sealed")
            heard = self.world.net.links.beats(host.name, other.name, self.world.clock.now)
            could = other.alive and not other.paused and heard
            if could and holds and other.name not in answered and self._matters(other):
                raise Broken(f"P3 {other.name} holds memory of the job and was not asked")

    def _matters(self, other: Host) -> bool:
        lineage = self._lineage()
        if lineage is None:
            return False
        names = {node.node for node in (*lineage.nodes, *lineage.holders)}
        return other.name in names

    def _refused(self, host: Host, message: msg.JoinRefused) -> None:
        if message.code not in ("unrecoverable", "unreachable") or message.attempt in self._refusals:
            return
        self._refusals.add(message.attempt)
        gather = host.gathered
        if gather is None or gather.attempt != message.attempt or host.machine.steward.restoring._tried:
            return
        if host.machine.steward.restoring.away:
            self.counts["refused for a holder that was never reached"] += 1
            return
        ask = next(iter(gather.joined.values()), None)
        if ask is None or ask.step is not None:
            return
        first_lives = all(host.life <= 1 for host in self.world.hosts.values())
        assumed = gather.lineage()
        # Of two starts at once one may be told so: what the other, which stands there, may have taken meanwhile nobody can say.
        alone = assumed is None or assumed.nonce == message.attempt or not self._stands(assumed.nonce)
        # Of a start that was declared while somebody could not be heard nobody knows what it was declared against.
        vouched = all(record.before[0] for record in gather.records)
        never = not self.layouts and first_lives and alone and vouched
        if message.code == "unrecoverable" and ask.source is None and never:
            raise Broken(f"D11 a job that never had a snapshot was refused ({message.reason})")
        if assumed is not None and assumed.number not in self.done:
            self.counts["refused for an epoch of which nobody knows whether it ran"] += 1
            return
        commits = set(gather.durable.commits if gather.durable is not None else ())
        best = self._best_restorable(set(gather.answers), commits, gather.attempt)
        if best is not None:
            raise Broken(f"P3 the restore was refused ({message.reason}) although {best} was there")

    def _stands(self, attempt: str) -> bool:
        """A rank of this start is at its daemon."""
        procs = (proc for host in self.world.hosts.values() for proc in host.procs.values())
        return any(proc.alive and proc.run.attempt == attempt for proc in procs)

    # --- restores -----------------------------------------------------------------------------------------------
    def fetched(self, do: ins.PrepareRestore, sources: set[str]) -> None:
        found = self._sources.setdefault(do.round, set())
        before = len(found)
        found |= sources
        if before < 3 <= len(found):
            self.counts["a restore mixing three sources"] += 1

    def restored(self, run: Run) -> None:
        """P1, P9: all ranks have the same step, whole, and it is the one that was chosen."""
        restored = {proc.restored for proc in run.procs}
        if len(restored) != 1:
            raise Broken(f"P1 ranks restored different snapshots: {restored}")
        snapshot = next(iter(restored))
        if snapshot is None:
            self.counts["fresh start"] += 1
            self._fresh(run)
            return
        tokens = {token for proc in run.procs for token in proc.loaded or ()}
        right = (self.records[snapshot.epoch].nonce, snapshot.step)
        if tokens != {right}:
            raise Broken(f"P1 the restore of {snapshot} loaded {tokens}")
        self.counts["restore"] += 1
        self.counts["restore into another world"] += run.world_changed(self.layouts.get(snapshot, {}))

    def _fresh(self, run: Run) -> None:
        ask = run.ask
        if ask is None or ask.allow_fresh or ask.step is not None:
            return
        number = next(record.number for record in self.records.values() if record.nonce == run.attempt)
        ran = [self.records[n] for n in self.done if n < number]
        last = max(ran, key=lambda record: record.number, default=None)
        # What another start of the job, which this one supersedes, certified after it had been asked is lost with it.
        asked = min(at for (attempt, _), at in self.told_at.items() if attempt == run.attempt)
        known = [snapshot for snapshot, at in self.known_at.items() if at < asked]
        if any(last is None or last.is_candidate(snapshot) for snapshot in known):
            raise Broken("P1 a fresh start was called proven although the job has had checkpoints")

    def committed(self, snapshot: SnapshotId) -> None:
        self.known_at.setdefault(snapshot, self.world.clock.now)
        self.counts["committed"] += 1


def _missing(errors: tuple[str, ...]) -> set[str]:
    """The nodes named as silent."""
    named = [error.removeprefix("no answer from ") for error in errors if error.startswith("no answer from ")]
    return set(", ".join(named).split(", ")) if named else set()
