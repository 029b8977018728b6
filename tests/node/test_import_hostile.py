"""Pickles that are not torch's, or lie: nothing of them is imported, called or believed, and what is foreign is named (P13)."""

from __future__ import annotations

import contextlib
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ckptd.core.errors import CkptdError
from ckptd.core.ids import SnapshotId
from ckptd.imports import torch_file
from ckptd.imports.unpickle import Record, unpickle
from ckptd.persist.lineage import claim_epoch
from ckptd.persist.names import attempt_dir
from ckptd.persist.storage.posix import PosixStorage
from tests.node.checkpoints import epoch_record
from tests.node.commands import Cli
from tests.node.imports import JOB, STEP, Net, restored, run_import
from tests.node.started import Started
from tests.node.test_import_twice import rewritten as rewritten_metadata

# Of protocol 0, as text: c MODULE NAME, arguments, R.
SYSTEM = b"cposix\nsystem\n(S'touch %s'\ntR."


def test_an_attackers_pickle_is_inert_and_named(tmp_path: Path) -> None:
    foreign: set[str] = set()
    found = unpickle(SYSTEM % str(tmp_path / "pwned").encode(), "x", foreign)
    assert isinstance(found, Record) and found.name == "posix.system"
    assert found.args == (f"touch {tmp_path / 'pwned'}",)
    assert foreign == {"posix.system"} and not (tmp_path / "pwned").exists()


class Sub(torch.Tensor):
    """A tensor of a class of its own."""


def test_a_tensor_of_a_foreign_class_is_refused_by_its_name(cli: Cli, tmp_path: Path) -> None:
    torch.save({"model": {"v": torch.ones(2), "w": torch.ones(2).as_subclass(Sub)}}, tmp_path / "c.pt")
    ran = cli("import", tmp_path / "c.pt", "--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    assert ran.code == 1 and f"{__name__}.Sub" in ran.err and "model.w" in ran.err


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_beside_tensors_it_is_left_out_and_in_an_optimizer_refused(cli: Cli, tmp_path: Path) -> None:
    evil = Evil(tmp_path / "pwned")
    torch.save({"model": {"w": torch.ones(3)}, "extra": evil, "model.x": evil}, tmp_path / "a.pt")
    report = run_import(cli, tmp_path / "a.pt", "torch", tmp_path / "root")
    assert report["foreign"] == ["posix.system"] and "it holds a posix.system" in report["notes"][0]
    group = {"params": ["w"], "lr": evil}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": [group]}}, tmp_path / "b.pt")
    ran = cli("import", tmp_path / "b.pt", "--from", "torch", "--job", "b", "--storage-root", tmp_path / "root")
    assert ran.code == 1 and "it holds a posix.system" in ran.err and "group 0, lr" in ran.err
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n(S'1/0'\ntR.",
        b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'true'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'_call'\ncos\nsystem\nsb.",  # BUILD on what builds tensors
        b"ccollections\nOrderedDict\n(N}S'update'\ncos\nsystem\nstb.",  # and on a class, with a state for slots
        b"ctorch\nFloatStorage\n(S'x'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(t(ttR.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"(lp0\ng0\na",  # without an end
        b"P1\n.",  # a persistent id that is none of torch's
        b"\x80\x02\x82\x01.",  # an extension of copyreg's
    ],
)
def test_other_tricks_end_in_words_or_in_a_record(data: bytes) -> None:
    before = set(sys.modules)
    found: Any = None
    with contextlib.suppress(CkptdError):
        found = unpickle(data, "x", set())
    assert found is None or isinstance(found, Record | list), found
    assert set(sys.modules) == before


def test_nothing_is_imported() -> None:
    foreign: set[str] = set()
    assert "xmlrpc.server" not in sys.modules
    unpickle(b"cxmlrpc.server\nSimpleXMLRPCServer\n(tR.", "x", foreign)
    assert foreign == {"xmlrpc.server.SimpleXMLRPCServer"} and "xmlrpc.server" not in sys.modules


def test_a_subclass_a_module_and_numpy_values_are_records(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    torch.save({"module": net, "device": torch.device("cpu"), "p": Path("a/b"), "n": {1, 2}}, tmp_path / "m.pt")
    foreign: set[str] = set()
    found = torch_file.load(str(tmp_path / "m.pt"), foreign)
    assert isinstance(found["module"], Record) and found["module"].name == "torch.nn.modules.linear.Linear"
    assert (found["device"], found["p"], found["n"]) == ("cpu", "a/b", {1, 2})
    assert "torch.nn.modules.linear.Linear" in foreign


def rewritten(path: Path, change: Any) -> Path:
    """The zip with other entries."""
    target = path.with_suffix(".changed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as out:
        for info in source.infolist():
            data = change(info.filename.partition("/")[2], source.read(info))
            if data is not None:
                out.writestr(info.filename, data)
    return target


def test_files_that_lie(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(100)}, path := tmp_path / "c.pt")

    def refusal(path: Path) -> str:
        with pytest.raises(CkptdError) as refused:
            torch_file.load(str(path), set())
        return str(refused.value)

    assert "leaves its storage" in refusal(rewritten(path, lambda name, data: data[:-4] if name == "data/0" else data))
    assert "is not there" in refusal(rewritten(path, lambda name, data: None if name == "data/0" else data))
    assert "big-endian" in refusal(rewritten(path, lambda name, data: b"big" if name == "byteorder" else data))
    assert "no data.pkl" in refusal(rewritten(path, lambda name, data: None if name == "data.pkl" else data))
    (tmp_path / "torn.pt").write_bytes(path.read_bytes()[:-30])
    assert "torn" in refusal(tmp_path / "torn.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "torch < 1.6" in refusal(tmp_path / "old.pt")
    loop: list[Any] = []
    loop.append(loop)
    torch.save(loop, tmp_path / "loop.pt")
    assert "contains itself" in refusal(tmp_path / "loop.pt")


def test_a_storage_with_another_crc_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    for sums in (True, False):  # without, torch writes zeros for them
        torch.serialization.set_crc32_options(sums)
        try:
            torch.save({"w": torch.full((1000,), 7.0)}, path)
        finally:
            torch.serialization.set_crc32_options(True)
        assert torch_file.load(str(path), set())["w"].shape == (1000,)
        data = bytearray(path.read_bytes())
        data[data.index(torch.full((9,), 7.0).numpy().tobytes()) + 17] ^= 1
        path.write_bytes(data)
        if sums:
            with pytest.raises(CkptdError, match=r"damaged: .*data/0 has another CRC"):
                torch_file.load(str(path), set())
    assert torch_file.load(str(path), set())["w"].shape == (1000,)


def test_a_source_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    for kind, name in (("torch", "x.pt"), ("dcp", ""), ("hf", "")):
        ran = cli("import", tmp_path / name, "--from", kind, "--job", JOB, "--storage-root", tmp_path / "root")
        assert ran.code == 1 and "error:" in ran.err, ran
    torch.save([1, 2], tmp_path / "list.pt")
    ran = cli("import", tmp_path / "list.pt", "--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    assert "it holds a list" in ran.err
    for name, value in (("whole", torch.nn.Linear(2, 2)), ("below", {"model": torch.nn.Linear(2, 2)})):
        torch.save(value, tmp_path / f"{name}.pt")
        ran = cli("import", tmp_path / f"{name}.pt", "--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
        assert ran.code == 1 and "torch.nn.modules.linear.Linear" in ran.err and "--only" not in ran.err, ran.err
    assert "no storage root" in cli("import", tmp_path / "list.pt", "--from", "torch", "--job", JOB).err


# --- torch.distributed.checkpoint and Megatron ----------------------------------------------------------------------
def hostile(folder: Path, change: Callable[[Metadata], object]) -> Path:
    dcp.save({"model": {"w": torch.arange(6.0)}}, storage_writer=dcp.FileSystemWriter(folder, per_thread_copy_ahead=0))
    return rewritten_metadata(folder, change)


@pytest.mark.filterwarnings("ignore")
def test_a_metadata_of_dcp_that_is_hostile(cli: Cli, tmp_path: Path) -> None:
    """Refused, by the name of what is foreign or of the file outside that it points to; nothing is run, nothing written."""
    evil, flags = Evil(tmp_path / "pwned"), ("--job", JOB, "--storage-root", tmp_path / "root")
    outside = ["../secret", str(tmp_path / "secret")]

    def at(name: str) -> Callable[[Metadata], object]:
        return lambda m: m.storage_data.update({index: type(info)(name, 0, 10) for index, info in m.storage_data.items()})

    def kind(metadata: Any) -> None:
        metadata.state_dict_metadata["model.w"] = evil

    (tmp_path / "secret").write_text("of another one")
    cases: list[tuple[Callable[[Metadata], object], str]] = [(kind, "model.w is saved as <posix.system>")]
    cases += [(at(name), f"torn: {name} is named by the metadata") for name in outside]
    cases += [(lambda m: m.planner_data.update({"model.w": evil}), "cannot be kept: it holds a posix.system")]
    for number, (change, why) in enumerate(cases):
        more = ["--as-is"] if "kept" in why else []
        ran = cli("import", hostile(tmp_path / str(number), change), "--from", "dcp", *flags, *more)
        assert ran.code == 1 and why in " ".join(ran.err.split()), ran
    (tmp_path / "0" / ".metadata").write_bytes(SYSTEM % str(tmp_path / "pwned").encode())
    ran = cli("import", tmp_path / "0", "--from", "dcp", *flags)
    assert ran.code == 1 and "this metadata is none that torch writes" in ran.err, ran
    assert not (tmp_path / "root").exists() and not (tmp_path / "pwned").exists()
    report = run_import(cli, tmp_path / str(number), "dcp", tmp_path / "root")
    assert report["foreign"] == ["posix.system"] and not (tmp_path / "pwned").exists(), "which the names do not hang on"


@pytest.mark.filterwarnings("ignore")
def test_a_common_file_of_megatron_that_is_hostile(cli: Cli, tmp_path: Path) -> None:
    """Megatron's own has foreign classes, too (a Namespace of arguments): they are inert, named, and bytes for whoever loads it."""
    folder = hostile(tmp_path / "iter_0000005", lambda metadata: None)
    torch.save({"iteration": 5, "args": Evil(tmp_path / "pwned")}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    report = run_import(cli, folder, "torch_dist", tmp_path / "root")
    assert report["foreign"] == ["posix.system"] and not (tmp_path / "pwned").exists()
    (folder / "common.pt").write_bytes(SYSTEM % str(tmp_path / "pwned").encode())
    ran = cli("import", folder, "--from", "torch_dist", "--job", "other", "--storage-root", tmp_path / "root")
    assert ran.code == 1 and "no file of torch.save" in ran.err and not (tmp_path / "pwned").exists()


PLACES = ["persist.write.chunk", "persist.write.synced", "persist.claim.published", "persist.commit.checked"]


@pytest.mark.parametrize("where", PLACES)
def test_what_was_killed_is_imported_by_the_same_command(cli: Cli, tmp_path: Path, where: str) -> None:
    """Before, the job "has been started", and had nothing."""
    net = Net()
    torch.save({"model": net.state_dict()}, tmp_path / "c.pt")
    told = ["--from", "torch", "--job", JOB, "--step", str(STEP), "--storage-root", str(tmp_path / "root")]
    Started("import", tmp_path / "c.pt", *told, failpoint=f"{where}:kill").killed()
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root")
    other = Net(fill=0.5)
    restored(tmp_path / "root", model=other)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    assert "has been started" in cli("import", tmp_path / "c.pt", *told).err


@pytest.mark.parametrize("claimed", [True, False])
def test_a_job_that_was_started_is_no_killed_import(cli: Cli, tmp_path: Path, claimed: bool) -> None:
    """Nothing of it is committed yet."""
    storage, job = PosixStorage(str(tmp_path / "root")), f"{os.getuid()}/{JOB}"
    if claimed:
        assert claim_epoch(storage, job, epoch_record(1, 1))[0]
    else:
        storage.begin(attempt_dir(job, SnapshotId(1, 10), "a1"))
    torch.save({"model": Net().state_dict()}, tmp_path / "c.pt")
    ran = cli("import", tmp_path / "c.pt", "--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    assert ran.code == 1 and "has been started" in ran.err
