"""What goes wrong at one instant: of a start, of a claim, of a snapshot that has just become complete, of a commit."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.context import succession

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.host import Host
    from tests.sim.world import World

CUT_S = (0.5, 8.0)
STORAGE_S = (1.0, 8.0)
FORGOTTEN_OF = 0.8  # of the claims of a start that asks for no restore

# How a daemon ends: what of its node is left.
DAEMON = "daemon lost"  # the keeper has the memory, ranks live
KEEPER = "daemon and keeper lost"  # ranks live
REBOOT = "node rebooted"  # the disk is left, as far as it was synced
NODE = "node lost"  # a new machine in its place, or one whose disk survived


class Moments:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._apart = Random(f"aimed {faults.world.seed}")  # so that a seed of before shows what it showed, as far as it can

    def on_complete(self, snapshot: SnapshotId) -> None:
        """All ranks hold it, nobody has certified it."""
        if not self._faults.active or not self._faults.aimed or self._faults.rng.random() > self._faults.season.aimed_of:
            return
        record = self._faults.world.oracle.records.get(snapshot.epoch)
        if record is not None:
            self._faults.world.clock.after(0.0, self._kill_steward, succession(record)[0], snapshot)

    def _kill_steward(self, node: str, snapshot: SnapshotId) -> None:
        host = self._faults.world.hosts[node]
        if host.alive and snapshot in self._faults.world.oracle.complete_uncertified:
            self._faults.kill(host, DAEMON if self._faults.rng.random() < 0.5 else NODE)

    def on_claim(self, host: Host, record: EpochRecord) -> None:
        """It is decided what the job restores. Nodes that hold something newer have lost it by that, once they hear of it."""
        if not self._faults.active:
            return
        run = host.world.launcher.run
        if run is not None and run.attempt == record.nonce and run.ask is None and self._apart.random() < FORGOTTEN_OF:
            self._faults.set_trap(host, ins.PersistEpoch, DAEMON)  # the others know of its epoch, and its ranks join it anew
            return
        chance, season = self._apart.random(), self._faults.season
        if chance < season.unheard_of:
            self._unheard(host, record)
        elif chance < season.unheard_of + season.again_of:
            self._again(host.world, record)
        if self._apart.random() < season.struck_of:
            self._struck(host.world, record)
        if self._apart.random() < season.away_of:
            self._storage_away(host.world)

    def _unheard(self, host: Host, record: EpochRecord) -> None:
        """One of them, that is no member, does not for a while, and goes on as before."""
        others = [other for name, other in host.world.hosts.items() if other.alive and name not in record.ranks]
        newer = [other for other in others if other.holds_beyond(record)]
        if newer:
            other = self._apart.choice(newer)
            self._faults.count("a node does not hear of the new epoch")
            self._faults.world.trouble()
            self._faults.world.trace(other.name, "!", f"does not hear {host.name}")
            self._faults.world.net.links.deaf.add((host.name, other.name))
            self._faults.world.net.changed()
            self._faults.world.clock.after(self._apart.uniform(*CUT_S), self._faults.heal)

    def _again(self, world: World, record: EpochRecord) -> None:
        run = world.launcher.run
        if run is not None and run.attempt == record.nonce and run.first_comes_again():
            self._faults.count("a rank comes again as one of another world")

    def _struck(self, world: World, record: EpochRecord) -> None:
        """What the job is to restore is damaged while that is decided, or who holds it dies or is cut off: another round."""
        held = {host: mems for host in world.hosts.values() if host.alive and (mems := host.sealed_of(record.ancestry[:1]))}
        if not held:
            return
        host = self._apart.choice(list(held))
        roll = self._apart.random()
        if roll < 1 / 3:
            self._faults.damage_one(host, self._apart.choice(held[host]))
        elif roll < 2 / 3:
            how = self._apart.choice([DAEMON, KEEPER])
            self._faults.world.clock.after(self._apart.uniform(0.0, 0.6), self._faults.kill_living, host, how)
        else:
            self._faults.cut_off({host.name})

    def _storage_away(self, world: World) -> None:
        self._faults.count("storage away at a claim")
        world.store.up = False
        world.clock.after(self._apart.uniform(*STORAGE_S), setattr, world.store, "up", True)

    def denies_commit(self) -> bool:
        """It is done, and whoever did it is told that it failed."""
        return self._faults.active and self._apart.random() < self._faults.season.denied_of

    def on_start(self, hosts: list[Host]) -> None:
        """The job begins on these: one of them may not survive writing its epoch down."""
        if self._faults.active and self._faults.rng.random() < self._faults.season.written_of:
            self._faults.set_trap(self._faults.rng.choice(hosts), ins.PersistEpoch)
