"""One start of the training job, as Slurm or a Kubernetes JobSet does it: a torchrun per node, all or nothing."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.config import FIRST_PORT
from ckptd.demo import processes
from ckptd.demo.node import Node, spawn
from ckptd.demo.notebook import Pages

LOG_TAIL_LINES = 8
PORT_MIN = 10_000
PORT_TRIES_MAX = 100
PORTS_HELD_MAX = 16
_held: deque[int] = deque()  # descriptors


@dataclass
class Job:
    """``name`` names its logs and notebooks. ``arguments`` go to ckptd.demo.train."""

    name: str
    nodes: Sequence[Node]
    logs: Path
    notebook: Path
    arguments: Sequence[str]
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pages = Pages(self.notebook, self.name)

    @property
    def world(self) -> int:
        return len(self.nodes)

    def start(self) -> Job:
        master = self.nodes[0].address
        port = free_port()
        for index, node in enumerate(self.nodes):
            environ = node.environ(f"job.{self.name}.") | {
                "CKPTD_SOCKET": str(node.socket),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.world}", f"--node-rank={index}"]
            command += ["--nproc-per-node=1", f"--master-addr={master}", f"--master-port={port}", "-m", "ckptd.demo.train"]
            command += ["--name", self.name, "--notebook", str(self.notebook), *self.arguments]
            agent = spawn(command, environ, self.logs / f"{self.name}.{node.name}.log")
            self.agents[node.name] = agent
            node.jobs.append(agent)
        return self

    def failed(self) -> list[str]:
        """Nodes whose torchrun ended with an error (or was killed)."""
        return [name for name, agent in self.agents.items() if agent.poll() not in (None, 0)]

    def finished(self) -> bool:
        return all(agent.poll() == 0 for agent in self.agents.values())

    def stop(self) -> None:
        """What the launcher does to the rest of a failed job: kill it, on every node."""
        for node in self.nodes:
            ours = [a.pid for n, a in self.agents.items() if n == node.name and a.poll() is None]
            found = processes.find(f"{node.mark}job.{self.name}.", ours)
            processes.kill(f.pid for f in found)
            agent = self.agents[node.name]
            agent.wait()
            if agent in node.jobs:
                node.jobs.remove(agent)

    def trainer_pids(self) -> dict[int, int]:
        """rank -> pid, as the trainers wrote it down."""
        return {f["rank"]: f["pid"] for f in self.pages.refresh().of("start")}

    def log_tail(self) -> str:
        """What each trainer said last; torch marks the lines of a trainer's traceback with ``[rankN]:``."""
        parts: list[str] = []
        for node in self.nodes:
            path = self.logs / f"{self.name}.{node.name}.log"
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            traceback = [line for line in lines if line.startswith("[rank")]
            parts += [f"--- {path.name}", *(traceback or lines)[-LOG_TAIL_LINES:]]
        return "\n".join(parts)


def free_port() -> int:
    """A TCP port that nobody listens on now, at no address of this machine, as torch's store listens at all of them. Nobody else
    is given it before it is used: not a connection, as it lies below those; not a daemon, as they choose their own elsewhere; not
    another call of this, in any process, as a socket that does not listen goes on holding it."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(PORT_TRIES_MAX):
        held = socket.socket()
        try:
            held.bind(("", random.SystemRandom().randint(PORT_MIN, min(FIRST_PORT, max(PORT_MIN + 1, low)) - 1)))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from now on whoever reuses may listen
        port = int(held.getsockname()[1])
        _held.append(held.detach())
        if len(_held) > PORTS_HELD_MAX:
            os.close(_held.popleft())  # its port was used long ago
        return port
    raise OSError(f"no port from {PORT_MIN} to {min(FIRST_PORT, low)} is free")
