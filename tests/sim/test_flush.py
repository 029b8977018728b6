"""Storage that is slow or hangs on the steward's node (P14): a commit has a limit of its own, and the first one wins."""

from __future__ import annotations

from ckptd.core.protocol import instructions as ins
from tests.sim.host import Host
from tests.sim.world import World
from tests.sim.writes import Writes

SEED = 5


class SlowWrites(Writes):
    """``hang``: the first so many commits never end."""

    def __init__(self, host: Host, write_s: float, commit_s: float, hang: int) -> None:
        super().__init__(host)
        self._write_s, self._commit_s, self._hang = write_s, commit_s, hang
        self.commits = 0

    def write(self, do: ins.WriteFiles) -> None:
        self.host.world.clock.after(self._write_s, self._write, self.host.life, self.host.machine, do)

    def commit(self, do: ins.Commit) -> None:
        self.commits += 1
        if self.commits > self._hang:
            self.host.world.clock.after(self._commit_s, self._commit, self.host.life, do)


def life(write_s: float, commit_s: float, hang: int = 0) -> tuple[int, int, int]:
    """Flushes given up, commits tried, snapshots committed; write_timeout_s is 8 s."""
    world = World(SEED)
    world.faults.active = False
    writes = []
    for host in world.hosts.values():
        host.writes = SlowWrites(host, write_s, commit_s, hang)
        writes.append(host.writes)
    counts = world.run().counts
    return counts["alarm flush"], sum(w.commits for w in writes), len(world.store.ever)


def test_writing_and_committing_have_the_whole_limit_each() -> None:
    given_up, tried, committed = life(write_s=6.0, commit_s=6.0)
    assert given_up == 0
    assert tried == committed > 0


def test_a_commit_that_never_ends_is_given_up_and_tried_again() -> None:
    given_up, tried, committed = life(write_s=0.5, commit_s=0.5, hang=2)
    assert given_up == 2
    assert committed > 0 and tried - committed - 2 in (0, 1), "the last one may be under way when the world ends"


def test_a_commit_that_ends_late_ends_the_try_after_it() -> None:
    given_up, tried, committed = life(write_s=3.0, commit_s=10.0)
    assert tried == given_up == committed > 0
