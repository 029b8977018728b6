"""What goes through the adapters of torch.distributed.checkpoint and Megatron, and their files: exported, imported, as its plans
had it. Megatron's own save and load of the same are in tests/matrix/test_megatron.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptd_client import Client
from ckptd_client.integrations.dcp import CkptdStorageReader, CkptdStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.node.commands import Cli
from tests.node.daemon_rig import rig
from tests.node.imports import JOB, STEP
from tests.node.test_export import assert_same as same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ITERATION = 70
Do = Callable[[Client], Any]


def state(fill: float) -> dict[str, Any]:
    """Tensors of some kinds, and objects that a dict of them has in between; a name with dots; a tensor in an object."""
    whole = torch.arange(63.0).view(7, 9) + fill
    return {
        "model": {"a.weight": whole, "low": whole.bfloat16(), "none": torch.empty(0, 3), "number": torch.tensor(fill)},
        "optim": {"groups": [{"lr": fill / 10, "betas": (0.9, 0.99)}, {"lr": 0.5}], "step": int(fill)},
        "scheduler": {"name": f"cosine {fill}", "milestones": {1, 2}},
    }


def over_a_daemon(root: Path, do: Do) -> Any:
    def train(socket: Path) -> Any:
        with Client.connect(JOB, socket=str(socket)) as client:
            return do(client)

    async def run() -> Any:
        async with rig(storage_root=root) as house:
            return await asyncio.to_thread(train, house.daemon.config.socket)

    return asyncio.run(run())


def saved(client: Client, step: int = STEP) -> None:
    dcp.save(state(step), storage_writer=CkptdStorageWriter(client, step, timeout=60.0))


def loaded(client: Client) -> tuple[int | None, dict[str, Any]]:
    reader, found = CkptdStorageReader(client), state(-1)
    dcp.load(found, storage_reader=reader)
    return reader.found, found


class Writer(dcp.FileSystemWriter):
    """``more``: in its metadata, too."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)
        self._more = more

    def finish(self, metadata: Any, results: Any) -> None:
        vars(metadata).update(self._more)
        super().finish(metadata, results)


def save_files(found: dict[str, Any], folder: Path, **more: Any) -> None:
    dcp.save(found, storage_writer=Writer(folder, **more))


def checkpoint(root: Path, step: int = STEP) -> Path:
    (found,) = root.glob(f"*/{JOB}/epoch-*/step-{step:010d}")
    return found


@pytest.fixture
def through_ckptd(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    over_a_daemon(tmp_path / "root", saved)
    return checkpoint(tmp_path / "root")


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """Two checkpoints as Megatron lays them out, whose tensors nothing nests; an object per shard, packed by it."""
    folder = tmp_path / "megatron"
    for iteration in (60, ITERATION):
        one = folder / f"iter_{iteration:07d}"
        tensors = {"decoder.weight": torch.randn(4, 6), "optimizer.state.exp_avg.decoder.weight": torch.randn(4, 6)}
        save_files(tensors | {"rng_state/shard_0_1": [torch.arange(5), {"seed": iteration}]}, one)
        torch.save({"iteration": iteration, "args": {"lr": 0.1}}, one / "common.pt")
        (one / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{ITERATION}\n")
    return folder


def test_what_was_saved_through_the_adapter_is_exported_as_torch_would_have_saved_it(
    cli: Cli, through_ckptd: Path, tmp_path: Path
) -> None:
    """Objects are those that were saved, not bytes of them."""
    ran = cli("export", through_ckptd, tmp_path / "out", "--to", "dcp")
    assert ran.code == 0, ran.err
    found = state(-1)
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "out"))
    same(found, state(STEP))
    save_files(state(STEP), tmp_path / "stock")
    ours, stock = (FileSystemReader(tmp_path / name).read_metadata() for name in ("out", "stock"))
    assert ours.planner_data == stock.planner_data and ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--to", "dcp", "--layout", "flat"), "--layout"), (("--to", "dcp", "--dtype", "bf16"), "--dtype"),
        (("--to", "dcp", "--prefix-map", "model=net"), "--prefix-map"), (("--to", "torch"), "dcp_to_torch_save"),
        (("--to", "hf", "--as-is"), "dcp_to_torch_save"), (("--to", "deepspeed"), "dcp_to_torch_save"),
        (("--to", "megatron"), "was not saved through Megatron-Core"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_is_refused(cli: Cli, through_ckptd: Path, tmp_path: Path, more: tuple[str, ...], says: str) -> None:
    ran = cli("export", through_ckptd, tmp_path / "out", *more)
    assert ran.code == 1 and says in ran.err and not (tmp_path / "out").exists()


def test_a_directory_of_dcp_goes_on_through_the_adapter(cli: Cli, tmp_path: Path) -> None:
    """And the next step is later than the one that was imported, in the same job."""
    save_files(state(STEP), tmp_path / "dcp")
    root = tmp_path / "root"
    ran = cli("import", tmp_path / "dcp", "--from", "dcp", "--as-is", "--job", JOB, "--step", STEP, "--storage-root", root)
    assert ran.code == 0, ran.err

    def goes_on(client: Client) -> None:
        step, found = loaded(client)
        assert step == STEP
        same(found, state(STEP))
        saved(client, STEP + 1)

    over_a_daemon(root, goes_on)
    step, found = over_a_daemon(root, loaded)
    assert step == STEP + 1
    same(found, state(STEP + 1))
    assert cli("export", checkpoint(root), tmp_path / "again", "--to", "dcp").code == 0
    found = state(-1)
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "again"))
    same(found, state(STEP))


@pytest.mark.parametrize("which", ["newest", "one"])
def test_megatrons_files_come_back_byte_by_byte(cli: Cli, megatron: Path, tmp_path: Path, which: str) -> None:
    iteration = ITERATION if which == "newest" else 60
    folder = megatron / f"iter_{iteration:07d}"
    source, root = megatron if which == "newest" else folder, tmp_path / "root"
    ran = cli("import", source, "--from", "torch_dist", "--job", JOB, "--storage-root", root)
    assert ran.code == 0, ran.err
    ran = cli("export", checkpoint(root, iteration), tmp_path / "out", "--to", "megatron")
    assert ran.code == 0, ran.err
    assert (tmp_path / "out" / "common.pt").read_bytes() == (folder / "common.pt").read_bytes()
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    states: list[dict[str, Any]] = []
    for place in (folder, tmp_path / "out"):
        names = ("decoder.weight", "optimizer.state.exp_avg.decoder.weight")
        found: dict[str, Any] = {name: torch.zeros(4, 6) for name in names}
        found["rng_state/shard_0_1"] = [torch.zeros(5, dtype=torch.int64), {"seed": 0}]
        dcp.load(found, storage_reader=FileSystemReader(place))
        states.append(found)
    same(states[1], states[0])
    assert states[0]["rng_state/shard_0_1"][1] == {"seed": iteration}


def bad(folder: Path, how: str) -> None:
    one = folder / f"iter_{ITERATION:07d}"
    if how == "torn":
        (one / "common.pt").unlink()
    elif how == "cut":
        file = max(one.glob("*.distcp"), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-200])
    elif how == "zarr":
        (one / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    elif how == "no config":
        (one / "metadata.json").unlink()
    elif how == "tracker":
        (folder / "latest_checkpointed_iteration.txt").write_text("what\n")
    elif how == "ours":
        save_files({"$meta": [1]}, one)
    else:
        shapes = {"decoder.weight": {"nd_reformulated_orig_global_shape": (4, 6)}}
        save_files({"decoder.weight": torch.randn(4, 6)}, one, mcore_data=shapes)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("torn", "torn: no common.pt"), ("cut", "torn"), ("zarr", "its tensors lie there as 'zarr'"),
        ("no config", "no metadata.json"), ("tracker", "no metadata.json"), ("older", "before 0.16"),
        ("ours", "a name that ckptd takes for its own"),
    ],
)  # fmt: skip
def test_bad_files(cli: Cli, megatron: Path, tmp_path: Path, how: str, says: str) -> None:
    bad(megatron, how)
    ran = cli("import", megatron, "--from", "torch_dist", "--job", JOB, "--storage-root", tmp_path / "root")
    assert ran.code == 1 and says in ran.err
    assert not list(tmp_path.glob("root/*/*/epoch-*/step-*"))


def test_a_bit_of_an_object_that_is_not_looked_into(cli: Cli, tmp_path: Path) -> None:
    save_files({"text": "hello" * 40, "w": torch.ones(3)}, tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(b"hellohello") + 3] ^= 1
    file.write_bytes(data)
    flags = ("--as-is", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path / "dcp", "--from", "dcp", *flags)
    assert ran.code == 1 and "damaged" in ran.err and "text" in ran.err


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("torch_dist", ("--prefix-map", "decoder=model"), "--prefix-map"), ("torch_dist", ("--dtype", "bf16"), "--dtype"),
        ("torch_dist", ("--param-names", "model"), "--param-names"), ("hf", ("--as-is",), "--from hf has no --as-is"),
    ],
)  # fmt: skip
def test_options_that_would_change_it(
    cli: Cli, megatron: Path, tmp_path: Path, kind: str, more: tuple[str, ...], says: str
) -> None:
    ran = cli("import", megatron, "--from", kind, "--job", JOB, "--storage-root", tmp_path / "root", *more)
    assert ran.code == 1 and says in ran.err
