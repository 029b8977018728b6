"""A steward is judged by what it could know, and by epochs wherever they were heard of (judge.py)."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord
from tests.sim.world import World

SEED = 2  # a world of several nodes
START_S = 30.0  # simulated, until something is certified


def test_what_a_daemon_has_not_taken_in_yet_is_not_in_its_answer() -> None:
    """A copy had arrived while it was at work, and the news of it waited behind the question (seed 434309143433)."""
    world = World(SEED)
    world.start_without_faults()
    oracle = world.oracle
    assert world.clock.run(START_S, lambda: bool(oracle.certified_ever))
    newest, nodes = max(oracle.certified_ever), set(world.hosts)
    oracle.told_at = {("a9", name): (world.clock.now, oracle.turn) for name in nodes}
    assert oracle.truth(newest, among=nodes, attempt="a9") >= 0
    for _, mem in oracle.slots_of(newest):
        assert mem.known is not None
        mem.known = oracle.turn + 1
    assert oracle.truth(newest, among=nodes, attempt="a9") == -1
    assert oracle.truth(newest, among=nodes) >= 0


def test_an_epoch_that_no_steward_opened_is_one_where_it_was_found_claimed() -> None:
    """Its steward was lost before storage answered, and came back while the ranks trained on (seed 434309144907)."""
    world = World(SEED)
    host = next(iter(world.hosts.values()))
    record = EpochRecord(3, "a6", (host.name,), (host.info,))
    world.oracle.persisted(host, record)
    assert world.oracle.records == {3: record}
