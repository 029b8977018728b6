"""The durable side of a simulated daemon: claims, pieces of held slots into files, reports, one commit that checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from tests.sim.broken import Broken
from tests.sim.store import Committed, Rows

if TYPE_CHECKING:
    from tests.sim.host import Host

SYNC_S = 0.03  # between a write and its sync
CLAIM_S = 0.02
COMMIT_S = 0.05


class Writes:
    def __init__(self, host: Host) -> None:
        self.host = host
        self._cancelled: set[str] = set()

    # --- reading and claiming -----------------------------------------------------------------------------------
    def read(self, do: ins.ReadDurable) -> None:
        world = self.host.world
        seconds = 0.02 + 0.1 * world.rng.random() + world.store.wait()
        world.clock.after(seconds, self._read, self.host.life, do.attempt)

    def _read(self, life: int, attempt: str) -> None:
        store = self.host.world.store
        reason = store.refuses(writes=False)
        if reason:
            answer = ev.DurableRead(attempt, False, reason=reason)
        else:
            answer = ev.DurableRead(attempt, True, store.newest(), tuple(sorted(store.commits)))
        self.host.feed_if(life, answer)

    def claim(self, do: ins.ClaimEpoch) -> None:
        world = self.host.world
        world.clock.after(CLAIM_S + world.store.wait(), self._claim, self.host.life, do)

    def _claim(self, life: int, do: ins.ClaimEpoch) -> None:
        """Without storage the shell says at once that it is the epoch's."""
        store = self.host.world.store
        reason = store.refuses() if self.host.world.policy.durable else "no storage"
        ok, taken = store.claim(do.record) if not reason else (True, 0)
        if not reason and store.answers_wrongly():
            ok, taken, reason = True, 0, "EIO"
        reason = reason if self.host.world.policy.durable else ""
        self.host.feed_if(life, ev.EpochClaimed(do.attempt, do.record.number, ok, taken, reason))

    # --- files --------------------------------------------------------------------------------------------------
    def cancel(self, attempt: str) -> None:
        self._cancelled.add(attempt)

    def write(self, do: ins.WriteFiles) -> None:
        world = self.host.world
        seconds = world.flush_s * (0.5 + world.rng.random()) + world.store.wait()
        world.clock.after(seconds, self._written, self.host.life, do)

    def _written(self, life: int, do: ins.WriteFiles) -> None:
        if life != self.host.life:
            return
        store = self.host.world.store
        reason = "cancelled" if do.attempt in self._cancelled else store.refuses()
        rows = self._rows(do)
        if reason or rows is None:
            self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, False, reason or "damage"))
            return
        token = store.write(do.attempt, self.host.name, rows)
        if self.host.world.mutant("no file sync"):
            self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, True, "", self.host.name.encode()))
        else:
            self.host.world.clock.after(SYNC_S + store.wait(), self._synced, life, do, token)

    def _rows(self, do: ins.WriteFiles) -> Rows | None:
        """None: a slot is damaged."""
        rows: Rows = []
        for slot, piece in do.pieces:
            mem = self.host.memory.get(slot)
            if mem is None or mem.snapshot != do.snapshot or mem.payload is None or mem.layout is None:
                raise Broken(f"P1 slot {slot} of {self.host.name} was reused while it was being written")
            if not mem.intact:
                self.host.feed(ev.SlotDamaged(slot, "found while writing"))
                return None
            every = range(len(mem.layout.fragments)) if piece.fragments is None else piece.fragments
            for index in every:
                fragment = mem.layout.fragments[index]
                rows.append((fragment.key, fragment.box, mem.piece(index)))
            if piece.objects:
                rows.append(("", piece.rank, mem.piece(-1)))
        return rows

    def _synced(self, life: int, do: ins.WriteFiles, token: int) -> None:
        """P11: a failed sync is final for this file."""
        if life != self.host.life:
            return
        ok = self.host.world.store.sync_file(do.attempt, self.host.name, token)
        if not ok:
            self.host.world.oracle.count("a failed sync of a file")
        reason = "" if ok else "fsync: EIO"
        self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, ok, reason, self.host.name.encode()))

    # --- commits ------------------------------------------------------------------------------------------------
    def commit(self, do: ins.Commit) -> None:
        self.host.world.clock.after(COMMIT_S + self.host.world.store.wait(), self._commit, self.host.life, do)

    def _commit(self, life: int, do: ins.Commit) -> None:
        """Published; a daemon that dies now leaves a manifest that nobody has synced."""
        if life != self.host.life:
            return
        store = self.host.world.store
        reason = store.refuses()
        if not reason:
            try:
                store.publish(self._assemble(do), do.record)
            except PermissionError as error:
                reason = str(error)
        if reason:
            self.host.feed(ev.CommitDone(do.snapshot, do.attempt, False, reason))
        elif self.host.world.mutant("no manifest sync"):
            self._committed(life, do)
        else:
            self.host.world.clock.after(SYNC_S + store.wait(), self._committed, life, do)

    def _committed(self, life: int, do: ins.Commit) -> None:
        if life != self.host.life:
            return
        store, oracle = self.host.world.store, self.host.world.oracle
        ok = self.host.world.mutant("no manifest sync") or store.sync_manifest(do.snapshot)
        if ok and (store.answers_wrongly() or self.host.world.faults.denies_commit()):
            oracle.count("a commit reported as failed")
            ok = False
        elif ok:
            store.acknowledge(do.snapshot, do.record)
            oracle.committed(do.snapshot)
        self.host.feed(ev.CommitDone(do.snapshot, do.attempt, ok, "" if ok else "fsync: EIO"))

    def _assemble(self, do: ins.Commit) -> Committed:
        """From what was really written. The oracle looks at whether it is whole."""
        store = self.host.world.store
        done = Committed(do.snapshot, do.attempt, do.keep)
        files = store.files[do.attempt]
        for node in (report.decode() for report in do.reports):
            if (do.attempt, node) in store.tainted:
                raise Broken(f"P11 the commit of {do.snapshot} uses a file of {node} whose sync had failed")
            for key, where, data in files[node]:
                if key:
                    done.tensors.setdefault(str(key), {})[where] = data  # type: ignore[index,assignment]
                else:
                    done.objects[where] = data  # type: ignore[index,assignment]
        slices = [(key, box.offsets[0], data) for key, found in done.tensors.items() for box, data in found.items()]
        self.host.world.oracle.published(do.snapshot, slices, done.objects)
        return done
