"""The first steward is cut off while a snapshot completes; its successor certifies it; then the first one is back (P3)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.policies import Replicas
from tests.sim.state import Mem
from tests.sim.world import World

START_S, BACK_S = 60.0, 10.0  # simulated
CUT_S = 20.0  # at most, until the successor has spoken


class Cluster(World):
    """``cut``: at the instant when all ranks hold the snapshot and nobody has certified it, the steward is cut off."""

    cut: SnapshotId | None = None
    armed = False

    def on_complete(self, snapshot: SnapshotId) -> None:
        run = self.launcher.run
        if self.armed and self.cut is None and run is not None and run.training:
            steward = self.hosts[run.nodes[0].node]
            others = set(self.hosts) - {steward.name}
            last = max(
                (m for h in self.hosts.values() for m in h.memory.values() if m.snapshot == snapshot),
                key=_since,
            )
            told = steward.memory.get(last.id) is last
            if not told and self.oracle.truth(snapshot, among=others) >= 0:
                self.cut = snapshot
                self.net.split({steward.name})


def _since(mem: Mem) -> float:
    return mem.since


def cluster() -> Cluster:
    worlds = (Cluster(seed) for seed in range(1000))
    world = next(
        w for w in worlds if len(w.hosts) == 3 and len(w.everyone) == 1 and w.policy.redundancy == Replicas(1)
    )
    world.capture_s, world.replicate_s = 0.5, 0.02  # copies of what the first ranks sealed are there before the last has
    world.start_without_faults()
    assert world.clock.run(START_S, lambda: len(world.oracle.certified_ever) >= 2), "the job did not start"
    return world


def test_what_its_successor_certified_is_not_void_for_a_grant_that_it_took_back() -> None:
    world = cluster()
    world.armed = True
    assert world.clock.run(world.clock.now + START_S, lambda: world.cut is not None), (
        "nothing became complete"
    )
    cut = world.cut
    assert cut is not None
    assert world.clock.run(world.clock.now + CUT_S, lambda: cut in world.oracle.certified_ever)
    world.net.heal()
    world.clock.run(world.clock.now + BACK_S)  # Broken when what was promised is dropped
    assert not any(cut in host.machine.slots.void for host in world.hosts.values())
    world.oracle.check_all()
