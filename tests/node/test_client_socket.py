"""Client and daemon agree where the socket is when nobody names one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ckptd_client import Client, autostart, sockets

from ckptd.config import Config
from ckptd.core.errors import CkptdError

USER_UID = 4242


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An ordinary user with a home of his own, and nothing in the environment."""
    for name in ("CKPTD_SOCKET", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: USER_UID)
    monkeypatch.setattr(sockets, "SYSTEM", str(tmp_path / "machine.sock"))
    return tmp_path


@pytest.mark.parametrize("variable", ["", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"])
def test_a_user_finds_the_daemon_he_started(
    as_user: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(as_user / "named"))
    place = Path(Config().socket)
    assert sockets.default(to_start=True) == str(place), "the client starts it where the daemon would listen"
    assert sockets.default(to_start=False) == sockets.SYSTEM, "none is there: the machine's"
    place.parent.mkdir(parents=True)
    place.touch()
    assert sockets.default(to_start=False) == str(place)


def test_a_user_without_a_home_is_told_what_to_set(as_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uid that a container was given and nobody named. The client has the machine's daemon left."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: USER_UID)
    with pytest.raises(CkptdError, match="no home directory") as caught:
        Config()
    assert "CKPTD_STATE_DIR" in caught.value.hint
    assert sockets.default(to_start=True) == sockets.SYSTEM


def test_the_machines_daemon_serves_users_too(as_user: Path) -> None:
    Path(sockets.SYSTEM).touch()
    assert sockets.default(to_start=True) == sockets.SYSTEM


def test_a_name_is_stronger(as_user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", "/somewhere/s")
    assert sockets.default(to_start=True) == "/somewhere/s"


def test_root_uses_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTD_SOCKET", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert sockets.default(to_start=True) == str(Config().socket) == sockets.SYSTEM


def test_a_file_of_another_users_dead_daemon_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user was told "Permission denied: /run/ckptd/ckptd.sock.starting" and nothing else."""
    path = tmp_path / "ckptd.sock"
    path.touch()

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(autostart.os, "open", refused)
    with pytest.raises(CkptdError, match="this user may not start one") as caught:
        autostart.ensure(str(path))
    assert "remove that file" in caught.value.hint and caught.value.where == str(path)


def test_health_goes_on_saying_why_the_daemon_did_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That none answers, which is said later, is not why (P15)."""

    def ended(path: str) -> None:
        raise CkptdError("the daemon ended while it started", where=path, hint="see ckptd.log")

    monkeypatch.setattr(autostart, "ensure", ended)
    with Client.connect(job="job", socket=tmp_path / "none.sock", start_daemon=True) as client:
        client.register(state={"at": 1})
        assert client.snapshot(1).status == "skipped: no daemon"
        assert any("the daemon ended while it started" in text for text in client.health().problems)
