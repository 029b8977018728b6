"""Parity sets: who shares parity, what is left after losses (against trying them all), and how parts are written down (P2, P3)."""

from __future__ import annotations

from itertools import combinations, product
from random import Random

import pytest

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.redundancy.parity_sets import (
    NOBODY,
    Member,
    ParitySet,
    ParityShard,
    decodable,
    joined_digests,
    member_digests,
    packed_shard,
    replicated_ranks,
    seatings,
    shard_layout,
    tolerance,
    unpacked_shard,
)
from ckptd.core.redundancy.policies import GROUP_MAX, Parity, Replicas
from ckptd.core.state_map.layout import Layout


def record(ranks_per_node: list[int], domains: list[str] | None = None) -> EpochRecord:
    names = [f"n{i}" for i in range(len(ranks_per_node))]
    where = domains or names
    nodes = tuple(NodeInfo(n, "", "", d) for n, d in zip(names, where, strict=True))
    ranks = tuple(name for name, count in zip(names, ranks_per_node, strict=True) for _ in range(count))
    return EpochRecord(1, "a", ranks, nodes)


def parity_set_of(size: int, parity: int, *, nobody: int = -1) -> ParitySet:
    members = tuple(Member(NOBODY) if at == nobody else Member(at, 1000 + at, f"l{at}") for at in range(size))
    return ParitySet(size, 0, parity, members)


# --- who ----------------------------------------------------------------------------------------------------------------
def test_each_parity_set_takes_one_rank_of_each_node_of_its_group() -> None:
    found = seatings(record([2, 2, 2, 2]), Parity(3, 1))
    assert [seating.number for seating in found] == [0, 1]
    assert all(seating.nodes == ("n0", "n1", "n2", "n3") for seating in found)
    assert [seating.ranks for seating in found] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_node_with_fewer_ranks_only_holds_parity_in_the_later_parity_sets() -> None:
    found = seatings(record([2, 1, 2]), Parity(2, 1))
    assert [seating.ranks for seating in found] == [(0, 2, 3), (1, NOBODY, 4)]


def test_who_fits_no_group_is_protected_by_copies() -> None:
    lonely = record([1, 1, 1, 1], ["a", "a", "a", "b"])
    found = seatings(lonely, Parity(1, 1))
    in_sets = {rank for seating in found for rank in seating.ranks}
    assert replicated_ranks(lonely, Parity(1, 1)) == frozenset(range(4)) - in_sets != frozenset()
    assert replicated_ranks(record([1, 1, 1]), Parity(2, 1)) == frozenset()


def test_a_policy_of_copies_has_no_parity_sets() -> None:
    assert seatings(record([1, 1, 1]), Replicas(1)) == ()
    assert replicated_ranks(record([1, 1, 1]), Replicas(1)) == {0, 1, 2}


# --- what is left -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "parity"), [(2, 1), (3, 1), (6, 1), (3, 2), (4, 2), (6, 2), (5, 3)])
def test_an_intact_parity_set_survives_as_many_losses_as_it_has_parity_rows(size: int, parity: int) -> None:
    parity_set = parity_set_of(size, parity)
    held = {at: {f"d{at}"} for at in range(size)}
    assert tolerance(parity_set, held, held) == parity
    for lost in range(size + 1):
        left = {at: held[at] for at in range(size) if at >= lost}
        assert tolerance(parity_set, left, left) == (parity - lost if lost <= parity else -1)
        assert decodable(parity_set, left, left) == (lost <= parity)


def test_without_parity_a_parity_set_survives_nothing_but_is_whole() -> None:
    parity_set = parity_set_of(4, 1)
    assert tolerance(parity_set, {at: {f"d{at}"} for at in range(4)}, {}) == 0


def test_two_positions_in_one_domain_go_together() -> None:
    parity_set = parity_set_of(4, 1)
    held = {0: {"d0"}, 1: {"d0"}, 2: {"d2"}, 3: {"d3"}}
    assert tolerance(parity_set, held, held) == 0
    second = {**held, 1: {"d0", "d9"}}
    assert tolerance(parity_set, second, second) == 1, "a second copy elsewhere makes up for it"


def brute(parity_set: ParitySet, data: dict[int, set[str]], shards: dict[int, set[str]]) -> int:
    """Try every loss, column by column."""
    size, domains = len(parity_set.members), sorted({d for held in (data, shards) for found in held.values() for d in found})

    def whole(lost: set[str]) -> bool:
        for stripe in range(size):
            rows = [(stripe + row) % size for row in range(parity_set.parity)]
            others = [at for at in range(size) if at not in rows]
            have = [at for at in others if parity_set.members[at].rank == NOBODY or data.get(at, set()) - lost]
            if len(have) < len(others) and len(have) + sum(bool(shards.get(at, set()) - lost) for at in rows) < len(others):
                return False
        return True

    best = -1
    for count in range(parity_set.parity + 1):
        if not all(whole(set(lost)) for lost in combinations(domains, min(count, len(domains)))):
            break
        best = count
    return best


def test_tolerance_is_what_trying_every_loss_finds() -> None:
    rng = Random(7)
    seen = set()
    for _ in range(3000):
        size = rng.randint(2, 6)
        parity_set = parity_set_of(size, rng.randint(1, min(3, size - 1)), nobody=rng.choice([-1, -1, 0]))
        spread = rng.choice([2, size, 3 * size])
        data = {at: {f"d{rng.randrange(spread)}" for _ in range(rng.choice([0, 1, 1, 1, 2]))} for at in range(size)}
        shards = {at: data[at] if rng.random() < 0.7 else {f"d{rng.randrange(spread)}"} for at in range(size)}
        if parity_set.members[0].rank == NOBODY:
            data[0] = set()
        assert tolerance(parity_set, data, shards) == brute(parity_set, data, shards), (parity_set, data, shards)
        seen.add(tolerance(parity_set, data, shards))
    assert seen == {-1, 0, 1, 2, 3}


# --- as bytes -----------------------------------------------------------------------------------------------------------
def test_a_part_is_read_as_it_was_written() -> None:
    for size, parity in product((2, 3, 6), (1,)):
        shard = ParityShard(parity_set_of(size, parity, nobody=1), size - 1)
        assert unpacked_shard(packed_shard(shard)) == shard


@pytest.mark.parametrize(
    "body",
    [None, [], 7, [0, 2, 0, 1], [2, 2, 0, 1, [[0, 1, "a"], [1, 1, "b"]]], [0, 2, 0, 2, [[0, 1, "a"], [1, 1, "b"]]],
     [0, 0, 0, 1, [[0, 1, "a"], [1, 1, "b"]]], [0, 2, 0, 1, [[0, -1, "a"], [1, 1, "b"]]], [0, 2, 0, 1, [[0, 1, b"a"], [1, 1, "b"]]],
     [0, 2, 0, 1, [[-2, 1, "a"], [1, 1, "b"]]], [0.0, 2, 0, 1, [[0, 1, "a"], [1, 1, "b"]]], [0, 2, 0, 1, "ab"]],
)  # fmt: skip
def test_what_is_no_part_is_refused(body: object) -> None:
    with pytest.raises(ValueError, match="not a shard of a parity set"):
        unpacked_shard(body)


@pytest.mark.parametrize(
    ("size", "parity", "world", "number"),
    [(3, 0, 3, 0), (3, 3, 3, 0), (GROUP_MAX + 1, 1, 3, 0), (3, 1, 0, 0), (3, 1, 3, -1)],
)
def test_what_is_no_parity_set_cannot_be_made(size: int, parity: int, world: int, number: int) -> None:
    with pytest.raises(ValueError, match="not a parity set"):
        ParitySet(world, number, parity, (Member(NOBODY),) * size)


@pytest.mark.parametrize("position", [-1, 3])
def test_a_parity_set_has_no_shard_beyond_its_positions(position: int) -> None:
    with pytest.raises(ValueError, match="a position that the parity set has not"):
        ParityShard(parity_set_of(3, 1), position)


def test_shards_of_a_parity_set_have_one_layout_which_is_a_layout() -> None:
    parity_set = parity_set_of(6, 2)
    found = shard_layout(parity_set, 1000)
    assert Layout.decode(found.encoded).layout_id == found.layout_id == shard_layout(parity_set, 1024).layout_id
    assert found.rank == parity_set.holding_rank == 6
    assert [f.nbytes for f in found.fragments] == [parity_set.chunk] * 2
    assert found.payload_bytes == found.objects_capacity + 2 * parity_set.chunk


def test_digests_of_members_keep_their_names() -> None:
    digests = {3: (("t:w|0,4", b"a"), ("o:x|y", b"b")), 0: (("t:w|0,4", b"c"),)}
    assert member_digests(joined_digests(digests)) == digests
    assert member_digests((("t:w|0,0", b"a"), ("plain", b"b"))) == {}
