"""The systemd unit and the torchrun launcher: what they promise, as far as it can be checked without installing them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.arena.arena import SEGMENTS_MAX

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "ckptd.service"
EXECUTABLE = "/usr/local/bin/ckptd"
EXPOSURE_MAX = 2.0  # of 10, `systemd-analyze security`

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is absent (apt-get install systemd)"
)


def settings() -> dict[str, str]:
    lines = (line.strip() for line in UNIT.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with an executable that is there."""
    text = UNIT.read_text()
    assert f"ExecStart={EXECUTABLE} run" in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(EXECUTABLE, sys.executable))
    return copy


@needs_systemd
def test_systemd_takes_the_unit_without_a_word(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
def test_the_sandbox_is_tight(unit: Path) -> None:
    threshold = str(int(EXPOSURE_MAX * 10))
    command = ["systemd-analyze", "security", "--offline=yes", f"--threshold={threshold}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


def test_the_memory_outlives_crashes() -> None:
    """P7: systemd gives up neither on the service nor on its descriptors, and the OOM killer's choice is no failure."""
    found = settings()
    assert (found["Type"], found["NotifyAccess"], found["Restart"]) == ("notify", "main", "always")
    assert found["StartLimitIntervalSec"] == "0"
    assert found["OOMPolicy"] == "continue"
    assert int(found["FileDescriptorStoreMax"]) >= SEGMENTS_MAX
    assert int(found["LimitNOFILE"]) >= 4 * SEGMENTS_MAX


def test_the_sandbox_leaves_what_the_daemon_needs() -> None:
    """Uids of the ranks (no user namespace) and /proc/meminfo."""
    found = settings()
    assert "PrivateUsers" not in found
    assert "ProcSubset" not in found
    assert "AF_NETLINK" in found["RestrictAddressFamilies"]


@pytest.mark.parametrize("answers", [True, False])
def test_the_launcher_starts_a_daemon_once_and_becomes_torchrun(tmp_path: Path, answers: bool) -> None:
    up, started = tmp_path / "up", tmp_path / "started"
    if answers:
        up.touch()
    scripts = {
        "ckptd": f"case $1 in status) test -e {up};; run) touch {started} {up}; while test -e {up}; do sleep 0.1; done;; esac",
        "torchrun": 'echo torchrun "$@"',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CKPTD_LOG": str(tmp_path / "log")}
    command = [str(DEPLOY / "torchrun" / "launch.sh"), "--nnodes=1", "a b"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    up.unlink()  # the daemon ends
    assert done.stdout == "torchrun --nnodes=1 a b\n"
    assert started.exists() is not answers


def test_the_launcher_says_why_the_daemon_did_not_start(tmp_path: Path) -> None:
    (tmp_path / "ckptd").write_text('#!/bin/sh\n[ "$1" = run ] && echo "error: no key"\nexit 1\n')
    (tmp_path / "ckptd").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CKPTD_LOG": str(tmp_path / "log")}
    done = subprocess.run(
        [str(DEPLOY / "torchrun" / "launch.sh")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "no key" in done.stderr
