"""The durable side of a simulated daemon: pieces of held slots into files, reports, one commit that checks them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core import events as ev
from ckptd.core import instructions as ins
from ckptd.core.box import uncovered
from ckptd.core.machine.context import decode_layout
from tests.sim.store import Broken, Committed

if TYPE_CHECKING:
    from tests.sim.host import Host


class Writes:
    def __init__(self, host: Host) -> None:
        self.host = host
        self._cancelled: set[str] = set()

    def cancel(self, attempt: str) -> None:
        self._cancelled.add(attempt)

    def write(self, do: ins.WriteFiles) -> None:
        seconds = self.host.world.flush_s * (0.5 + self.host.world.rng.random())
        self.host.world.clock.after(seconds, self._written, self.host.life, do)

    def _written(self, life: int, do: ins.WriteFiles) -> None:
        if life != self.host.life:
            return
        reason = "" if self.host.world.store.up else "storage is gone"
        if do.attempt in self._cancelled:
            reason = "cancelled"
        rows: list[tuple[object, ...]] = []
        for slot, piece in do.pieces:
            mem = self.host.memory.get(slot)
            if mem is None or mem.snapshot != do.snapshot or mem.content is None or mem.layout is None:
                raise Broken(f"P1 slot {slot} of {self.host.name} was reused while it was being written")
            if not mem.intact:
                self.host.feed(ev.SlotDamaged(slot, "found while writing"))
                reason = "damage"
                break
            every = range(len(mem.layout.fragments)) if piece.fragments is None else piece.fragments
            for index in every:
                fragment = mem.layout.fragments[index]
                rows.append((fragment.key, fragment.box, mem.content[index]))
            if piece.objects:
                rows.append(("", piece.rank, mem.content[-1]))
        if not reason:
            self.host.world.store.files.setdefault(do.attempt, {})[self.host.name] = rows
        self.host.feed(ev.FilesWritten(do.snapshot, do.attempt, not reason, reason, self.host.name.encode()))

    def commit(self, do: ins.Commit) -> None:
        self.host.world.clock.after(0.05, self._commit, self.host.life, do)

    def _commit(self, life: int, do: ins.Commit) -> None:
        if life != self.host.life:
            return
        store = self.host.world.store
        reason = "" if store.up else "storage is gone"
        if not reason:
            try:
                store.commit(self._assemble(do), do.record)
                self.host.world.oracle.committed(do.snapshot)
            except PermissionError as error:
                reason = str(error)
        self.host.feed(ev.CommitDone(do.snapshot, do.attempt, not reason, reason))

    def _assemble(self, do: ins.Commit) -> Committed:
        """Prove coverage from what was really written."""
        done = Committed(do.snapshot, do.attempt, do.keep)
        tokens = set()
        files = self.host.world.store.files[do.attempt]
        for node in (report.decode() for report in do.reports):
            for key, where, token in files[node]:
                tokens.add(token)
                if key:
                    done.tensors.setdefault(str(key), {})[where] = token  # type: ignore[index,assignment]
                else:
                    done.objects[where] = token  # type: ignore[index,assignment]
        if len(tokens) != 1:
            raise Broken(f"P1 the commit of {do.snapshot} mixes {tokens}")
        for layout in map(decode_layout, do.layouts.values()):
            for fragment in layout.fragments:
                if fragment.nbytes and uncovered(fragment.box, list(done.tensors.get(fragment.key, {}))):
                    raise Broken(f"P1 the commit of {do.snapshot} lacks {fragment.key} {fragment.box}")
            if layout.rank not in done.objects:
                raise Broken(f"P1 the commit of {do.snapshot} lacks the objects of rank {layout.rank}")
        return done
