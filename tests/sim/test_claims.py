"""A steward stands still while storage claims its epoch's number, and decides anew when it goes on (P12).

So a first start may be epoch 2.
"""

from __future__ import annotations

import pytest

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.messages import RestoreAsk
from tests.sim.trainer import Run
from tests.sim.world import World
from tests.sim.writes import Writes

START_S = 30.0  # simulated


class Slow(Writes):
    """The daemon is stopped for so long when storage has done its first claim."""

    stop_s = 0.0
    claimed = 0

    def _claim(self, record: EpochRecord) -> tuple[bool, int]:
        done = super()._claim(record)
        self.claimed += 1
        if self.claimed == 1 and self.stop_s:
            self.host.pause(True)
            self.host.world.clock.after(self.stop_s, self.host.pause, False)
        return done


@pytest.mark.parametrize(("stop_s", "number"), [(0.0, 1), (1.5, 2), (3.5, 2)])
def test_a_number_that_was_claimed_and_not_opened_is_left_out(stop_s: float, number: int) -> None:
    worlds = map(World, range(1000))
    world = next(w for w in worlds if len(w.hosts) == 2 and len(w.everyone) == 1 and w.policy.durable)
    world.quiet()
    hosts = list(world.hosts.values())
    slow = Slow(hosts[0])
    slow.stop_s, hosts[0].writes = stop_s, slow
    for host in hosts:
        host.start()
    run = world.launcher.run = Run(world, "a1", hosts, RestoreAsk())
    run.start()
    assert world.clock.run(START_S, lambda: run.training)
    assert [host.record.number for host in hosts if host.record is not None] == [number, number]
    assert world.store.claims[number] == hosts[0].record
