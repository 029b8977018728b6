"""Storage that is not there is not taken for a new one: its root has an identity, which each node keeps (P12, P15)."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from ckptd.cli import checks
from ckptd.config import Config
from ckptd.core.errors import CkptdError
from ckptd.daemon.state import StateDir
from ckptd.daemon.storage import IDENTITIES, open_storage
from ckptd.observe.health import Health
from ckptd.persist.storage.base import Storage, StorageError
from ckptd.persist.storage.posix import MARKER, PosixStorage
from tests import places

NODE = "here"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def start(root: Path, health: Health | None = None, *, fresh: bool = True, state: str = "state") -> Storage:
    """As a daemon does. ``fresh``: it has no memory to serve."""
    storage, _ = open_storage(
        str(root), NODE, health or Health(), StateDir(root.parent / state), fresh=fresh
    )
    assert storage is not None
    return storage


def settings(root: Path) -> Config:
    return Config(storage_root=root, state_dir=root.parent / "state", plain_loopback=True, memory_budget="32MiB")


@places.for_root
def test_an_empty_mount_point_is_not_taken_for_a_new_storage(root: Path) -> None:
    """The marker was written onto it, and jobs were told that storage has nothing of them."""
    with places.small_disk(root, "4m"):
        start(root).put_if_absent("file", b"here")
        start(root)
    with pytest.raises(CkptdError, match="lost its") as caught:
        start(root)
    assert "is it mounted?" in caught.value.hint and str(root.parent / "state" / IDENTITIES) in caught.value.hint
    with pytest.raises(CkptdError, match="lost its"):
        checks.storage(settings(root))
    assert list(root.iterdir()) == []
    (root.parent / "state" / IDENTITIES).unlink()  # as the operator says that it is a new one
    assert start(root).list("file") == []
    assert (root / MARKER).exists()


def test_another_root_than_before_is_told_with_those_of_before(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A root that was mistyped had "nothing yet", and restore() led to allow_fresh=True."""
    start(root)
    other = root.parent / "roof"
    start(other)
    start(other)
    said = [record.getMessage() for record in caplog.records if "another one than this node has used" in record.getMessage()]
    assert len(said) == 1 and str(other) in said[0] and f"in {root}" in said[0]


def test_a_root_that_was_not_there_is_made_with_a_word(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name with a slip of the pen became a storage of its own without one."""
    start(root)
    assert [record.getMessage() for record in caplog.records if str(root) in record.getMessage()], "the first time"
    caplog.clear()
    start(root)
    assert not caplog.records


def test_another_storage_at_the_same_place_is_refused(root: Path) -> None:
    start(root)
    root.rename(root.parent / "first")
    start(root, state="another node's")
    with pytest.raises(CkptdError, match="another directory stands in the place") as caught:
        start(root)
    assert "is it mounted?" in caught.value.hint
    start(root.parent / "first")  # another root: nothing is known of it


def test_a_daemon_with_memory_goes_on_beside_it_and_uses_it_when_it_is_back(root: Path) -> None:
    start(root).put_if_absent("file", b"here")
    root.rename(root.parent / "away")
    start(root, state="another node's")
    health = Health()
    storage = start(root, health, fresh=False)
    assert "another directory" in " ".join(problem.text for problem in health.problems())
    root.rename(root.parent / "wrong")
    (root.parent / "away").rename(root)
    assert [entry.name for entry in storage.list("") if not entry.is_dir] == ["file"]


@pytest.mark.parametrize("old", [False, True], ids=["with identity", "without"])
def test_a_daemon_with_memory_takes_a_new_one_at_the_operators_word_alone(root: Path, old: bool) -> None:
    """It made no marker as it had memory, so that nothing became durable any more but by dropping that memory."""
    first = start(root)
    if old:
        (root.parent / "state" / IDENTITIES).unlink()
        (root / MARKER).write_bytes(b"")
        first = start(root)
    root.rename(root.parent / "first")
    root.mkdir()
    with pytest.raises(StorageError, match="lost its") as caught:
        first.put_if_absent("file", b"lost")
    health = Health()
    start(root, health, fresh=False)
    for said in (caught.value.hint, *(problem.text for problem in health.problems())):
        assert "is it mounted?" in said and f"remove {root.parent / 'state' / IDENTITIES} and restart" in said
    assert list(root.iterdir()) == []
    (root.parent / "state" / IDENTITIES).unlink()
    health = Health()
    storage = start(root, health, fresh=False)
    assert [problem.text for problem in health.problems()] == []
    assert storage.put_if_absent("file", b"here") and storage.identity not in ("", first.identity)


def test_a_new_root_that_cannot_be_made_does_not_stop_a_daemon_with_memory(root: Path) -> None:
    root.touch()
    health = Health()
    storage = start(root, health, fresh=False)
    assert "the storage root is no directory" in " ".join(problem.text for problem in health.problems())
    root.unlink()
    with pytest.raises(StorageError, match="vanished"):
        storage.list("")


def test_a_storage_that_gives_way_to_another_one_in_mid_run_is_noticed(root: Path) -> None:
    storage = start(root)
    root.rename(root.parent / "away")
    PosixStorage(str(root))
    for _ in range(2):
        with pytest.raises(StorageError, match="another directory stands in the place"):
            storage.put_if_absent("file", b"lost")
    subprocess.run(["rm", "-r", str(root)], check=True)
    (root.parent / "away").rename(root)
    assert storage.put_if_absent("file", b"here")


def test_a_full_state_directory_keeps_no_identity_and_stops_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    StateDir(root.parent / "state")  # one that was in use
    monkeypatch.setattr(StateDir, "write", full)
    assert start(root).identity
    assert f"{IDENTITIES} is not kept" in caplog.text


def test_all_nodes_see_one_identity(root: Path) -> None:
    first, second = start(root), start(root, state="another node's")
    assert first.identity == second.identity != ""
    assert not list(root.glob(f"{MARKER}.*"))


def test_what_a_death_left_of_a_marker_goes_with_the_next_start(root: Path) -> None:
    """The power went before its second name was gone."""
    first = start(root)
    (root / f"{MARKER}.0123456789abcdef.part").touch()
    assert start(root, state="another node's").identity == first.identity
    assert [path.name for path in root.iterdir() if path.name.startswith(MARKER)] == [MARKER]


def test_two_nodes_make_the_marker_at_once_and_the_first_tidies_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(made: str, marker: str) -> None:
        monkeypatch.setattr(os, "link", link)
        start(root, state="another node's")
        assert not os.path.exists(made)
        link(made, marker)

    monkeypatch.setattr(os, "link", late)
    assert start(root).put_if_absent("file", b"here")


def test_a_root_from_before_there_were_identities_is_taken_as_it_is(root: Path) -> None:
    root.mkdir()
    (root / MARKER).touch()
    for _ in range(2):
        assert start(root).identity == ""
