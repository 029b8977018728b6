"""An import that dies goes on where it was, several processes share one, and what is given up is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckptd.imports import write
from ckptd.persist import parts
from ckptd.persist.opening import verify
from ckptd.persist.storage.base import StorageError
from ckptd.persist.storage.factory import storage_at
from tests.cluster.nodes import REPO
from tests.node.commands import Cli
from tests.node.imports import JOB, STEP, restored, run_import
from tests.node.started import RUN_TIMEOUT_S, Started
from tests.node.test_persist_damage import flip
from tests.waiting import until

PART_BYTES = 256 << 10
COUNT = 3
ROWS = 40_000  # of 4 bytes: a tensor is less than a part, two are more


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "c.pt")
    return tmp_path / "c.pt"


def state() -> dict[str, torch.Tensor]:
    """One is cut into several parts, one is empty."""
    made = {f"w{at}": torch.arange(ROWS) * 1.5 + at for at in range(6)}
    return {**made, "large": torch.arange(5 * ROWS).double().reshape(5, ROWS), "none": torch.empty(0, 3)}


def run(source: Path, root: Path, *more: str, dies_at: int = -1, failpoint: str = "") -> Started:
    flags = ("--from", "torch", "--job", JOB, "--step", STEP, "--storage-root", root, "--json", *more)
    return Started("import", source, *flags, failpoint=failpoint, part_bytes=PART_BYTES, dies_at=dies_at)


def check(root: Path, report: dict[str, Any]) -> None:
    """All of it is there, once, and nothing else."""
    assert verify(report["path"]).problems == [] and report["written"] + report["reused"] == report["bytes"]
    assert [path.name for path in Path(report["path"]).parent.iterdir()] == [Path(report["path"]).name]
    found = {key: torch.full_like(value, 7) for key, value in state().items()}
    restored(root, model=found)
    assert all(torch.equal(found[key], value) for key, value in state().items())


def given_up(monkeypatch: pytest.MonkeyPatch, cli: Cli, source: Path, root: Path | str, *more: object) -> None:
    """Storage refuses behind the third part."""
    real, written = parts.write_chunks, list[bytes]()

    def refuses(*args: Any, **named: Any) -> bytes:
        if len(written) == 3:
            raise StorageError("the disk is full")
        written.append(real(*args, **named))
        return written[-1]

    monkeypatch.setattr(parts, "write_chunks", refuses)
    ran = cli("import", source, "--from", "torch", "--job", JOB, "--step", STEP, "--storage-root", root, *more)
    assert ran.code == 1 and "the disk is full" in ran.err
    monkeypatch.setattr(parts, "write_chunks", real)


@pytest.mark.parametrize("dies_at", [0, 3])
def test_a_killed_one_goes_on(cli: Cli, source: Path, tmp_path: Path, dies_at: int) -> None:
    root = tmp_path / "root"
    run(source, root, dies_at=dies_at).killed()
    report = run_import(cli, source, "torch", root)
    assert (report["reused"] > 0) is (dies_at > 0) and report["written"] > 0
    check(root, report)


def test_one_that_dies_at_its_end_writes_nothing_again(cli: Cli, source: Path, tmp_path: Path) -> None:
    """The epoch that it has claimed is its own."""
    root = tmp_path / "root"
    for failpoint in ("persist.claim.published", "persist.commit.checked", "persist.commit.checked"):
        run(source, root, failpoint=f"{failpoint}:kill").killed()
    report = run_import(cli, source, "torch", root)
    assert report["written"] == 0 and report["path"].startswith(f"{root}/{os.getuid()}/{JOB}/epoch-000001/")
    check(root, report)


@pytest.mark.parametrize("harm", ["torn report", "empty report", "short file", "no file", "a bit of a file", "a bit of a side"])
def test_what_is_not_whole_is_written_again(
    cli: Cli, source: Path, tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    given_up(monkeypatch, cli, source, root)
    ending = ".report" if "report" in harm else ".side.part" if "side" in harm else ".safetensors.part"
    path = sorted(root.rglob(f"*{ending}"))[0]
    if harm == "no file":
        path.unlink()
    elif "bit" in harm:
        flip(path, path.stat().st_size // 2)
    else:
        os.truncate(path, 0 if harm == "empty report" else path.stat().st_size - 8)
    report = run_import(cli, source, "torch", root)
    assert 0 < report["reused"] <= 2 * PART_BYTES
    check(root, report)


def test_a_source_that_changed_is_another(cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    given_up(monkeypatch, cli, source, root)
    torch.save({key: value + 1 for key, value in state().items()}, source)
    given_up(monkeypatch, cli, source, root)
    torch.save(state(), source)
    report = run_import(cli, source, "torch", root)
    assert report["reused"] == 0
    check(root, report)


def test_other_options_are_another(cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes nothing away from the one that is given up meanwhile."""
    root = tmp_path / "root"
    given_up(monkeypatch, cli, source, root)
    given_up(monkeypatch, cli, source, root, "--dtype", "bf16")
    given_up(monkeypatch, cli, source, root, "--compress")
    report = run_import(cli, source, "torch", root)
    assert report["reused"] == 3 * 4 * ROWS and "epoch-000001" in report["path"], "three tensors, a part each"
    check(root, report)


def test_it_is_compressed_as_daemons_do(cli: Cli, source: Path, tmp_path: Path) -> None:
    report = run_import(cli, source, "torch", tmp_path / "root", "--compress")
    assert list(Path(report["path"]).glob("*.encoded"))
    check(tmp_path / "root", report)


def test_into_a_bucket(cli: Cli, source: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"{bucket}/imported"
    for _ in range(2):
        given_up(monkeypatch, cli, source, root)
    report = run_import(cli, source, "torch", root)
    assert report["reused"] > 3 * PART_BYTES and verify(report["path"]).ok
    attempts = {entry.name for entry in storage_at(root).list(f"{os.getuid()}/{JOB}/epoch-000001")}
    assert attempts == {f"step-{STEP:010d}"}


def test_processes_side_by_side(cli: Cli, source: Path, tmp_path: Path) -> None:
    """One of them dies; who comes last makes up for it. Each writes what is its own."""
    root = tmp_path / "root"
    shares = [run(source, root, "--part", f"{number}/{COUNT}", dies_at=1 if number == 2 else -1) for number in (1, 2, 3)]
    shares[1].killed()
    told = [shares[0].report(), shares[2].report()]
    assert all(row["path"] == "" and row["written"] > 0 and row["reused"] == 0 for row in told)
    assert not list(root.rglob("manifest.json"))
    report = run_import(cli, source, "torch", root)
    assert 0 < report["written"] < report["bytes"] - sum(row["written"] for row in told) < report["bytes"]
    check(root, report)


def test_two_of_the_same_are_one(source: Path, tmp_path: Path) -> None:
    """Both write all of it: whoever is late commits what is committed, or hears of the other. Each counted on its own files."""
    root = tmp_path / "root"
    both = [run(source, root) for _ in range(3)]
    done = [json.loads(out) for out in [process.communicate()[0] for process in both] if out]
    assert 0 in {process.returncode for process in both}
    check(root, done[0])


def test_who_comes_while_another_one_commits_commits_the_same(source: Path, tmp_path: Path) -> None:
    """The first has deleted what is no part of the checkpoint, and stands still before it is in place; so does the second; then
    the first one goes on."""
    root = tmp_path / "root"
    both = []
    for number in range(2):
        both.append(run(source, root, failpoint=f"persist.commit.synced:stop_once={tmp_path / str(number)}"))
        until(lambda: is_stopped(both[-1]), RUN_TIMEOUT_S, "it to stand still")
    for process in both:
        process.send_signal(signal.SIGCONT)
        process.communicate()
    assert both[0].returncode == 0
    (path,) = root.rglob("manifest.json")
    assert verify(str(path.parent)).problems == []


@pytest.mark.parametrize("place", ["persist.claim.published", "persist.commit.checked"])
def test_of_two_different_ones_one_is_committed(tmp_path: Path, place: str) -> None:
    """The first stands still with its claim: another one is told to wait. It takes the first for dead when it stands longer, and
    then the first one hears of it. Whatever is told is what comes back."""
    root, sources = tmp_path / "root", [tmp_path / "a.pt", tmp_path / "b.pt"]
    for source, found in zip(sources, (state(), {key: value + 1 for key, value in state().items()}), strict=True):
        torch.save(found, source)
    first = run(sources[0], root, failpoint=f"{place}:stop_once={tmp_path / 'stopped'}")
    until(lambda: is_stopped(first), RUN_TIMEOUT_S, "it to stand still")
    early = run(sources[1], root)
    assert "another import of this job is being committed" in early.communicate()[1] and early.returncode
    (claim,) = (root / str(os.getuid()) / JOB / "epochs").iterdir()
    os.utime(claim, (claim.stat().st_mtime - write.COMMITS_WITHIN_S,) * 2)
    second = run(sources[1], root).report()
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode != 0
    assert verify(second["path"]).problems == []
    found = {key: torch.full_like(value, 7) for key, value in state().items()}
    restored(root, model=found)
    assert all(torch.equal(found[key], value + 1) for key, value in state().items())
    assert [path.parent for path in root.rglob("manifest.json")] == [Path(second["path"])]


def is_stopped(process: Started) -> bool:
    assert process.poll() is None, "it ended"
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_of_two_reports_of_a_part_the_first_counts_for_both(
    cli: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes the same between this one's files and its reports; then both commit."""
    real, turns = parts.write_chunks, [True]

    def overtaken(*args: Any, **named: Any) -> bytes:
        report = real(*args, **named)
        if turns and turns.pop():
            given_up(monkeypatch, cli, source, tmp_path / "root")
            monkeypatch.setattr(parts, "write_chunks", overtaken)
        return report

    monkeypatch.setattr(parts, "write_chunks", overtaken)
    check(tmp_path / "root", run_import(cli, source, "torch", tmp_path / "root"))


def test_a_part_of_nothing(cli: Cli, source: Path, tmp_path: Path) -> None:
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", source, *flags, "--part", "4/3")
    assert ran.code == 1 and "no part of the work" in ran.err and not (tmp_path / "root").exists()
    ran = cli("import", source, *flags, "--part", "1/3")
    assert ran.code == 0 and "when all are there, once without --part" in ran.out
    ran = cli("import", source, *flags)
    assert ran.code == 0 and "were there, and are right)" in ran.out and "written to" in ran.out


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30,) * 2)
from ckptd.cli import main
main()
"""


def import_of(folder: Path, tensors: int, nbytes: int) -> int:
    """Bytes that were written of a safetensors file of holes, by a process that may have 1 GiB of data."""
    places = {f"w{at}": [at * nbytes, (at + 1) * nbytes] for at in range(tensors)}
    rows = {name: {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": place} for name, place in places.items()}
    header = json.dumps(rows).encode()
    with (folder / "big.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + tensors * nbytes)
    flags = ["--from", "hf", "--job", JOB, "--storage-root", str(folder / "root"), "--json"]
    command = [sys.executable, "-c", LIMITED, "import", str(folder / "big.safetensors"), *flags]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return int(json.loads(ran.stdout)["written"])


@pytest.mark.chaos
def test_sixteen_gigabytes_in_one_of_memory(tmp_path: Path) -> None:
    """Not forty: what is imported has no holes, and that is what a disk of tests may be asked for."""
    assert import_of(tmp_path, 2, 8 << 30) == 16 << 30
