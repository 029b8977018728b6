"""How `ckptd export` writes: a destination that is whole or not there, what is right is not written again, bad input in words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd.core.errors import CkptdError
from ckptd.export import dcp as dcp_form
from ckptd.export import stored
from ckptd.export.export import Report, Request, Shown, export
from ckptd.persist.names import step_dir
from ckptd.persist.opening import verify
from ckptd.persist.storage.posix import PosixStorage
from tests import places
from tests.node.checkpoints import DEFAULT, JOB, World, save, small_world, worlds
from tests.node.commands import Cli
from tests.node.sparse import EDGE, sparse
from tests.peak import peak_below
from tests.short import short_folder

GIB = 1 << 30
TENSORS = ("model.*", "optim.*")  # the objects of these worlds are no values


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    return saved(tmp_path_factory.mktemp("export") / "root", 1200)


def saved(root: Path, rows: int) -> tuple[Path, World]:
    world = small_world(2, rows=rows)
    save(PosixStorage(str(root)), world)
    return root / step_dir(JOB, DEFAULT), world


def exported(
    source: Path, dest: Path, to: str = "torch", only: tuple[str, ...] = TENSORS, shown: Shown = lambda done, total: None
) -> Report:
    return export(Request(str(source), str(dest), to, only), shown)


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.view(torch.uint8) != 0 if tensor.dtype == torch.bool else tensor
    return bytes(stored.bytes_of(tensor)) if tensor.numel() else b""


def of_world(world: World, key: str) -> bytes:
    """The first rank's where each has its own. A truth is 0 or 1, as torch reads it."""
    whose = (key, None) if (key, None) in world.values else (key, 0)
    values = world.values[whose]
    return ((values != 0) if world.dtypes[whose] == "BOOL" else values).tobytes()


def opened(dest: Path, to: str) -> dict[str, torch.Tensor]:
    """By key of the world; what has no parameters is no module."""
    if to == "dcp":
        dcp_to_torch_save(dest, dest.with_suffix(".pt"))
        dest = dest.with_suffix(".pt")
    found = torch.load(dest, weights_only=True)
    others = {**found, **found.get("extra", {})}
    tensors = {key: value for key, value in others.items() if isinstance(value, torch.Tensor)}
    return {f"model.{name}": value for name, value in found.get("model", {}).items()} | tensors


@pytest.mark.parametrize("to", ["torch", "dcp"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds())
def test_any_cut_of_any_dtype(monkeypatch: pytest.MonkeyPatch, to: str, world: World) -> None:
    """Pieces, chunks and files are cut as small as a few elements."""
    monkeypatch.setattr(stored, "PIECE_BYTES", 40)
    monkeypatch.setattr(dcp_form, "CHUNK_BYTES", 40)
    monkeypatch.setattr(dcp_form, "FILE_BYTES", 100)
    with short_folder() as folder:
        save(PosixStorage(str(folder / "root")), world)
        report = exported(folder / "root" / step_dir(JOB, DEFAULT), folder / "out", to, ("layer.*",))
        found = opened(folder / "out", to)
    own = {key for key, rank in world.values if rank is not None}
    found = {key.replace("model.", "layer."): tensor for key, tensor in found.items()}
    assert found.keys() == {key for key, _ in world.values}
    for key, tensor in found.items():
        assert raw(tensor) == of_world(world, key)
    assert any("differ between ranks" in note for note in report.notes) == bool(own)


class Killed(Exception):
    pass


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_what_was_killed_goes_on_and_damage_is_written_again(
    original: tuple[Path, World], tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_form, "FILE_BYTES", 1 << 20)
    source, world = original
    exported(source, tmp_path / "whole", to)

    def die_behind(nbytes: int) -> Callable[[int, int], None]:
        def shown(done: int, total: int) -> None:
            if done >= nbytes:
                raise Killed

        return shown

    for nbytes in (10_000, 4_920_000):
        with pytest.raises(Killed):
            exported(source, tmp_path / "out", to, shown=die_behind(nbytes))
        assert not (tmp_path / "out").exists()
    content = tmp_path / "out.exporting" / "content"
    damaged = content if to == "torch" else max(content.iterdir(), key=lambda path: path.stat().st_size)
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    seen: list[int] = []
    report = exported(source, tmp_path / "out", to, shown=lambda done, total: seen.append(done))
    assert 0 < report.reused < report.nbytes and report.written + report.reused == report.nbytes == seen[-1]
    assert not (tmp_path / "out.exporting").exists()
    found = opened(tmp_path / "out", to)
    assert found.keys() == {"model.wide", "model.tall", "model.norm", "model.mean", "model.head"}
    assert all(raw(value) == of_world(world, key.replace("head", "wide")) for key, value in found.items())
    if to == "torch":
        assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


def test_retention_sees_it(original: tuple[Path, World], tmp_path: Path) -> None:
    """Below a storage root it holds a lease; a copy elsewhere needs none (P12)."""
    source, _ = original
    leases = source.parents[1] / "leases"
    seen: list[int] = []
    exported(source, tmp_path / "out", shown=lambda done, total: seen.append(len(list(leases.iterdir()))))
    assert {*seen} == {1} and not list(leases.iterdir())
    shutil.copytree(source, tmp_path / "copy")
    exported(tmp_path / "copy", tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == (tmp_path / "out").read_bytes()


def test_another_plan_begins_anew(original: tuple[Path, World], tmp_path: Path) -> None:
    source, world = original

    def die(done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        exported(source, tmp_path / "out", "dcp", shown=die)
    report = exported(source, tmp_path / "out", "torch")
    assert report.reused == 0
    assert raw(opened(tmp_path / "out", "torch")["model.wide"]) == of_world(world, "model.wide")


def test_names_and_dtypes(original: tuple[Path, World], tmp_path: Path, cli: Cli) -> None:
    source, world = original
    dest = tmp_path / "half.pt"
    options = ["--only", "model.wide", "--only", "model.norm", "--prefix-map", "norm=blocks.0.norm", "--prefix-map", "=net"]
    ran = cli("export", source, dest, "--to", "torch", "--dtype", "bf16", "--json", *options)
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    found = torch.load(dest, weights_only=True)
    assert found.keys() == {"model", "extra", "step"} and found["step"] == 10
    dtypes = {key: value.dtype for key, value in found["model"].items()}
    assert dtypes == dict.fromkeys(["net.wide", "blocks.0.norm"], torch.bfloat16)
    values = torch.from_numpy(world.values["model.wide", None].copy().view(np.float32)[..., 0]).bfloat16()
    assert raw(found["model"]["net.wide"]) == raw(values)
    assert (report["ok"], report["tensors"], report["nbytes"]) == (True, 2, 2 * (1200 * 1024 + 5))


def test_a_dry_run_writes_nothing(original: tuple[Path, World], tmp_path: Path, cli: Cli) -> None:
    ran = cli("export", original[0], tmp_path / "out", "--to", "dcp", "--dry-run", "--only", "model.*")
    assert (ran.code, list(tmp_path.glob("out*"))) == (0, [])
    assert ran.out.startswith("would write ") and "5 tensors, 9.4 MiB" in ran.out
    assert "1 tensors differ between ranks, and are those of the first that has all of it: model.mean" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said", "hint"),
    [
        (["SOURCE", "OUT", "--to", "onnx"], "no form to export to: onnx", "one of torch, dcp, hf, deepspeed"),
        (["SOURCE", "OUT", "--to", "dcp", "--layout", "nested"], "no layout: nested", "one of state_dict, flat, torchtitan"),
        (["SOURCE", "OUT", "--to", "torch", "--layout", "flat"], "--to torch has no --layout", "it is for --to dcp"),
        (["SOURCE", "OUT", "--to", "torch", "--dtype", "int8"], "no dtype to export as: int8", "bfloat16"),
        (["SOURCE", "OUT", "--to", "torch", "--only", "modell.*"], "fits none of 8 keys: modell.*", "as in model.head"),
        (["SOURCE", "OUT", "--to", "torch", "--prefix-map", "a"], "not OLD=NEW: a", "transformer=model"),
        (["SOURCE", "OUT", "--to", "torch", "--prefix-map", "a=b"], "begins no name: a", "as in head"),
        (["SOURCE", "OUT", "--to", "torch", "--only", "model.*", "--prefix-map", "wide=tall"], "two entries would be tall", ""),
        (["SOURCE", "OUT", "--to", "hf"], "nothing says what the tensors are called on the Hub", "--as-is"),
        (["SOURCE", "OUT", "--to", "hf", "--hf-config", "ABOVE"], "no config.json there", "of the same architecture"),
        (["SOURCE", "OUT", "--to", "hf", "--as-is", "--shard-size", "big"], "'big' is not a size", ""),
        (["SOURCE", "OUT", "--to", "torch", "--step", "3"], "a checkpoint has no --step", "it is for --live JOB"),
        (["job", "OUT", "--to", "torch", "--live", "--socket", "NOWHERE"], "no daemon at", "ckptd run"),
        (["NOWHERE", "OUT", "--to", "torch"], "no such directory", "ckptd ls"),
        (["ABOVE", "OUT", "--to", "torch"], "no checkpoint here", "step-0000000010"),
        (["SOURCE", "ABOVE", "--to", "torch"], "the destination exists", "remove it"),
        (["SOURCE", "NOWHERE/out", "--to", "torch"], "no such directory", "another destination"),
        (["gs://bucket/x", "OUT", "--to", "torch"], "storage with the scheme gs:// is not supported", ""),
        (["SOURCE", "SOURCE/out", "--to", "torch"], "lies in a checkpoint", "outside of the storage root"),
        (["SOURCE", "ABOVE/out", "--to", "torch"], "lies in a checkpoint", "outside of the storage root"),
    ],
)  # fmt: skip
def test_bad_input_in_words(
    original: tuple[Path, World], tmp_path: Path, cli: Cli, arguments: list[str], said: str, hint: str
) -> None:
    of = {"SOURCE": original[0], "OUT": tmp_path / "out", "NOWHERE": tmp_path / "no", "ABOVE": original[0].parent}
    of |= {f"{name}/out": of[name] / "out" for name in ("NOWHERE", "SOURCE", "ABOVE")}
    ran = cli("export", *(of.get(argument, argument) for argument in arguments))
    assert ran.code == 1 and said in ran.err and hint in ran.err, ran.err
    assert not (tmp_path / "out").exists()


def test_damage_is_found_and_the_destination_is_not_there(original: tuple[Path, World], tmp_path: Path) -> None:
    source, _ = original
    victim = max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = victim.read_bytes()
    victim.write_bytes(data[:-700_000] + bytes([data[-700_000] ^ 8]) + data[-699_999:])
    try:
        with pytest.raises(CkptdError, match=r"damaged block . of model.wide") as caught:
            exported(source, tmp_path / "out")
        assert caught.value.where == str(victim) and caught.value.hint
        assert not (tmp_path / "out").exists()
    finally:
        victim.write_bytes(data)
    assert exported(source, tmp_path / "out").reused > 0, "what was written before the damage"


def test_two_exports_of_one_name(original: tuple[Path, World], tmp_path: Path) -> None:
    source, _ = original

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(CkptdError, match="another export is writing it"):
            exported(source, tmp_path / "out")
        (tmp_path / "out").write_text("somebody's")

    with pytest.raises(CkptdError, match="the destination exists by now"):
        exported(source, tmp_path / "out", shown=lambda done, total: meanwhile(done, total) if done == total else None)
    assert (tmp_path / "out").read_text() == "somebody's"
    (tmp_path / "out").unlink()
    report = exported(source, tmp_path / "out")
    assert report.reused == report.nbytes


@places.for_root
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_full_disk(original: tuple[Path, World], tmp_path: Path, to: str) -> None:
    with places.small_disk(tmp_path / "disk", "14m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(12 << 20))
        with pytest.raises(CkptdError, match="the disk is full") as caught:
            exported(original[0], disk / "out", to)
        assert "are needed in all; the same command goes on from what is written" in caught.value.hint
        ballast.unlink()
        exported(original[0], disk / "out", to)
        if to == "torch":
            assert raw(opened(disk / "out", to)["model.wide"]) == of_world(original[1], "model.wide")


# --- memory ---------------------------------------------------------------------------------------------------------
EXPORT = """
import resource, sys
from ckptd.export.export import Request, export
from ckptd.export import dcp, torch_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[4]) << 20,) * 2)
report = export(Request(sys.argv[1], sys.argv[2], sys.argv[3], as_is=sys.argv[3] == "hf"))
print(report.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def within(source: Path, dest: Path, to: str, limit_mib: int) -> tuple[int, int]:
    """(bytes exported, KiB of memory beyond what the libraries take) of a process that may have so much data."""
    ran = subprocess.run(
        [sys.executable, "-c", EXPORT, str(source), str(dest), to, str(limit_mib)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    nbytes, peak = map(int, ran.stdout.split())
    return nbytes, peak


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_memory_is_a_few_pieces(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is all zeros stays a hole, except in what torch writes."""
    monkeypatch.setattr(stored, "PIECE_BYTES", 8 << 20)
    monkeypatch.setattr(dcp_form, "CHUNK_BYTES", 8 << 20)
    source = sparse(tmp_path / "root", {"model.big": (128, 1024, 256), "model.small": (1024, 1024)})
    with peak_below(28 << 20):
        exported(source, tmp_path / "out", to, ("model.*",))
    if to == "torch":
        assert (tmp_path / "out").stat().st_blocks * 512 < 24 << 20
    for tensor in opened(tmp_path / "out", to).values():
        edges = tensor.view(-1).view(torch.uint8)
        assert bytes(edges[:16].numpy()) == bytes(edges[-16:].numpy()) == EDGE


def on_disk(path: Path) -> int:
    return sum(one.stat().st_blocks * 512 for one in (path, *path.rglob("*")))


@pytest.mark.chaos
@pytest.mark.parametrize("to", ["torch", "hf"])
def test_forty_gigabytes(tmp_path: Path, to: str) -> None:
    shapes = {f"model.layers.{number}.w": (4096, 4096, 16) for number in range(36)} | {"model.big": (4096, 4096, 64)}
    source = sparse(tmp_path / "root", shapes)
    nbytes, peak = within(source, tmp_path / "out", to, 1024)
    assert nbytes == 40 * GIB and peak < 160 << 10
    assert on_disk(tmp_path / "out") < 3 * GIB


@pytest.mark.chaos
def test_a_copy_of_sixteen_gigabytes(tmp_path: Path) -> None:
    """Not forty: a copy leaves no holes, and that is what a disk of tests may be asked for."""
    source = sparse(tmp_path / "root", {f"model.{number}": (4096, 4096, 16) for number in range(16)})
    nbytes, peak = within(source, tmp_path / "out", "ckptd", 1024)
    assert nbytes == 16 * GIB and peak < 160 << 10


@pytest.mark.chaos
def test_dcp_of_four_gigabytes(tmp_path: Path) -> None:
    """torch's writer leaves no holes, and keeps what a file has of each tensor until it is written."""
    source = sparse(tmp_path / "root", {f"model.{number}": (4096, 4096) for number in range(64)})
    nbytes, peak = within(source, tmp_path / "out", "dcp", 1536)
    assert nbytes == 4 * GIB and peak < 640 << 10


def test_a_sparse_checkpoint_is_one(tmp_path: Path) -> None:
    assert verify(str(sparse(tmp_path, {"model.a": (1024, 1024), "model.b": (2, 1024, 1024)}))).problems == []
