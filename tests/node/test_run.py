"""`ckptd run` as a process: it answers, it is watched, and it ends when asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.node.commands import Cli, places
from tests.waiting import until

STOP_TIMEOUT_S = 20.0


@pytest.fixture
def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}


@pytest.fixture
def daemon(tmp_path: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Under its keeper, as by hand; ready when its page is announced."""
    command = [
        sys.executable,
        "-m",
        "ckptd",
        "run",
        *places(tmp_path),
        "--plain-loopback",
        "--memory-budget",
        "32MiB",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stderr=log, stdout=log)
    try:
        until((tmp_path / "ckptd.http").exists, 45, "the page's announcement")
        yield process
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


@pytest.mark.usefixtures("daemon")
def test_a_running_node_shows_itself(cli: Cli, tmp_path: Path) -> None:
    status = json.loads(cli("status", "--json", *places(tmp_path)).out)
    assert status["node"]["id"] == (tmp_path / "state" / "node_id").read_text().strip()
    assert status["memory"]["budget_bytes"] == 32 << 20
    assert status["health"]["ok"] is True
    assert json.loads(cli("ls", "--json", *places(tmp_path)).out) == {"rows": [], "errors": []}
    page = "http://" + (tmp_path / "ckptd.http").read_text().strip()
    with urllib.request.urlopen(f"{page}/metrics", timeout=10) as answer:
        assert "ckptd_memory_budget_bytes 3.3554432e+07" in answer.read().decode()


def test_sigterm_ends_it_cleanly(daemon: subprocess.Popen[bytes], tmp_path: Path) -> None:
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(STOP_TIMEOUT_S) == 0
    assert not (tmp_path / "ckptd.http").exists()


def test_a_daemon_that_dies_beside_a_lost_state_directory_keeps_its_name(
    daemon: subprocess.Popen[bytes], cli: Cli, tmp_path: Path
) -> None:
    """Under a new name it refused the ranks that train here, whose memory it had adopted."""

    def node() -> str:
        return str(json.loads(cli("status", "--json", *places(tmp_path)).out)["node"]["id"])

    before = node()
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "ckptd.http").unlink()
    psutil.Process(daemon.pid).children()[0].kill()
    until((tmp_path / "ckptd.http").exists, 45, "the page's announcement")
    assert node() == before


@pytest.mark.chaos
@pytest.mark.usefixtures("daemon")
def test_a_second_one_with_the_same_state_directory_touches_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    """Its ports took the place of the first one's, which came back from a crash where no peer looked for it."""
    ports = (tmp_path / "state" / "ports.json").read_bytes()
    place = [*places(tmp_path), "--socket", str(tmp_path / "other.sock")]
    command = [sys.executable, "-m", "ckptd", "run", *place, "--plain-loopback", "--memory-budget", "32MiB"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 1
    assert "another daemon uses this state directory" in ran.stderr and "state_dir of its own" in ran.stderr
    assert (tmp_path / "state" / "ports.json").read_bytes() == ports


def test_bad_settings_end_it_at_once_with_the_reason(tmp_path: Path, environ: dict[str, str]) -> None:
    """Also under the keeper: what refuses to start would refuse for ever."""
    command = [sys.executable, "-m", "ckptd", "run", *places(tmp_path), "--memory-budget", "32MiB"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 1
    assert "ckptd keygen" in ran.stderr
    assert "Traceback" not in ran.stderr


WITHOUT_ISA_L = "from ckptd.protect import erasure as e; e.candidates = list; from ckptd.cli import main; main()"


@pytest.mark.parametrize(("redundancy", "warned"), [("rs(4,2)", True), pytest.param("xor(4)", False, marks=pytest.mark.chaos)])
def test_reed_solomon_without_isa_l_is_a_warning_with_a_remedy(
    tmp_path: Path, environ: dict[str, str], redundancy: str, warned: bool
) -> None:
    command = [sys.executable, "-c", WITHOUT_ISA_L, "run", "--no-keeper", "--plain-loopback"]
    command += [*places(tmp_path), "--memory-budget", "32MiB", "--redundancy", redundancy]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stderr=log, stdout=log)
    try:
        until((tmp_path / "ckptd.http").exists, 45, "the page's announcement")
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    said = (tmp_path / "log").read_text()
    assert ("no ISA-L: parity for rs(4,2)" in said) == ("pip install 'ckptd[rs]'" in said) == warned
