"""Answers to a rank fit a frame, however large the job is (P5, P15)."""

from __future__ import annotations

import os

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.daemon.state import Kept, StateDir
from ckptd.wire import rank as wire
from tests.node.daemon_rig import JOB, Rig
from tests.short import short_folder

NODES = 3000

async def test_health_of_a_job_on_thousands_of_nodes_fits_a_frame() -> None:
    """P5: it is asked for in every wait; an answer that does not fit would end the connection."""
    with short_folder() as root:
        nodes = tuple(
            NodeInfo(f"node-{i:05}.cluster.local", f"tcp://10.0.0.1:{i}", f"10.0.0.1:{i}", f"rack-{i // 16}")
            for i in range(NODES)
        )
        record = EpochRecord(1, "a", tuple(node.node for node in nodes), nodes)
        state = StateDir(root / "state")
        state.persist_job(f"{os.getuid()}/{JOB}", Kept(record))
        house = Rig(root)
        await house.start()
        try:
            rank = house.rank()
            rank.say(wire.AskHealth(7))
            told, _ = await rank.heard(wire.Health, request=7)
            assert told.facts["nodes_total"] == NODES and 0 < len(told.facts["nodes"]) < NODES
        finally:
            await house.stop()
