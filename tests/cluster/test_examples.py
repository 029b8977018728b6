"""The examples that people copy run, die and go on: docs/examples."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO, Cluster, Node
from tests.cluster.test_client_parallel import end_tree, signal_tree
from tests.waiting import until

STEPS, DIES_AFTER = 30, 18
TIMEOUT_S = 120.0
PRECISION = 2e-4  # of the four digits that are printed


def started(node: Node, example: str, ranks: int, log: Path, job: str) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    env |= {"CKPTD_SOCKET": str(node.socket), "OMP_NUM_THREADS": "1", "JOB": job}
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(REPO / "docs" / "examples" / example), str(STEPS),
    ]  # fmt: skip
    with log.open("wb") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def losses(log: Path) -> dict[int, str]:
    """The processes write into one file, and an unbuffered print() writes its newline by itself: a line may end in another one."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\d+\.\d{4})", log.read_text(), re.MULTILINE)}


def ended(process: subprocess.Popen[bytes], log: Path) -> dict[int, str]:
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        status = process.wait()
    assert status == 0, log.read_text()[-3000:]
    return losses(log)


def killed_and_gone_on_with_by_one(node: Node, example: str, folder: Path) -> tuple[list[float], list[float]]:
    """Two processes, SIGKILL, one. Its losses, and an unbroken run's in the same steps."""
    whole = ended(started(node, example, 2, folder / "whole", "whole"), folder / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))
    log = folder / "killed"
    process = started(node, example, 2, log, "killed")

    def stands_amid() -> bool:
        """Stopped before the daemon is asked: on a busy machine the answer takes longer than all the steps that are left."""
        if len(losses(log)) < DIES_AFTER:
            return False
        signal_tree(process.pid, signal.SIGSTOP)
        if node.newest("killed", "sealed") > 0:
            return True
        signal_tree(process.pid, signal.SIGCONT)
        return False

    until(stands_amid, TIMEOUT_S, "some steps, and a snapshot")
    end_tree(process.pid)
    assert process.wait() == -signal.SIGKILL
    made = len(losses(log))
    rest = ended(started(node, example, 1, folder / "rest", "killed"), folder / "rest")
    first = min(rest)
    assert 1 < first <= made + 1, rest
    assert sorted(rest) == list(range(first, STEPS + 1))
    return [float(loss) for loss in rest.values()], [float(whole[step]) for step in rest]


@pytest.mark.timeout(300)
@pytest.mark.chaos
@pytest.mark.parametrize("example", ["dcp.py", "fsdp1_loop.py"])
def test_killed_it_goes_on(nodes: Cluster, tmp_path: Path, example: str) -> None:
    found, expected = killed_and_gone_on_with_by_one(nodes.node(replicas=0), example, tmp_path)
    assert found == pytest.approx(expected, abs=PRECISION)
