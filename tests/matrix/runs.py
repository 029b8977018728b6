"""Runs of a worker under torchrun, which die by SIGKILL where they are told to, and what they wrote of their steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO, Node
from tests.cluster.test_client_parallel import end_tree
from tests.matrix.worker import SAMPLES

TIMEOUT_S = 180.0
HERE = Path(__file__).parent
EACH_ONCE = {epoch: dict.fromkeys(range(SAMPLES), 1) for epoch in range(3)}


class Run(NamedTuple):
    """rows: what each rank wrote, in order. killed: it died by its own hand."""

    rows: list[dict[str, Any]]
    killed: bool

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]


def run(node: Node, worker: str, ranks: int, folder: Path, job: str, **settings: Any) -> Run:
    """``settings`` are the worker's; ``dies_at``: the step after whose snapshot all ranks kill themselves."""
    folder = folder / f"{job}-{len(list(folder.iterdir()))}"
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    env |= {"CKPTD_SOCKET": str(node.socket), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = f"{REPO}:{REPO / 'client'}"
    env |= {"WORKER": json.dumps({"job": job, "folder": str(folder), **settings})}
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(HERE / f"{worker}.py"),
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        raise AssertionError(f"it hangs:\n{log.read_text()[-6000:]}") from None
    rows = [json.loads(line) for path in sorted(folder.glob("rank-*")) for line in path.read_text().splitlines()]
    killed = "dies_at" in settings
    assert (status != 0) == killed, f"{rows[-ranks:]}\n{log.read_text()[-6000:]}"
    if killed:
        dead = {row["rank"] for row in rows if row["kind"] == "dies"}
        assert dead == set(range(ranks)), log.read_text()[-6000:]
    return Run(rows, killed)


def effective(runs: Iterable[Run], kind: str) -> list[dict[str, Any]]:
    """What counts of several runs of one job: rows of steps that a later run made again are not counted."""
    kept: list[dict[str, Any]] = []
    for one in runs:
        rows = one.of(kind)
        first = min((row["step"] for row in rows), default=math.inf)
        kept = [row for row in kept if row["step"] < first] + rows
    return kept


def three_worlds(start: Callable[..., Run]) -> list[Run]:
    """Killed twice in one epoch, behind steps 8 and 15: two processes that accumulate two batches, one, three.
    start(ranks, accumulated, **settings)."""
    return [start(2, 2, dies_at=8), start(1, 1, dies_at=15), start(3, 1)]


def begun(runs: Iterable[Run]) -> list[int]:
    """The step from which each went on."""
    return [one.of("begins")[0]["step"] for one in runs]


def whole_and_killed(start: Callable[..., Run], dies_at: int, **again: Any) -> tuple[Run, list[Run]]:
    """The unbroken run of a job, and the two of another one that dies and goes on. start(job, **settings); again: the second's."""
    whole, broken = start("whole"), [start("broken", dies_at=dies_at), start("broken", **again)]
    assert begun(broken) == [0, dies_at]
    return whole, broken


def by_step(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple[int, int], list[Any]]:
    """(rank, step) -> what these names have."""
    return {(row["rank"], row["step"]): [row[name] for name in names] for row in rows}


def seen(rows: Iterable[dict[str, Any]]) -> dict[int, Counter[int]]:
    """epoch -> how often each sample was trained on."""
    found: dict[int, Counter[int]] = {}
    for row in rows:
        found.setdefault(row["epoch"], Counter()).update(row["samples"])
    return found
