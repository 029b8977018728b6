"""What a daemon must not forget over a restart (D10)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.daemon.state import StateDir

NODE = NodeInfo("a", "tcp://a:1", "a:2", "A", "a#1")
RAN = EpochRecord(7, "x", ("a",), (NODE,), (SnapshotId(3, 20),))
NEWEST = EpochRecord(90, "y", ("a",), (NODE,), before=(3, ()))


def test_the_newest_epoch_and_the_one_that_ran_before_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.persist_epoch("0/one", RAN, None)
    state.persist_epoch("0/two", NEWEST, RAN)
    assert StateDir(tmp_path).epochs() == {"0/one": (RAN, None), "0/two": (NEWEST, RAN)}
    state.forget("0/one")
    assert state.epochs() == {"0/two": (NEWEST, RAN)}


def test_a_record_that_does_not_parse_is_no_older_one(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.persist_epoch("0/one", NEWEST, RAN)
    (path,) = (tmp_path / "epochs").glob("*.json")
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({key: body[key] for key in ("job", "record")}))  # of a version that knew only the newest
    assert state.epochs() == {"0/one": (NEWEST, None)}
    path.write_text(json.dumps({**body, "ran": {"number": 7}}))
    with pytest.raises(CkptdError, match="does not parse"):
        state.epochs()
