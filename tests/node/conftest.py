"""Fixtures of several files here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.cli import main
from tests.node.commands import Cli, Ran
from tests.node.rank_daemon_double import RankDaemonDouble


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RankDaemonDouble]:
    """The scripted one; no rank's copies may differ."""
    with RankDaemonDouble(tmp_path / "d.sock") as double:
        yield double
    assert double.corruptions == []


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`ckptd ARGUMENTS` in this process, with none of this machine's settings."""
    for name in [name for name in os.environ if name.startswith("CKPTD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ckptd.config_sources.SYSTEM_FILE", tmp_path / "no-such.toml")

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ckptd", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        out, err = capsys.readouterr()
        return Ran(code if isinstance(code, int) else 1 if code else 0, out, err)

    return call
