"""What a daemon must not forget over a restart (D10)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from ckptd.core.errors import CkptdError
from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.daemon.state import Kept, StateDir
from tests.node.daemon_rig import Rig
from tests.node.links import stays
from tests.short import short_folder

NODE = NodeInfo("a", "tcp://a:1", "a:2", "A", "a#1")
RAN = EpochRecord(7, "x", ("a",), (NODE,), (SnapshotId(3, 20),))
NEWEST = EpochRecord(90, "y", ("a",), (NODE,), before=(3, ()))


def test_the_newest_epoch_and_the_one_that_ran_before_it(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.persist_job("0/one", Kept(RAN))
    state.persist_job("0/two", Kept(NEWEST, RAN))
    assert StateDir(tmp_path).jobs() == {"0/one": Kept(RAN), "0/two": Kept(NEWEST, RAN)}
    state.forget("0/one")
    assert state.jobs() == {"0/two": Kept(NEWEST, RAN)}


def test_it_is_durable_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: every directory on the way that was not there before."""
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    StateDir(tmp_path / "var" / "ckptd")
    made = {tmp_path, tmp_path / "var", tmp_path / "var" / "ckptd"}
    assert {str(place) for place in made} <= set(synced)


def test_half_written_files_of_an_earlier_life_go(tmp_path: Path) -> None:
    StateDir(tmp_path).persist_job("0/one", Kept(RAN))
    (tmp_path / "epochs" / "0.one.json.77.tmp").write_bytes(b"{")
    (tmp_path / "ports.json.77.tmp").write_bytes(b"")
    state = StateDir(tmp_path)
    state.alone()
    assert state.jobs() == {"0/one": Kept(RAN)}
    assert not list(tmp_path.rglob("*.tmp"))
    state.leave()


def test_a_directory_is_one_daemons(tmp_path: Path) -> None:
    """Two nodes with one home directory, or a second daemon on another socket: neither its ports nor what it writes are touched."""
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    first.alone()
    (tmp_path / "ports.json.77.tmp").write_bytes(b"")  # the first is at it
    with pytest.raises(CkptdError, match="another daemon uses this state directory") as caught:
        second.alone()
    assert "state_dir of its own" in caught.value.hint
    assert list(tmp_path.glob("*.tmp"))
    first.leave()
    second.alone()
    second.leave()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    def denied(fd: int, how: int) -> None:
        raise OSError(errno.EIO, "not a lock")

    monkeypatch.setattr("ckptd.wire.path_lock.fcntl.flock", flock)
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    left = tmp_path / "ports.json.77.tmp"
    for state in (first, second):
        left.write_bytes(b"")
        state.alone()
        assert not left.exists(), "it goes on as one that has the lock"
        assert state.look() and not state.trouble
    monkeypatch.setattr("ckptd.wire.path_lock.fcntl.flock", denied)
    with pytest.raises(OSError, match="not a lock"):
        StateDir(tmp_path).alone()
    for state in (first, second):
        state.leave()


def test_a_full_directory_is_used_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7, as below."""
    state = StateDir(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.wire.path_lock.os.open", full)
        state.alone()
    assert state.look()
    with pytest.raises(CkptdError, match="another daemon"):
        StateDir(tmp_path).alone()
    state.leave()


async def test_a_daemon_that_ends_is_waited_for() -> None:
    """Its socket goes first, so the next one may be started while it still has its ports."""
    with short_folder() as root:
        rig, last = Rig(root), StateDir(root / "state")
        last.alone()
        starting = asyncio.ensure_future(rig.start())
        await stays(lambda: not starting.done())
        assert not (root / "state" / "ports.json").exists() and not (root / "s").exists(), "it has begun nothing"
        last.leave()
        await starting
        assert (root / "s").is_socket()
        with pytest.raises(CkptdError, match="another daemon"):
            last.alone()
        await rig.stop()
        last.alone()  # it left with the daemon
        last.leave()


def test_a_record_that_does_not_parse_is_no_older_one(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.persist_job("0/one", Kept(NEWEST, RAN))
    (path,) = (tmp_path / "epochs").glob("*.json")
    body = json.loads(path.read_bytes())
    path.write_text(
        json.dumps({key: body[key] for key in ("job", "record")})
    )  # of a version that knew only the newest
    assert state.jobs() == {"0/one": Kept(NEWEST)}
    path.write_text(json.dumps({**body, "ran": {"number": 7}}))
    with pytest.raises(CkptdError, match="does not parse"):
        state.jobs()


def test_a_full_directory_that_was_in_use_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: the daemon may hold memory that nobody else has. What was written is still there, and nothing half-written."""
    state = StateDir(tmp_path / "used")
    state.persist_job("0/one", Kept(RAN))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ckptd.daemon.state.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            state.persist_job("0/one", Kept(NEWEST, RAN))
        again = StateDir(tmp_path / "used")
        assert "No space" in again.trouble and not again.look()
        assert again.jobs() == {"0/one": Kept(RAN)}
        assert not list((tmp_path / "used").rglob("*.tmp"))
        with pytest.raises(CkptdError, match="not writable"):
            StateDir(tmp_path / "new")
    assert again.look() and not again.trouble
