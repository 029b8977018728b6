"""torchrun's own elastic mode: a node dies, the agents form a smaller world by themselves, ckptd gives the step back (P9).

Marked ``elastic`` and left out of ``make test``: agents that restart at different moments may meet in gloo's connect and need
another round, which is torchrun's to sort out and can take a minute. Run it with ``make chaos``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO, Cluster, Node
from tests.waiting import until

JOB = "elastic"
REFORM_TIMEOUT_S = 150.0


def agent(node: Node, port: int, steps: int, wanted: int, *, hosts: bool) -> subprocess.Popen[bytes]:
    """``hosts``: this agent holds the rendezvous store; the node that dies must not."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    env |= {
        "CKPTD_SOCKET": str(node.socket), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=10",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=ckptd", "--local-addr=127.0.0.1",
        f"--rdzv-conf=is_host={int(hosts)},last_call_timeout=5,timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3",
        str(REPO / "tests" / "cluster" / "elastic_worker.py"), JOB, str(steps), str(wanted),
    ]  # fmt: skip
    with open(node.root / "agent.log", "ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def events(node: Node, kind: str) -> list[dict[str, Any]]:
    found = []
    for line in Path(node.root / "agent.log").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == kind:
                found.append(event)
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for victim in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()


@pytest.mark.elastic
@pytest.mark.timeout(300)
def test_agents_form_a_smaller_world_and_go_on_from_memory(nodes: Cluster) -> None:
    first, second = nodes.node(), nodes.node()
    port = free_port()
    agents = [agent(first, port, 60, 1, hosts=True)]
    try:
        agents.append(agent(second, port, 60, 1, hosts=False))
        until(lambda: any(e["world"] == 2 and e["step"] >= 40 for e in events(first, "step")), 90, "a world of two")
        until(lambda: first.newest(JOB, "protected") >= 30, 45, "a protected step")
        protected = first.newest(JOB, "protected")
        second.kill()
        kill_tree(agents[1])

        def back() -> dict[str, Any] | None:
            return next((e for e in events(first, "restored") if e["world"] == 1), None)

        restored = until(back, REFORM_TIMEOUT_S, "a world of one")
        assert isinstance(restored, dict)
        assert restored["step"] >= protected and restored["bytes"]["durable"] == 0
        until(lambda: events(first, "done"), 60, "the end of the job")
        assert agents[0].wait(60) == 0
    finally:
        for process in agents:
            kill_tree(process)
