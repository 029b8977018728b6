"""A full disk, a full state directory, too little memory: nothing false is acknowledged, nobody is killed, training goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.job import Job
from tests.cluster.nodes import Node
from tests.places import MemoryGroup, fill, needs_root, small_disk
from tests.short import short_folder
from tests.waiting import until

pytestmark = needs_root
MIB = 1 << 20
NODES = 3
FLUSH_AGAIN_S = 150.0  # the pause after failed flushes grows to 60 s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here is left in the other order, after the job has ended."""
    with ExitStack() as made:
        yield made


def job_on(stack: ExitStack, root: Path, **settings: object) -> Job:
    job = Job(root, "replicas=1", NODES, **settings)
    stack.callback(job.close)
    job.start(range(NODES))
    job.judge()
    return job


def newest_durable(job: Job) -> int:
    job.listen()
    return max((made[1] for made, told in job.oracle.told.items() if told.durable), default=-1)


@pytest.mark.chaos
def test_a_storage_root_that_fills_up(stack: ExitStack) -> None:
    """P2, P4, P14: durable only what is; health says why nothing is any more; with room it goes on. Then everything dies, and
    what was told durable comes back."""
    root = stack.enter_context(short_folder())
    disk = stack.enter_context(small_disk(root / "disk", "24m"))
    job = job_on(
        stack, root, storage_root=disk / "storage", flush_every_steps=1, keep_last=1, write_timeout_s=20
    )
    until(lambda: newest_durable(job) > 0, 45, "a durable step")
    fill(disk / "ballast")
    until(lambda: "flush" in job.places[0].problems(), 45, "health to name the flush")
    job.until_newer(1)
    told = newest_durable(job)
    job.train_for(1.0)
    (disk / "ballast").unlink()
    until(lambda: newest_durable(job) > told, FLUSH_AGAIN_S, "durable to go on")
    job.no_rank_waited_long()
    fill(disk / "ballast")
    job.train_for(0.5)
    job.lose(range(NODES))
    job.end()
    (disk / "ballast").unlink()
    job.replace(range(NODES), "new")
    job.until_up()
    job.start([2, 0, 1])
    verdict = job.judge()
    assert verdict.owed is not None and not verdict.error, verdict


@pytest.mark.chaos
def test_a_state_directory_that_is_full(stack: ExitStack) -> None:
    """P1, P5: epochs cannot be written down; it is said, the job starts all the same, and what was written before stays whole."""
    root = stack.enter_context(short_folder())
    disks = [stack.enter_context(small_disk(root / f"disk{i}", "1m")) for i in range(NODES)]

    class SmallState(Job):
        def _node(self, index: int, name: str = "") -> Node:
            node = super()._node(index, name)
            node.settings["state_dir"] = disks[index] / "state"
            return node

    job = SmallState(root, "replicas=1", NODES)
    stack.callback(job.close)
    job.start(range(NODES))
    job.judge()
    job.until_level(1)
    for disk in disks:
        fill(disk / "ballast")
    job.end()
    job.start([1, 2, 0])
    assert not job.judge().error
    job.until_level(1)
    assert all("state" in node.problems() for node in job.places)
    job.places[0].crash()  # it comes back with what was written before the disk was full
    job.until_newer(1)
    for disk in disks:
        (disk / "ballast").unlink()
    until(
        lambda: not any("state" in node.problems() for node in job.places),
        30,
        "the epoch to be written down after all",
    )
    job.lose([1])
    job.end()
    job.start([0, 2])
    assert not job.judge().error


@pytest.mark.chaos
@pytest.mark.parametrize("trainers", [False, True])
def test_a_memory_cgroup_that_is_too_small(stack: ExitStack, trainers: bool) -> None:
    """P5, P8: one daemon's cgroup has no room for what its budget allows. Its ranks are told, nobody is killed, and with room
    everything is protected. ``trainers``: the rank lives in the same cgroup."""
    root = stack.enter_context(short_folder())
    group = MemoryGroup(f"ckptd-chaos-{os.getpid()}", 600 * MIB)
    stack.callback(group.close)

    class Grouped(Job):
        def _launch(self, node: Node) -> Node:
            return node.start(wait=False, within=group.within if node.name.startswith("n1-") else ())

    os.environ["CHAOS_LARGE"] = "600000"  # elements: 96 MB in all, a third of it on each node
    stack.callback(os.environ.pop, "CHAOS_LARGE")
    job = Grouped(root, "replicas=1", NODES, memory_budget="2GiB")
    stack.callback(job.close)
    idle = group.used()
    group.limit(idle + 100 * MIB)
    pid = job.places[1].daemon_pid()
    job.start(range(NODES))
    if trainers:
        group.limit(idle + 200 * MIB)
        group.take(job.ranks[1].pid)
    job.judge()
    until(lambda: job.places[1].problems(), 60, "health to say that memory is short")
    job.train_for(3.0)
    assert group.kills() == 0
    assert job.places[1].daemon_pid() == pid, "the daemon was started again"
    job.no_rank_waited_long()
    group.limit(4096 * MIB)
    job.until_newer(1, 90)
    assert group.kills() == 0
    job.lose([0])
    job.end()
    began = time.monotonic()
    job.start([1, 2])
    verdict = job.judge()
    assert not verdict.error, (verdict, time.monotonic() - began)
