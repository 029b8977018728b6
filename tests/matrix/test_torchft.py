"""torchft heals a replica group through ckptd: its own test of transports, and groups that really die."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from ckptd_client import Client
from ckptd_client.integrations.torchft import CkptdTransport
from torchft.checkpointing.transport_test import make_state_dict, run_multi_recovery_test
from torchft.coordination import LighthouseServer

from tests.cluster.nodes import Cluster
from tests.matrix.runs import run

CPU = torch.device("cpu")


@pytest.mark.timeout(300)
def test_its_own_test_of_a_transport(nodes: Cluster) -> None:
    """Three groups, on two nodes: the sender's job is nothing that the other node has a part in. Timeouts, too."""
    made = nodes.several(2, replicas=0)
    clients: list[Client] = []
    healed: list[int] = []

    class Counted(CkptdTransport):
        def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
            found = super().recv_checkpoint(src_rank, metadata, step, timeout)
            healed.append(step)
            return found

    def transport(rank: int, world: int) -> Any:
        clients.append(Client.connect(f"heal.{rank}", made[min(rank, 1)].socket, required=True))
        return Counted(clients[-1], lambda: make_state_dict(CPU))

    try:
        run_multi_recovery_test(TestCase(), transport, CPU)
    finally:
        for client in clients:
            client.close()
    assert sorted(healed) == [1, 1, 2], "two groups, then one; the third step is never saved"


@pytest.mark.timeout(600)
def test_a_group_that_dies_is_healed_from_the_other(nodes: Cluster, tmp_path: Path) -> None:
    """What both have after each step that they make together is the same, bit by bit."""
    made = nodes.several(2, replicas=0)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200)

    def group(number: int, **settings: Any) -> Any:
        (folder := tmp_path / str(number)).mkdir(exist_ok=True)
        more = {"group": number, "lighthouse": lighthouse.address(), **settings}
        return run(made[number], "torchft_worker", 1, folder, f"heal.{number}", **more)

    with ThreadPoolExecutor(1) as pool:
        lives = pool.submit(group, 0)
        group(1, dies_at=5)
        again = group(1, again=True)
    healed = [row["step"] for row in again.of("healed")]
    assert healed and healed[0] >= 5
    both = {row["step"]: row["digest"] for row in lives.result().of("seen") if row["together"] == 2}
    mine = {row["step"]: row["digest"] for row in again.of("seen") if row["together"] == 2}
    common = both.keys() & mine.keys()
    assert len(common) >= 5 and {step: both[step] for step in common} == {step: mine[step] for step in common}
    lighthouse.shutdown()
