"""What a run of the tests leaves when it is killed: no process, and no folder unless KEEP_TMP=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.short import KEEP
from tests.sweeper import ours

ROOT = Path(__file__).resolve().parents[1]
SLEEPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.mark.parametrize(("keep", "inside"), [("", False), ("1", False), ("", True)])
def test_processes_and_the_folder_are_gone_when_the_run_is(tmp_path: Path, keep: str, inside: bool) -> None:
    """``inside``: the sweeper itself was started with a TMPDIR in the folder."""
    folder = tmp_path / "run"
    (folder / "below").mkdir(parents=True)
    env = os.environ | {"TMPDIR": str(folder / "below"), KEEP: keep}
    left = subprocess.Popen([sys.executable, "-c", SLEEPER], env=env, stdout=subprocess.PIPE, start_new_session=True)
    with left, subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as other:
        for process in (left, other):
            assert process.stdout is not None
            process.stdout.readline()
        assert ours(str(folder)) == [left.pid]
        command = [sys.executable, "-m", "tests.sweeper", str(folder)]
        own = {"TMPDIR": str(folder)} if inside else {}
        subprocess.run(command, env=os.environ | {KEEP: keep} | own, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=60, check=True)
        assert left.wait(10) == -9
        assert other.poll() is None
        other.kill()
    assert folder.exists() == bool(keep)
