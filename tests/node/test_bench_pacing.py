"""What bench/pacing.py concludes, and that it leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.netns import missing
from bench.pacing import INCONCLUSIVE, MET, MISSED, Row, interval, verdict

REPO = Path(__file__).resolve().parents[2]


def row(low: float, high: float) -> Row:
    return Row("", 0.0, 0.0, 0.0, (low + high) / 2, low, high)


def test_met_missed_or_not_to_be_told() -> None:
    assert verdict(row(0.001, 0.015), row(0.2, 0.4), 0.02) == MET
    assert verdict(row(0.03, 0.05), row(0.2, 0.4), 0.02) == MISSED
    assert verdict(row(0.01, 0.03), row(0.2, 0.4), 0.02) == INCONCLUSIVE
    assert verdict(row(0.001, 0.015), row(-0.01, 0.4), 0.02) == INCONCLUSIVE, "there was nothing to pace"


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    chance, inside = random.Random(1), 0
    for trial in range(200):
        low, high = interval([chance.gauss(1.0, 0.3) for _ in range(12)], 400, trial)
        inside += low <= 1.0 <= high
    assert 170 <= inside <= 199


@pytest.mark.root
@pytest.mark.skipif(bool(missing()), reason=f"skipped: {missing()}")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_namespace_and_no_process_is_left(number: signal.Signals) -> None:
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job, and all it starts, ignores it
from bench.netns import places, processes, start
with places(2, 100) as nodes, processes() as started:
    for place in nodes:
        start(started, place.command("sleep", "1000"), {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, "/dev/null")
    start(started, nodes[0].command("ping", "-c", "1", "-W", "20", nodes[1].address), {"PATH": "/usr/bin:/bin"}, "/dev/null")
    print(*[process.pid for process in started], flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    assert f"ckptd-{process.pid}-0" in namespaces()
    process.send_signal(number)
    process.wait(30)
    process.stdin.close()
    process.stdout.close()
    assert f"ckptd-{process.pid}-" not in namespaces()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
