"""`ckptd gc`: what the dead left goes, what retention is to decide is only named (P12)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ckptd.core.ids import SnapshotId
from ckptd.persist.commits import list_commits
from ckptd.persist.forget import _claim
from ckptd.persist.names import VERIFIED, attempt_dir, epoch_dir, step_dir
from ckptd.persist.retention import ATTEMPT_STALE_S
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import JOB, save, small_world, write_all
from tests.node.commands import Cli


def kinds(ran: str) -> list[tuple[str, str]]:
    return sorted((row["kind"], Path(row["path"]).name.split(".")[0]) for row in json.loads(ran)["left"])


def test_only_what_nobody_can_need_goes(cli: Cli, tmp_path: Path) -> None:
    storage, world = PosixStorage(str(root := tmp_path / "root")), small_world(rows=40)
    for step in (10, 20, 30, 40):
        save(storage, world, SnapshotId(1, step))
    storage.mark(step_dir(JOB, SnapshotId(1, 40)), VERIFIED, b"")
    hidden = step_dir(JOB, SnapshotId(1, 30))
    assert storage.hide(hidden)
    dropped = Path(storage.locate(step_dir(JOB, SnapshotId(1, 20))))
    (dropped / "manifest.json").rename(dropped / "manifest.dropped")
    for step, attempt in ((50, "old"), (60, "new")):
        write_all(storage, world, SnapshotId(1, step), attempt)
    dead = Path(storage.locate(attempt_dir(JOB, SnapshotId(1, 50), "old")))
    then = time.time() - ATTEMPT_STALE_S - 60
    for path in (*dead.iterdir(), dead):
        os.utime(path, (then, then))
    before = sorted(root.rglob("*"))
    expected = [
        ("dead attempt", "step-0000000050"),
        ("half deleted", "step-0000000020"),
        ("hidden by retention", "step-0000000030"),
        ("retention may delete", "step-0000000010"),
    ]
    ran = cli("gc", root, "--dry-run", "--json", "--keep-last", "1")
    assert (ran.code, kinds(ran.out)) == (0, expected)
    assert sorted(root.rglob("*")) == before, "it only looked"
    assert kinds(cli("gc", root, "--dry-run", "--json", "--keep-last", "2").out) == expected, "one verified is all there is to keep"
    assert "2 deleted" in cli("gc", root, "--keep-last", "1").out
    left = {path.name.split(".")[0] for path in Path(storage.locate(epoch_dir(JOB, 1))).iterdir()}
    assert left == {"step-0000000010", "step-0000000030", "step-0000000040", "step-0000000060"}
    assert [info.snapshot.step for info in list_commits(storage, JOB)] == [10, 40]
    assert "nothing is left over" in cli("gc", root).out


def test_what_is_left_of_a_job_that_was_forgotten_goes(cli: Cli, tmp_path: Path) -> None:
    storage = PosixStorage(str(root := tmp_path / "root"))
    save(storage, small_world(rows=40), SnapshotId(1, 10))
    _claim(storage, JOB, 1)  # whoever gave the order died here
    assert kinds(cli("gc", root, "--dry-run", "--json").out) == [("of a forgotten job", "step-0000000010")]
    assert "1 deleted" in cli("gc", root).out
    assert not storage.list(epoch_dir(JOB, 1))


def test_a_root_must_be_named_and_be_there(cli: Cli, tmp_path: Path) -> None:
    assert "no storage root" in cli("gc").err
    assert "no such directory" in cli("gc", tmp_path / "nowhere").err
