"""The cluster key file: 0600, ours, not a link; what derives from it (D3, P13)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from ckptd.core.errors import CkptdError
from ckptd.wire.keys import KEY_FILE_VARIABLE, ClusterKey


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ckptd.key"
    ClusterKey.generate().save(path)
    return path


def test_a_saved_key_loads_and_its_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    key, path = ClusterKey.generate(), tmp_path / "ckptd.key"
    before = os.umask(0)
    try:
        key.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterKey.load(path) == key


def test_a_saved_key_is_durable_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    ClusterKey.generate().save(tmp_path / "key")
    assert synced == [str(tmp_path / "key"), str(tmp_path)]


def test_save_never_replaces_a_file(file: Path, tmp_path: Path) -> None:
    text = file.read_bytes()
    with pytest.raises(CkptdError, match="exists"):
        ClusterKey.generate().save(file)
    assert file.read_bytes() == text
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CkptdError):
        ClusterKey.generate().save(link)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o700 | 0o010])
def test_a_file_that_others_can_reach_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(CkptdError, match="others can reach") as caught:
        ClusterKey.load(file)
    assert "chmod 600" in caught.value.hint


def test_a_link_a_folder_a_pipe_and_nothing_are_refused(file: Path, tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe, 0o600)
    for path in (link, pipe, tmp_path, tmp_path / "missing"):
        with pytest.raises(CkptdError, match="key file"):
            ClusterKey.load(path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, 12345)
    with pytest.raises(CkptdError, match="belongs to uid 12345"):
        ClusterKey.load(file)


@pytest.mark.parametrize(
    "text", [b"", b"ckptd-key-1", b"ckptd-key-1 abcd", b"ckptd-key-2 " + b"00" * 32, b"\xff" * 99, b"x" * 100_000]
)
def test_a_file_that_is_no_key_is_refused_without_showing_it(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    with pytest.raises(CkptdError, match="not a ckptd key") as caught:
        ClusterKey.load(file)
    assert text.decode("latin-1")[12:] not in str(caught.value) or len(text) < 13
    assert caught.value.__cause__ is None


def test_from_env_names_a_file_or_a_credential_or_nothing(file: Path, tmp_path: Path) -> None:
    key = ClusterKey.load(file)
    assert ClusterKey.from_env({}) is None
    assert ClusterKey.from_env({KEY_FILE_VARIABLE: str(file)}) == key
    file.chmod(0o440)  # as systemd gives it to a service's user
    assert ClusterKey.from_env({"CREDENTIALS_DIRECTORY": str(tmp_path)}) == key
    with pytest.raises(CkptdError):
        ClusterKey.from_env({KEY_FILE_VARIABLE: str(tmp_path / "missing")})


def test_what_derives_is_the_same_on_every_node_and_differs_by_use() -> None:
    key = ClusterKey(bytes(range(32)))
    again = ClusterKey(bytes(range(32)))
    assert (key.curve_server, key.curve_client, key.bulk) == (again.curve_server, again.curve_client, again.bulk)
    assert zmq.curve_public(key.curve_server.secret) == key.curve_server.public
    made = {key.curve_server.secret, key.curve_client.secret, key.bulk, key.secret, key.fingerprint.encode()}
    assert len(made) == 5
    assert ClusterKey.generate().fingerprint != key.fingerprint


def test_secrets_are_not_shown() -> None:
    key = ClusterKey(bytes(range(32)))
    shown = repr(key) + repr(key.curve_server)
    assert key.secret.hex() not in shown
    assert repr(key.secret) not in shown
    assert key.curve_server.secret.decode() not in shown
    with pytest.raises(CkptdError, match="32 bytes"):
        ClusterKey(b"short")
