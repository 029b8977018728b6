"""What a steward decides for a start of the job, judged by what those who answered it could know (P1, P3, design D11)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import messages as msg
from tests.sim.broken import Broken
from tests.sim.decisions import Told
from tests.sim.training import Origin

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.oracle import Oracle


class Judge:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._world = oracle, oracle.world
        self._refusals: set[str] = set()
        self.opened: dict[tuple[int, str], EpochRecord] = {}  # (number, attempt): where all was lost a number comes again

    def decided(self, host: Host, message: msg.EpochOpen) -> None:
        """P3: what those who answered hold of a promised snapshot is not passed over."""
        number = message.record.number
        self.opened[number, message.record.nonce] = message.record
        before = self._oracle.records.get(number)
        if before == message.record:
            return
        if before is not None:
            self._oracle.counts["one number, two records"] += 1
            if number in self._oracle.done:
                if self._left_of(before):
                    return
                self._oracle.vanished(number)
        self._oracle.records[number] = message.record  # one that never took effect counts for nothing
        start = self._oracle.decisions.of(host.name, host.life, message.record.nonce)
        assert start is not None and start.decided is not None, "nobody has asked for this epoch"
        told = start.decided
        if message.snapshot is None and (told.ask is None or told.ask.allow_fresh):
            self._oracle.declared.add(number)
        if told.ask is None or told.ask.step is not None or "damage" in told.failures:
            return
        if self.nobody_knows(told):
            self._oracle.counts["an epoch of which nobody knows whether it ran"] += 1
            return
        best = self._best_restorable(told, message.record.nonce)
        if best is not None and not self._as_new(message.snapshot, best):
            other = self._best_restorable(told, message.record.nonce, self.unwritten(told))
            if other is None or not self._as_new(message.snapshot, other):
                raise Broken(f"P3 {message.snapshot} was chosen although {best} was there")
            self._oracle.counts["a start of which only its claim is left"] += 1
        self._everyone_was_asked(host, start)

    def _left_of(self, record: EpochRecord) -> bool:
        """Something, anywhere, that could be taken for what a second record of that number names: state directories that could not
        write it down, and the memory of all its nodes, are lost together (seed 3209141664)."""
        number, store = record.number, self._world.store
        claim = store.claims.get(number)
        if (claim is not None and claim.nonce == record.nonce) or any(commit.epoch == number for commit in store.commits):
            return True
        return any(self._knows(host, record) for host in self._world.hosts.values())

    @staticmethod
    def _knows(host: Host, record: EpochRecord) -> bool:
        written = (host.state.visible, host.state.durable)
        known = [host.record, host.ran, *(r for w in written for r in (w.record, w.ran))]
        sealed = any(mem.snapshot is not None and mem.snapshot.epoch == record.number for mem in host.memory.values())
        ranks = (*host.procs.values(), *host.standing.values(), *host.arriving)
        return sealed or record in known or any((proc.epoch, proc.run.attempt) == (record.number, record.nonce) for proc in ranks)

    def _as_new(self, chosen: SnapshotId | None, best: SnapshotId) -> bool:
        return chosen is not None and (chosen == best or self._oracle.continues(chosen, self._oracle.origins[best]))

    def nobody_knows(self, told: Told) -> bool:
        """An epoch that was declared after all that trained and of which those who answered know, and of which none of them could
        say that it never ran. Of some it is only known that another one was declared after them."""
        known = {record.number: record for record in (*told.records(), *told.meanwhile)}
        later = {number for record in known.values() for number in (record.number, record.before[0])}
        newest = max(later & self._oracle.done.keys(), default=0)
        return any(
            number > newest and number not in self._oracle.done and (number not in known or told.may_have_run(known[number]))
            for number in later
        )

    def unwritten(self, told: Told) -> set[int]:
        """Epochs that took effect and in which nothing was sealed yet when each of their members that answered was restarted, with
        a state directory that had failed them. Their claim is left, and the same would be left had they never opened."""
        sealed = {snapshot.epoch for snapshot in self._oracle.origins}
        return {number for number in self._oracle.done.keys() - sealed if self._all_forgot(self._oracle.records[number], told)}

    @staticmethod
    def _all_forgot(record: EpochRecord, told: Told) -> bool:
        members = [node for node in record.nodes if node.node in record.ranks and node.node in told.answers]
        restarted = all(told.answers[node.node].incarnation != node.incarnation for node in members)
        known = [told.answers[node.node].known for node in members]
        return bool(members) and restarted and all(last is not None and last.number < record.number for last in known)

    def _best_restorable(self, told: Told, attempt: str, unwritten: Collection[int] = ()) -> SnapshotId | None:
        """The newest snapshot of the lineage that a level was promised for and that can be had from those who answered."""
        lineage = self.lineage(told.answers, told.commits is not None, told.records(), unwritten)
        owed = [s for s, promise in self._oracle.promises.items() if promise.level >= 0 and not self._oracle.forgotten(s)]
        promised = [s for s in owed if self._oracle.in_line(lineage, s)]
        found = [s for s in promised if self._oracle.truth(s, among=set(told.answers), attempt=attempt) >= 0]
        found += [s for s in told.commits or () if self._oracle.in_line(lineage, s)]
        return max(found, default=None)

    def _everyone_was_asked(self, host: Host, told: Told) -> None:
        """Nodes that could answer and hold something promised did answer."""
        named = self.named(told)
        if self._world.trouble_since(self._world.policy.inventory_timeout_s + 1.0):
            return
        promised = {s for s, promise in self._oracle.promises.items() if promise.level >= 0 and not self._oracle.forgotten(s)}
        for other in self._world.hosts.values():
            holds = any(m.snapshot in promised for m in other.memory.values() if m.state == "sealed")
            heard = self._world.net.links.beats(host.name, other.name, self._world.clock.now)
            could = other.alive and not other.paused and heard
            if could and holds and other.name in named and other.name not in told.answers:
                raise Broken(f"P3 {other.name} holds memory of the job and was not asked")

    def named(self, told: Told) -> set[str]:
        """The nodes of the last start that trained; where that began while storage was away, and neither storage nor who answered
        has heard of it, those of all that they have heard of."""
        if not self._oracle.done:
            return set()
        known, last = told.records(), self._oracle.records[max(self._oracle.done)]
        if last not in known:
            self._oracle.counts["a start of which only nodes that are not in this one know"] += 1
        records = [last] if last in known else known
        return {node.node for record in records for node in (*record.nodes, *record.holders)}

    def refused(self, host: Host, message: msg.JoinRefused) -> None:
        if message.code not in ("unrecoverable", "unreachable") or message.attempt in self._refusals:
            return
        self._refusals.add(message.attempt)
        told = self._oracle.decisions.of(host.name, host.life, message.attempt)
        if told is None or told.ask is None or told.ask.step is not None or "damage" in told.failures:
            return
        if "unreachable" in told.failures:
            self._oracle.counts["refused for a holder that was never reached"] += 1
            return
        unsure = self.nobody_knows(told)
        if message.code == "unrecoverable" and told.ask.source is None and self.never(told, message.attempt, unsure):
            raise Broken(f"D11 a job that never had a snapshot was refused ({message.reason})")
        if unsure:
            self._oracle.counts["refused for an epoch of which nobody knows whether it ran"] += 1
            return
        best = self._best_restorable(told, message.attempt)
        if best is not None:
            raise Broken(f"P3 the restore was refused ({message.reason}) although {best} was there")

    def never(self, told: Told, attempt: str, unsure: bool) -> bool:
        """Nothing was ever captured, and those who were asked could know that."""
        first_lives = all(host.life <= 1 for host in self._world.hosts.values())
        # Of two starts at once one may be told so: what the other, which stands there, may have taken meanwhile nobody can say.
        others = {record.nonce for record in told.records()} - {attempt}
        alone = not unsure or not any(map(self._stands, others))
        # Of a start that was declared while somebody could not be heard nobody knows what it was declared against.
        # Nor, where all its nodes have let go of the job since, of one that only the claim of a later one names.
        records = told.records()
        numbers = {-1, *(record.number for record in records)}
        vouched = all(record.before[0] in numbers for record in records)
        return not self._oracle.origins and first_lives and alone and vouched

    def _stands(self, attempt: str) -> bool:
        """A rank of this start is at its daemon."""
        procs = (proc for host in self._world.hosts.values() for proc in host.procs.values())
        return any(proc.alive and proc.run.attempt == attempt for proc in procs)

    def lineage(
        self, asked: Collection[str], storage: bool, named: Collection[EpochRecord] = (), unwritten: Collection[int] = ()
    ) -> Origin | None:
        """The end of what is trained: of the newest start that all ranks have loaded for, and of which those who were asked have a
        record, or one of a start that was decided after it, or hold something, or whom somebody named who joined. Nobody else can
        tell of it. One that sealed nothing, and whose record went with a state directory that did not work, is nobody's past: later
        ones have lower numbers."""
        hosts = [host for name, host in self._world.hosts.items() if name in asked]
        records = [record for host in hosts for record in (host.record, host.ran)]
        records += [record for host in hosts for record in (host.state.durable.record, host.state.durable.ran)]
        records += named
        found = [mem.snapshot for host in hosts for mem in host.memory.values() if mem.snapshot is not None]
        if storage:
            records += self._world.store.claims.values()
            found += self._world.store.commits
        known = {number for record in records if record is not None for number in (record.number, record.before[0])}
        told = (known | {snapshot.epoch for snapshot in found}) & self._oracle.done.keys() - set(unwritten)
        return self._oracle.done[max(told)] if told else None
