"""A process that writes, commits or retains and may be killed on the way.

``python -m tests.node.persist_child ROOT WHAT STEP``, WHAT: write, save, retain or claim.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.retention import retain
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, commit_all, epoch_record, small_world, write_all


def main(root: str, what: str, step: int) -> None:
    storage = PosixStorage(root)
    if what == "retain":
        retain(storage, JOB, Policy(keep_last=1), grace_s=0, attempt_stale_s=0)
        return
    if what == "claim":
        claim_epoch(storage, JOB, epoch_record(step))
        return
    world = small_world(2, seed=step)
    reports = write_all(storage, world, SnapshotId(1, step), "child")
    for index, report in enumerate(reports):
        Path(root, f"report{index}").write_bytes(report)
    if what == "save":
        commit_all(storage, world, SnapshotId(1, step), reports, "child")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
