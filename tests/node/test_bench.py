"""Every benchmark runs at 10 MB, and what it measured is what it says it is. None is judged by its speed here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.netns import missing
from tests.accelerator import device

REPO = Path(__file__).resolve().parents[2]
BENCHMARKS = ("stall", "protect", "erasure", "persist", "restore", "tensors", "peers")
SELDOM = ("erasure", "restore", "tensors", "peers")  # these in `make chaos`
SMALL = {"tensors": ("--many", "500", "--few", "20")}  # options beside the 10 MB
RUN_TIMEOUT_S = 240.0


def told_by(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """What it wrote at its end. Each proves then, in its own process, that what it moved arrived bit by bit."""
    said = folder / "said.json"
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(said), *options]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert said.exists(), f"bench.{name} ended before its end:\n{done.stderr[-3000:]}"
    assert done.returncode in (0, 1), done.stderr  # 1: a floor was missed, which is for a person to look at
    told: dict[str, Any] = json.loads(said.read_text())
    return told


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.chaos] * (name in SELDOM)) for name in BENCHMARKS])
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    told = told_by(name, tmp_path, "--bytes", "1e7", "--repeats", "1", *SMALL.get(name, ()))
    assert told["rows"] and all(second >= 0 for row in told["rows"] for second in row["seconds"])
    assert not [row["name"] for row in told["rows"] if not row["seconds"]]


def test_a_bucket_of_its_own_runs_to_its_end(tmp_path: Path) -> None:
    told = told_by("persist", tmp_path, "--bytes", "1e7", "--repeats", "1", "--storage", "s3://bench/run")
    assert len(told["rows"]) == 8 and told["facts"]["endpoint"].startswith("http://127.0.0.1:")


def test_compressed_beside_as_it_is(tmp_path: Path) -> None:
    told = told_by("persist", tmp_path, "--bytes", "1e7", "--repeats", "1", "--compress")
    assert len(told["rows"]) == 8 and float(told["facts"]["compressed: bytes written of state"]) < 0.95


def test_a_frozen_base_is_not_written_again(tmp_path: Path) -> None:
    told = told_by("persist", tmp_path, "--bytes", "1e8", "--repeats", "1", "--frozen", "0.7")
    assert len(told["rows"]) == 8 and 0.3 <= float(told["facts"]["dedup: bytes written of state"]) <= 0.51, "whole tensors"


@pytest.mark.chaos
@device.NEEDED
def test_the_stall_on_a_device_is_told_apart_from_the_hosts(tmp_path: Path) -> None:
    rows = told_by("stall", tmp_path, "--device", device.KIND, "--bytes", "1e7", "--repeats", "1")["rows"]
    host, there = ([row["seconds"] for row in rows if row["name"].startswith(kind)] for kind in ("host:", "device:"))
    assert host and there and there[0][0] > 0, "the training stream waited for copies"


@pytest.mark.root
@pytest.mark.chaos
@pytest.mark.skipif(bool(missing()), reason=f"skipped: {missing()}")
def test_pacing_runs_to_its_end(tmp_path: Path) -> None:
    short = "--rounds 2 --steps 5 --learn-s 10 --reduce-bytes 1e6 --state-bytes 4e6"
    told = told_by("pacing", tmp_path, *short.split())
    assert [row["name"] for row in told["rows"]] == ["none", "unpaced", "paced"]
    assert told["rows"][1]["moved_mb_s"] > 0, "nothing was copied beside the steps"


@pytest.mark.chaos
def test_a_small_world_of_scale_lives_its_whole_life(tmp_path: Path) -> None:
    """Steward, members, the nodes that share a process: each snapshot is protected, and nothing that is wanted is nowhere."""
    world = "--nodes 8 --ranks-per-node 2 --tensors 100 --mesh fsdp+tp+pp+ep --odd --whole 3"
    (told,) = told_by("scale", tmp_path, *world.split())["worlds"]
    first = ["join", "first snapshot", *["steady snapshot"] * 2, "flush"]
    then = ["restore", "first snapshot of it", "seal", "restore by the successor"]
    assert [phase["name"] for phase in told["phases"]] == [*first, *then]
    assert all(phase["ended"] and not phase["failed"] for phase in told["phases"])
    assert told["planned"] and all(phase["steward"]["cpu"] and phase["member"]["cpu"] for phase in told["phases"])


def test_make_bench_runs_each_of_them() -> None:
    (named,) = re.findall(r"for name in ([\w ]+); do", (REPO / "Makefile").read_text())
    assert named.split() == list(BENCHMARKS)
    modules = {path.stem for path in (REPO / "bench").glob("*.py") if "def main() -> int" in path.read_text()}
    assert modules == {*BENCHMARKS, "pacing"}
