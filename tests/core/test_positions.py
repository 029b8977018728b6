"""Positions of an epoch's members, the succession of its steward, and what labels of parallel groups change (D8, D9)."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from ckptd.core.ids import EpochRecord, NodeInfo, parallel_groups
from ckptd.core.protocol.machine.context import place_in_order, succession
from ckptd.core.protocol.machine.replicate import preference
from ckptd.core.protocol.machine.steward.decide import decide
from ckptd.core.protocol.machine.steward.gather import Gather
from ckptd.core.redundancy.parity_sets import seatings
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas


def node(number: int, group: str = "") -> NodeInfo:
    return NodeInfo(f"n{number}", f"tcp://n{number}", f"n{number}", f"d{number}", "", group)


def names(nodes: tuple[NodeInfo, ...]) -> list[str]:
    return [info.node for info in nodes]


def record(nodes: list[NodeInfo], ranks: list[int]) -> EpochRecord:
    return EpochRecord(1, "old", tuple(f"n{rank}" for rank in ranks), tuple(nodes))


def next_epoch(old: EpochRecord, ranks: list[int], redundancy: Redundancy) -> EpochRecord:
    """As the steward opens it for a new start on these nodes."""
    nodes = tuple(node(number) for number in ranks)
    gather = Gather("new", tuple(info.node for info in nodes), nodes, 0.0, records=[old])
    made = decide(gather, 0, (), {}, redundancy).record
    assert made is not None
    return made


def test_the_node_of_rank_0_is_steward_first_wherever_it_sits() -> None:
    found = record([node(2), node(0), node(1)], [1, 0, 2])
    assert succession(found) == ("n1", "n2", "n0")
    assert [place_in_order(found, name) for name in ("n1", "n2", "n0", "outsider")] == [0, 1, 2, 3]


def test_a_newcomer_takes_the_place_of_who_left_though_rank_0_moved() -> None:
    """Sorted by rank, every pair would be a new one, and everything would be sent again."""
    old = record([node(n) for n in range(4)], [0, 1, 2, 3])
    for redundancy in (Replicas(1), Parity(1, 1)):
        new = next_epoch(old, [3, 9, 1, 0], redundancy)
        assert names(new.nodes) == ["n0", "n1", "n9", "n3"]
        assert succession(new)[0] == "n3"
    kept = {n: preference(old, node(n), 1)[0] for n in (0, 1)}
    assert kept == {n: preference(next_epoch(old, [3, 9, 1, 0], Replicas(1)), node(n), 1)[0] for n in (0, 1)}


def test_copies_and_parity_go_to_other_parallel_groups_first() -> None:
    members = [node(0, "tp0"), node(1, "tp0"), node(2, "tp1"), node(3, "tp1")]
    labelled, plain = record(members, [0, 1, 2, 3]), record([node(n) for n in range(4)], [0, 1, 2, 3])
    assert [preference(plain, node(n), 1)[0] for n in range(4)] == ["n1", "n0", "n3", "n2"]
    label = parallel_groups(members)
    assert all(label[preference(labelled, info, 1)[0]] != info.parallel_group for info in members)
    for seating in seatings(labelled, Parity(1, 1)):
        assert len({label[name] for name in seating.nodes}) == 2


def test_a_record_of_before_has_no_labels_and_is_read() -> None:
    body = asdict(record([node(0)], [0]))
    for info in body["nodes"]:
        del info["parallel_group"]
    found = msgspec.json.decode(msgspec.json.encode(body), type=EpochRecord)
    assert [info.parallel_group for info in found.nodes] == [""]
