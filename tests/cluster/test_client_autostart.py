"""The daemon as a side process of torchrun (section 5): started once, detached, and alive when the trainers are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ckptd_client import CkptdError, autostart

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO
from tests.waiting import until

TRAINER = """
import os, sys, torch, torch.distributed as dist
from ckptd_client import Client
dist.init_process_group("gloo")
model = torch.nn.Linear(9, 9)
with Client.connect("auto", required=True) as client:
    client.register(model=model)
    step = client.restore() or 0
    handle = client.snapshot(step + 1, must=True)
    assert client.wait("sealed", 30) in ("sealed", "protected"), handle.status
    sys.stdout.write(f"restored {step}\\n")  # at once: two ranks share this pipe
    sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # torch's threads may outlive the interpreter, and abort
"""


def settings(folder: Path, **other: object) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    chosen = {
        "socket": folder / "s", "state_dir": folder / "state", "memory_budget": "256MiB", "bind_address": "127.0.0.1",
        "plain_loopback": "true", "bulk_mode": "none", "replicas": 0, "nice": 0, "autostart": 1, **other,
    }  # fmt: skip
    return env | {f"CKPTD_{name.upper()}": str(value) for name, value in chosen.items()}


def daemons(folder: Path) -> list[psutil.Process]:
    """Keeper and daemon that serve this socket."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CKPTD_SOCKET") == str(folder / "s") and "ckptd" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.chaos
def test_local_rank_zero_starts_one_daemon_that_outlives_the_trainers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", str(script),
    ]  # fmt: skip
    pids: list[set[int]] = []
    try:
        for start in range(2):  # the second start finds the daemon there
            ran = subprocess.run(
                command,
                env=settings(tmp_path),
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
                cwd=REPO,
            )
            assert ran.returncode == 0, ran.stderr[-3000:] + (tmp_path / "s.log").read_text()
            alive = daemons(tmp_path)
            assert alive, (tmp_path / "s.log").read_text()
            assert len({os.getsid(process.pid) for process in alive}) == 1
            assert os.getsid(alive[0].pid) != os.getsid(0)
            assert ran.stdout.count(f"restored {start}") == 2
            pids.append({process.pid for process in alive})
        assert pids[0] == pids[1]
    finally:
        for process in daemons(tmp_path):
            process.send_signal(signal.SIGKILL)
        until(lambda: not daemons(tmp_path))


def test_a_daemon_that_cannot_start_is_an_error_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(tmp_path, memory_budget="nonsense").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CkptdError, match="ended while it started") as caught:
        autostart.ensure(str(tmp_path / "s"))
    assert "memory_budget" in Path(caught.value.hint.removeprefix("see ")).read_text()


def test_other_local_ranks_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(CkptdError, match="did not come up"):
        autostart.ensure(str(tmp_path / "s"), timeout_s=0.1)
    assert not (tmp_path / "s.log").exists()
