"""P12: an old checkpoint is asked for while retention of the start before still reads back what it means to keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, together
from tests.cluster.test_bad_storage import checkpoint
from tests.waiting import until

JOB = "store"
READS_BACK_S = 12  # after each checkpoint that retention has counted as read back


@pytest.mark.chaos
def test_a_step_that_is_restored_meanwhile_stays(nodes: Cluster) -> None:
    """It was doomed by the epoch that retention knew at its beginning, and is all that the next one can go back to."""
    storage = nodes.root / "storage"
    node = nodes.node(start=False, storage_root=storage, replicas=0, keep_last=2)
    node.start(failpoint=f"persist.retain.verified:sleep={READS_BACK_S}")
    (trainer,) = nodes.world([node], JOB)
    assert trainer.do("restore") is None
    digests = {}
    for step in range(10, 60, 10):
        trainer.do("train", steps=10, snapshot=False)
        digests[step] = trainer.do("digest")
        trainer.do("snapshot", must=True)
        assert trainer.do("wait", level="durable") == "durable"
    assert checkpoint(storage, 10).joinpath("manifest.json").exists(), "retention was too fast for this test"
    newer = [checkpoint(storage, step) / "verified" for step in (30, 40, 50)]
    until(lambda: any(mark.exists() for mark in newer), 120, "retention to count on one for which the first may go")
    assert _shown(storage, 10), "retention was too fast for this test"
    (trainer,) = nodes.again([trainer])
    assert trainer.do("restore", step=10) == 10
    until(lambda: _decided(node.log.read_text()) or not _shown(storage, 10), 120, "retention to come to its decision")
    trainer.kill()
    node.kill()
    node.start()
    (trainer,) = nodes.world([node], JOB)
    assert together([trainer], "restore") == [10], "nothing can be restored any more"
    assert trainer.do("digest") == digests[10]


def _shown(storage: Path, step: int) -> bool:
    return (checkpoint(storage, step) / "manifest.json").exists()


def _decided(log: str) -> bool:
    return "retention of epoch 1 ends" in log
