"""A node that lost everything (daemon, keeper, memory, state directory) comes back under its name (P2, P14)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "lost"
KNOWN_S = 30.0


def protected(nodes: Cluster) -> tuple[list[Node], list[Trainer]]:
    pair = nodes.several(2)
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [None, None]
    together(world, "train", steps=2, snapshot=False)
    together(world, "snapshot", must=True)
    assert all("protected" in str(answer) for answer in together(world, "wait", level="protected"))
    return pair, world


def wipe(node: Node) -> None:
    node.kill()
    shutil.rmtree(node.settings["state_dir"])
    node.start()


def shown(node: Node) -> list[tuple[int, bool]]:
    return [(row["rank"], row["up"]) for row in node.job(JOB).get("ranks", [])]


def until_shown(pair: Sequence[Node], ranks: list[tuple[int, bool]]) -> None:
    until(lambda: [shown(node) for node in pair] == [ranks, ranks], KNOWN_S, f"{ranks} to be shown by both")


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_its_trainer_died_with_it(nodes: Cluster, lost: int) -> None:
    """Nobody tells the new daemon of the job: not a rank of its own, and the others have nothing new to say."""
    pair, world = protected(nodes)
    world[lost].kill()
    wipe(pair[lost])
    until_shown(pair, [(rank, rank != lost) for rank in range(2)])
    world[1 - lost].kill()
    world = nodes.world(pair, JOB)
    assert together(world, "restore") == [2, 2]
    until_shown(pair, [(0, True), (1, True)])


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_its_trainer_lives(nodes: Cluster, lost: int) -> None:
    """Snapshots go on and are protected again. Which epoch it is, is not asked: see "Not understood" in docs/TESTING.md."""
    pair, world = protected(nodes)
    wipe(pair[lost])
    until_shown(pair, [(0, True), (1, True)])

    def again() -> bool:
        together(world, "train", steps=1)
        return min(node.newest(JOB, "protected") for node in pair) > 2

    until(again, KNOWN_S, "protection to go on")
    assert len({node.job(JOB)["epoch"] for node in pair}) == 1
