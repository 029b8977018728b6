"""Why a snapshot does not count is said where people look: handle, health, the daemon's log, metrics (P15)."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import psutil
import pytest

from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "reasons"
LASTING_S = 30.0


def skipped(trainer: Trainer, cause: str) -> str:
    """The status of a snapshot that is skipped for this cause, tried until there is one."""
    seen: list[str] = []

    def look() -> str:
        status = str(trainer.do("train")["statuses"][0])
        seen.append(status)
        return status if status.startswith(f"skipped: {cause}: ") else ""

    try:
        return str(until(look, LASTING_S, f"a snapshot skipped: {cause}"))
    except AssertionError as error:
        raise AssertionError(f"{error}; seen: {sorted(set(seen))}") from None


def told(trainer: Trainer, node: Node, cause: str) -> None:
    """In health, once it has lasted; in the log, once; in a metric."""
    job = f"{os.getuid()}/{trainer.job}"
    until(lambda: any(cause in text for text in trainer.do("health")["problems"]), LASTING_S, f"{cause} in health")
    assert node.log.read_text().count(f"job={job} skipped, {cause}:") == 1
    assert node.metric(f'ckptd_skips_total{{job="{job}",reason="{cause}"}}') >= 1
    lost: Any = trainer.do("lost")
    assert lost[f"skipped: {cause}"]["count"] >= 1


def test_no_memory_says_how_much_is_missing_and_who_has_it(nodes: Cluster) -> None:
    node = nodes.node(replicas=0, memory_budget="16MiB")
    holder, lacking = nodes.world([node], "holder")[0], nodes.world([node], JOB, kind="adapters")[0]
    assert holder.do("restore") is None
    holder.do("train", snapshot=False)
    holder.do("snapshot", must=True)
    assert holder.do("wait", level="sealed") == "sealed"
    assert lacking.do("restore") is None
    status = skipped(lacking, "no memory")
    assert "MiB missing" in status and f"job {os.getuid()}/holder" in status
    told(lacking, node, "no memory")


def test_a_lost_steward_is_named(nodes: Cluster) -> None:
    first, second = nodes.several(2, steward_timeout_s=60)
    world = nodes.world([first, second], JOB, kind="wide")
    assert together(world, "restore") == [None, None]
    together(world, "train", snapshot=False)
    together(world, "snapshot", must=True)
    stopped = first.processes()
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        status = skipped(world[1], "no steward")
        assert first.name in status and " UTC" in status
        told(world[1], second, "no steward")
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):  # a keeper that goes on may end a daemon that stood still
                process.send_signal(signal.SIGCONT)


@pytest.mark.chaos
def test_a_peer_that_is_waited_for_is_named(nodes: Cluster) -> None:
    first, second = nodes.several(2)
    world = nodes.world([first, second], JOB, kind="wide")
    assert together(world, "restore") == [None, None]
    together(world, "train", snapshot=False)
    together(world, "snapshot", must=True)
    second.kill()
    status = skipped(world[0], "waiting for a peer")
    assert second.name in status
    told(world[0], first, "waiting for a peer")
