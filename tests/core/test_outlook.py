"""What a failure would cost now: a table of situations, and who may not be lost against trying each loss (P2, P3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.rates import CAPTURE, ENCODING, REPLICA, SEAL, Pace, Rates
from ckptd.core.redundancy.outlook import (
    ALL,
    DOMAIN,
    FAILURES,
    NODE,
    PROCESS,
    Outlook,
    Point,
    Situation,
    critical,
    fatal_places,
    outlooks,
)
from ckptd.core.redundancy.parity_sets import Member, ParitySet, tolerance
from ckptd.core.redundancy.protection import level, slice_classes
from tests.core.worlds import World, fsdp, quick, worlds

DOMAINS = {"a": "rack1", "b": "rack1", "c": "rack2"}
NOBODY: frozenset[str] = frozenset()


def at(
    step: int, level: int, *, durable: bool = False, nodes: str | None = "", domains: str | None = "", parity: bool = False
) -> Point:
    """``nodes``, ``domains``: critical ones, with spaces between; None: not known."""
    found = [None if names is None else frozenset(names.split()) for names in (nodes, domains)]
    return Point(SnapshotId(1, step), level, durable, parity, *found)


SEALED = at(8, 0, nodes="a b c", domains="rack1 rack2")
# name, snapshots, steps trained -> per class (step, steps lost, source, victim)
SITUATIONS = [
    ("before anything was called", [], -1, [(-1, 0, "", "")] * 4),
    ("before the first snapshot", [], 5, [(-1, 5, "", "")] * 4),
    ("sealed only", [SEALED], 10, [(8, 2, "own", ""), (-1, 10, "", ""), (-1, 10, "", ""), (-1, 10, "", "")]),
    ("protected", [at(8, 1)], 9, [(8, 1, "own", ""), (8, 1, "peer", ""), (8, 1, "peer", ""), (-1, 9, "", "")]),
    ("a newer one is on its way", [at(4, 1), SEALED], 10,
     [(8, 2, "own", ""), (4, 6, "peer", ""), (4, 6, "peer", ""), (-1, 10, "", "")]),
    ("degraded after a loss: only c holds some", [at(6, 0, nodes="c", domains="rack2")], 7,
     [(6, 1, "own", ""), (-1, 7, "", "c"), (-1, 7, "", "rack2"), (-1, 7, "", "")]),
    ("copies within one rack", [at(6, 0, domains="rack1")], 7,
     [(6, 1, "own", ""), (6, 1, "peer", ""), (-1, 7, "", "rack1"), (-1, 7, "", "")]),
    ("durable is older than memory", [at(4, -1, durable=True), SEALED], 10,
     [(8, 2, "own", ""), (4, 6, "durable", ""), (4, 6, "durable", ""), (4, 6, "durable", "")]),
    ("durable is as new as memory", [replace(SEALED, durable=True)], 8,
     [(8, 0, "own", ""), (8, 0, "durable", ""), (8, 0, "durable", ""), (8, 0, "durable", "")]),
    ("durable as well, and one node holds what no other does", [at(6, 0, durable=True, nodes="b", domains="rack1")], 7,
     [(6, 1, "own", ""), (6, 1, "durable", "b"), (6, 1, "durable", "rack1"), (6, 1, "durable", "")]),
    ("memory was released, storage has it", [at(4, -1, durable=True)], 6, [(4, 2, "durable", "")] * 4),
    ("parity is whole", [at(8, 1, parity=True)], 8,
     [(8, 0, "own", ""), (8, 0, "parity", ""), (8, 0, "parity", ""), (-1, 8, "", "")]),
    ("parity after a loss: each other one is needed", [at(8, 0, nodes="a c", domains="rack1 rack2", parity=True)], 8,
     [(8, 0, "own", ""), (-1, 8, "", "a"), (-1, 8, "", ""), (-1, 8, "", "")]),
]  # fmt: skip


@pytest.mark.parametrize(("points", "trained", "expected"), [row[1:] for row in SITUATIONS], ids=[row[0] for row in SITUATIONS])
def test_each_situation(points: list[Point], trained: int, expected: list[tuple[int, int, str, str]]) -> None:
    now = Situation(points, trained, ("a", "b", "c"), DOMAINS, {0: 100, 1: 100, 2: 100})
    found = outlooks(now, Rates())
    assert [outlook.failure for outlook in found] == list(FAILURES)
    assert [(o.step, o.lost_steps, o.source, o.victim) for o in found] == expected
    assert all(outlook.exact for outlook in found)


def one(failure: str, now: Situation, rates: Rates | None = None) -> Outlook:
    return next(outlook for outlook in outlooks(now, rates or Rates()) if outlook.failure == failure)


def test_who_knows_levels_only_promises_no_more_and_says_so() -> None:
    """A level of 1 means any domain; of a level of 0 it is not known whether this one may go."""
    known = Situation([at(4, 1, nodes=None, domains=None)], 5, ("a", "b", "c"), DOMAINS)
    assert (one(NODE, known).step, one(NODE, known).exact) == (4, True)
    newer = replace(known, points=[*known.points, at(5, 0, nodes=None, domains=None)])
    assert (one(NODE, newer).step, one(NODE, newer).exact) == (4, False)
    assert (one(PROCESS, newer).step, one(PROCESS, newer).exact) == (5, True)
    assert one(ALL, newer).exact


def test_what_moves() -> None:
    homes, sizes = ("a", "a", "b", "c"), {0: 10, 1: 20, 2: 30, 3: 40}
    now = Situation([at(4, 1)], 5, homes, DOMAINS, sizes)
    assert one(PROCESS, now).move_bytes == 0
    assert one(NODE, now).move_bytes == 30, "the node with the most ranks"
    assert one(DOMAIN, now).move_bytes == 60, "rack1"
    assert one(ALL, replace(now, points=[at(4, -1, durable=True)])).move_bytes == 100
    some = replace(now, rank_bytes={3: 40})
    assert one(DOMAIN, some).move_bytes == 120, "ranks of which nothing is known are as large as the largest"


# --- seconds ---------------------------------------------------------------------------------------------------------------
def test_what_was_not_measured_is_said_and_not_guessed() -> None:
    now = Situation([at(4, 1), at(3, -1, durable=True)], 5, ("a", "b"), DOMAINS, {0: 100, 1: 50})
    rates = Rates()
    assert one(NODE, now, rates).estimate.seconds is None
    assert one(NODE, now, rates).estimate.missing == ("decide", "transfer from own", "transfer from peer", "load")
    rates.moved(SEAL, 100, 1.0)
    rates.moved(REPLICA, 100, 4.0)
    rates.moved(CAPTURE, 200, 1.0)
    assert one(NODE, now, rates).estimate.missing == ("decide",)
    rates.decided(0.25)
    found = one(NODE, now, rates).estimate
    assert found.phases == {"decide": 0.25, "transfer": 4.0, "load": 0.5} and found.seconds == 4.75
    assert found.basis == ("decide: 1 start", "own: 1 seal", "peer: 1 replica", "load: 1 capture")
    assert one(PROCESS, now, rates).estimate.seconds == 1.75, "nothing comes from peers"
    storage = one(ALL, now, rates).estimate
    assert storage.seconds is None and storage.missing == ("transfer from durable",)
    assert one(ALL, replace(now, points=[at(4, 1)]), rates).estimate.seconds is None, "there is nothing to restore"


def test_a_restore_counts_before_what_stands_in_for_it() -> None:
    rates = Rates()
    rates.moved(REPLICA, 100, 1.0)
    rates.moved(ENCODING, 100, 1.0)
    rates.restored({"own": 50, "peer": 100, "durable": 0}, {"decide": 1.0, "transfer": 2.0, "load": 0.5})
    assert rates.rate("peer") == (50.0, "1 restore"), "the far source takes the time"
    assert rates.rate("own") is None, "in a mixture its own time is not known"
    assert rates.rate("load") == (300.0, "1 restore")
    rates.restored({"own": 0, "peer": 100, "durable": 100}, {"transfer": 2.0, "load": 1.0})
    assert rates.rate("peer") == (50.0, "1 restore") and rates.rate("durable") is None, "two far ones are not told apart"
    assert rates.rate("parity") == (100.0, "1 encoding")
    assert rates.loaded_bytes == 200


def test_a_rank_that_loads_more_than_its_slot() -> None:
    """DDP: each captures a share, each loads all."""
    rates = Rates()
    rates.restored({"own": 40, "peer": 160}, {"transfer": 2.0, "load": 1.0})
    rates.moved(SEAL, 100, 1.0)
    rates.decided(0.0)
    now = Situation([at(4, 1)], 5, ("a", "b"), DOMAINS, {0: 40, 1: 40})
    assert one(NODE, now, rates).estimate.phases == {"decide": 0.0, "transfer": 2.5, "load": 1.0}
    assert one(NODE, now, rates).move_bytes == 200


def test_a_measurement_of_nothing_says_nothing() -> None:
    rates = Rates()
    rates.moved(SEAL, 0, 1.0)
    rates.moved(SEAL, 100, 0.0)
    assert rates.rate("own") is None


def test_the_pace_of_training() -> None:
    pace = Pace()
    for step, now in ((1, 0.0), (2, 1.0), (4, 3.0), (5, 100.0), (6, 101.0)):
        pace.stepped(step, now)
    assert pace.seconds == 1.0, "one evaluation of 97 s among them"
    pace.restart()
    pace.stepped(3, 500.0)
    pace.stepped(4, 501.0)
    assert pace.seconds == 1.0, "what lies between two epochs is no step"
    assert Pace().seconds is None


# --- who may not be lost ---------------------------------------------------------------------------------------------------
@quick
@given(st.data(), worlds(ranks=3, tensors=3))
def test_critical_places_are_those_whose_loss_leaves_something_nowhere(data: st.DataObject, world: World) -> None:
    holding = st.tuples(st.sampled_from("abcd"), st.integers(0, 2))
    holders = {rank: data.draw(st.lists(holding, max_size=4)) for rank in range(world.size)}
    classes = slice_classes(world.layouts)
    if level(classes, holders) >= 0:
        alone = {p for p in "abcd" if level(classes, {r: [h for h in held if h[0] != p] for r, held in holders.items()}) < 0}
        assert critical(classes, holders) == alone


places = st.frozensets(st.sampled_from("abcd"), max_size=2)


@quick
@given(st.data(), st.integers(1, 2))
def test_critical_places_with_parity(data: st.DataObject, parity: int) -> None:
    world = fsdp(4)
    classes = slice_classes(world.layouts)
    parity_set = ParitySet(4, 0, parity, tuple(Member(rank, 1000, f"l{rank}") for rank in range(4)))
    data_at = {rank: data.draw(places) for rank in range(4)}
    parts_at = {rank: data.draw(places) for rank in range(4)}

    def whole(lost: frozenset[str]) -> bool:
        left = {rank: found - lost for rank, found in data_at.items()}
        shards = {rank: found - lost for rank, found in parts_at.items()}
        spared = dict.fromkeys(range(4), tolerance(parity_set, left, shards)) if tolerance(parity_set, left, shards) >= 0 else {}
        return level(classes, {rank: [(p, 0) for p in found] for rank, found in left.items()}, spared) >= 0

    if whole(NOBODY):
        fatal = fatal_places(parity_set, data_at, parts_at)
        spared = {} if fatal is None else dict.fromkeys(range(4), fatal)
        held = {rank: [(p, 0) for p in found] for rank, found in data_at.items()}
        assert critical(classes, held, spared) == {p for p in "abcd" if not whole(frozenset(p))}


def test_a_parity_set_with_a_loss_needs_all_the_others() -> None:
    world = fsdp(3)
    parity_set = ParitySet(3, 0, 1, tuple(Member(rank, 1000, f"l{rank}") for rank in range(3)))
    here = {rank: frozenset({f"n{rank}"}) for rank in range(3)}
    assert fatal_places(parity_set, here, here) == frozenset()
    without = here | {1: NOBODY}
    fatal = fatal_places(parity_set, without, without)
    assert fatal == {"n0", "n2"}
    holders = {0: [("n0", 0)], 1: [], 2: [("n2", 0)]}
    assert critical(slice_classes(world.layouts), holders, dict.fromkeys(range(3), fatal)) == {"n0", "n2"}
    assert fatal_places(parity_set, without, here | {1: NOBODY, 0: NOBODY}) is None
