"""What another user of the machine can do to everybody's jobs: nothing (D20, P13). Each as uid 12345 against real daemons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptd.wire.keys import ClusterKey
from tests.cluster.nodes import REPO, Cluster, Node, Trainer, together
from tests.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users"),
]

STRANGER = 12345
JOB = "ours"
MIB = 1 << 20


@contextmanager
def attacked(node: Node, attack: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """While the stranger stays connected, after all that he says was sent."""
    words = [json.dumps(word) for word in (STRANGER, attack, str(node.socket), *arguments)]
    command = [sys.executable, "-m", "tests.cluster.stranger", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "done\n"
        try:
            yield stranger
        finally:
            stranger.kill()


@pytest.fixture
def keyed(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "key"
    ClusterKey.generate().save(path)
    return {"key_file": path, "plain_loopback": None}


def protected(world: list[Trainer]) -> None:
    together(world, "train", steps=1, snapshot=False)
    together(world, "snapshot", must=True)
    assert together(world, "wait", level="protected", timeout=20) == ["protected", "protected"]


def address(node: Node) -> dict[str, Any]:
    here = node.get("/status")["node"]
    return {"node": here["id"], "control": here["control"], "bulk": here["bulk"], "domain": here["id"]}


def test_a_false_address_of_a_peer(nodes: Cluster, keyed: dict[str, Any]) -> None:
    """One Join with it dropped the working link of every job, for good."""
    first, second = nodes.several(2, **keyed)
    world = nodes.world([first, second], JOB, kind="fsdp")
    assert together(world, "restore") == [None, None]
    protected(world)
    with attacked(first, "false_address", [address(second)]):
        until(lambda: first.get("/status")["jobs"][1:], what="the stranger's job")
        for _ in range(3):
            protected(world)
    protected(world)
    assert "peer=n1 down" not in first.log.read_text()


def test_two_thousand_nodes_that_there_are_not(nodes: Cluster, keyed: dict[str, Any]) -> None:
    """They used up all sockets of the control link: nobody's new peers could be reached any more."""
    first = nodes.node(**keyed)
    before = _descriptors(first)
    with attacked(first, "many_nodes", 2000):
        until(lambda: first.get("/status")["jobs"], what="the stranger's job")
        second = nodes.node(**keyed)
        world = nodes.world([first, second], JOB, kind="fsdp")
        assert together(world, "restore") == [None, None]
        protected(world)
        assert _descriptors(first) - before < 400


@pytest.mark.parametrize(("attack", "nbytes", "times"), [("empty_world", 31 * MIB, 2), ("false_layouts", 250 * MIB, 16)])
def test_objects_that_are_none(nodes: Cluster, attack: str, nbytes: int, times: int) -> None:
    """Two worlds of empty lists took 2.6 GB and stopped the event loop for 22 s; 16 layouts of what nobody captured took 5.75 GB,
    and kept them."""
    node = nodes.node(replicas=0)
    (ours,) = nodes.world([node], JOB)
    assert ours.do("restore") is None
    before = _peak_bytes(node)
    with attacked(node, attack, nbytes, times):
        assert "sealed" in _snapshot(ours)
    assert _peak_bytes(node) - before < 256 * MIB
    assert ("garbage" in node.log.read_text()) == (attack == "empty_world")


def test_the_memory_of_one_who_wants_nearly_all(nodes: Cluster) -> None:
    """He kept it when his process was gone, and nobody else got any."""
    node = nodes.node(replicas=0, memory_budget="256MiB")
    with attacked(node, "large_state", 84 * MIB):
        until(lambda: node.get("/status")["memory"]["own_bytes"] >= 3 * 84 * MIB, what="his slots")
        (ours,) = nodes.world([node], JOB)
        assert ours.do("restore") is None
        until(lambda: "other users" in ours.do("train", steps=1)["statuses"][0], what="who has the memory is said")
    assert "sealed" in _snapshot(ours)


@pytest.mark.chaos
def test_a_share_is_no_more_where_others_are(nodes: Cluster) -> None:
    """Nor while they lack nothing yet: what a process has mapped cannot be taken back."""
    node = nodes.node(replicas=0, memory_budget="256MiB")
    (ours,) = nodes.world([node], JOB)
    assert ours.do("restore") is None
    assert "sealed" in _snapshot(ours)
    before = node.get("/status")["memory"]["own_bytes"]
    with attacked(node, "large_state", 60 * MIB):
        until(lambda: node.get("/status")["memory"]["own_bytes"] >= before + 60 * MIB, what="a slot of his")
        until(lambda: f"{STRANGER}/large" in str(node.get("/status")["health"]), what="he lacks memory")
        assert node.get("/status")["memory"]["own_bytes"] - before <= 128 * MIB


@pytest.mark.parametrize(
    ("kind", "count"), [("number", 1), ("empty", 64), pytest.param("record", 16, marks=pytest.mark.chaos), ("mappers", 1)]
)
def test_memory_of_a_strangers_own_making(nodes: Cluster, kind: str, count: int) -> None:
    """An offer is as he wrote it: a number after which no allocation worked, segments without slots that used up all that there
    may be, a record of 3 GiB that was copied before anybody looked at its sum, processes that each cost a descriptor for ever."""
    node = nodes.node(replicas=0, memory_budget="256MiB")
    before, descriptors = _peak_bytes(node), _descriptors(node)
    with attacked(node, "offered", kind, count):
        (ours,) = nodes.world([node], JOB)
        assert ours.do("restore") is None
        assert "sealed" in _snapshot(ours)
    until(lambda: _descriptors(node) - descriptors < 24, what="his memory is not kept")
    assert _peak_bytes(node) - before < 256 * MIB
    assert node.log.read_text().count("is refused") <= 2, "in the log once, then counted"


def _snapshot(trainer: Trainer) -> str:
    trainer.do("train", steps=1, snapshot=False)
    trainer.do("snapshot", must=True)
    return str(trainer.do("wait", level="sealed", timeout=20))


def _descriptors(node: Node) -> int:
    return psutil.Process(node.daemon_pid()).num_fds()


def _peak_bytes(node: Node) -> int:
    status = Path(f"/proc/{node.daemon_pid()}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
