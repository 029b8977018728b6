"""`ckptd import`: real files of torch, safetensors and torch.distributed.checkpoint, restored by a real client, bit by bit (P9)."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from ckptd.persist.opening import verify
from tests.node.commands import Cli
from tests.node.imports import JOB, Net, expect_same, fresh, restored, run_import, trained
from tests.peak import peak_below


# --- torch.save -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_file_of_torch_save(cli: Cli, tmp_path: Path, kind: Any) -> None:
    net, optimizer = trained(kind)
    scheduler = {"last_epoch": 3, "_last_lr": [0.025], "betas": (0.5, 0.9)}
    torch.save(
        {"model_state_dict": net.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 4, "scheduler": scheduler},
        tmp_path / "c.pt",
    )
    report = run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root", "--param-names", "model")
    assert report["aliases"] == {"model.head.weight": "model.embed.weight"} and report["foreign"] == []
    assert verify(report["path"]).ok
    model, optim = fresh(kind)
    said = restored(tmp_path / "root", model=model, optimizer=optim)
    expect_same(net, optimizer, model, optim)
    assert (said["step"], said["meta"]) == (7, {"epoch": 4, "scheduler": scheduler})


def test_an_order_by_name_is_no_models(cli: Cli, tmp_path: Path) -> None:
    """As a tool leaves it that has sorted the file. State of equal shapes would be another layer's, without a word."""
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root", "--param-names", "model")
    for model in (torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(12))), torch.nn.Linear(1, 1)):
        adam = torch.optim.Adam(model.parameters())
        sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        adam.step()
        torch.save({"model": dict(sorted(model.state_dict().items())), "optimizer": adam.state_dict()}, tmp_path / "sorted.pt")
        said = cli("import", tmp_path / "sorted.pt", *flags).err
        assert "in the order of their names" in said and "named_parameters" in said and "--param-names model" not in said


def test_groups_need_names(cli: Cli, tmp_path: Path) -> None:
    net = Net()
    halves = [list(net.named_parameters())[:2], list(net.named_parameters())[2:]]
    for named in (False, True):
        groups = [
            {"params": half if named else [p for _, p in half], "weight_decay": 0.1 * at} for at, half in enumerate(halves)
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        net(torch.arange(9)).sum().backward()
        optimizer.step()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / f"{named}.pt")
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path / "False.pt", *flags)
    assert "which parameter is which cannot be told" in ran.err and "named_parameters" in ran.err and "--param-names" in ran.err
    run_import(cli, tmp_path / "True.pt", "torch", tmp_path / "root")
    model = Net(fill=0)
    mine = [[p for name, p in model.named_parameters() if name in dict(half)] for half in halves]
    its = torch.optim.SGD([{"params": half} for half in mine], lr=1.0, momentum=0.1)
    restored(tmp_path / "root", model=model, optimizer=its)
    expect_same(net, optimizer, model, its)


class Pair(torch.nn.Module):
    """Two layers of the same shapes, and an optimizer over them in the other order, in one group or in two."""

    def __init__(self, *, groups: int = 1, wide: int = 0) -> None:
        super().__init__()
        self.enc, self.dec = torch.nn.Linear(4, 4, bias=not wide), torch.nn.Linear(4, 4 + wide, bias=not wide)
        order = [[*self.dec.parameters()], [*self.enc.parameters()]]
        whole = order if groups == 2 else [[*order[0], *order[1]]]
        self.adam = torch.optim.Adam([{"params": part, "lr": 0.1 / (at + 1)} for at, part in enumerate(whole)])

    def step(self) -> None:
        self.dec(self.enc(torch.arange(4.0))).square().sum().backward()
        self.adam.step()

    def same(self, other: Pair) -> None:
        for (name, p), q in zip(self.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
            for part in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(self.adam.state[p][part], other.adam.state[q][part]), (name, part)
        assert [g["lr"] for g in self.adam.param_groups] == [g["lr"] for g in other.adam.param_groups]

    def save(self, path: Path) -> Path:
        """What the hint says to run, beside it: the file of names."""
        torch.save({"model": self.state_dict(), "optimizer": self.adam.state_dict()}, path)
        names = {p: n for n, p in self.named_parameters()}
        text = "\n".join(names[p] for g in self.adam.param_groups for p in g["params"])
        (path.parent / "names.txt").write_text(text)
        return path.parent / "names.txt"


@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_of_another_order_is_asked_for_its_names(cli: Cli, tmp_path: Path, groups: int) -> None:
    pair = Pair(groups=groups)
    pair.step()
    names = pair.save(tmp_path / "c.pt")
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path / "c.pt", *flags)
    assert ran.code == 1 and "only numbers 4" in ran.err and "for g in optimizer.param_groups" in ran.err
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root", "--param-names", names)
    other = Pair(groups=groups)
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)
    for text, why in (("enc.weight\nenc.bias\n", "2 names for the 4"), ("\n", "no names"), ("a\nb\nc\nd", "state of a")):
        names.write_text(text)
        assert why in cli("import", tmp_path / "c.pt", *flags, "--param-names", names).err
    names.write_text("enc.bias\nenc.weight\ndec.weight\ndec.bias")
    assert "does not fit model.enc.bias" in cli("import", tmp_path / "c.pt", *flags, "--param-names", names).err
    assert "cannot be read" in cli("import", tmp_path / "c.pt", *flags, "--param-names", tmp_path / "none").err


def test_two_optimizers_take_their_names_one_after_the_other(cli: Cli, tmp_path: Path) -> None:
    """As a GAN's, of which both modules have the same names."""
    gen, disc = Pair(), Pair()
    disc.step()
    saved = {"gen": gen.state_dict(), "disc": disc.state_dict(), "g": gen.adam.state_dict(), "d": disc.adam.state_dict()}
    torch.save(saved, tmp_path / "c.pt")
    mine = ["dec.weight", "dec.bias", "enc.weight", "enc.bias"]
    (names := tmp_path / "names.txt").write_text("\n".join(f"{owner}.{name}" for owner in ("gen", "disc") for name in mine))
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root", "--param-names", names)
    other, its = Pair(), Pair()
    restored(tmp_path / "root", gen=other, disc=its, g=other.adam, d=its.adam)
    disc.same(its)
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root", "--param-names", names)
    names.write_text("\n".join(mine))
    assert "dec.weight may be gen.dec.weight or disc.dec.weight" in cli("import", tmp_path / "c.pt", *flags).err
    torch.save({"model": gen.state_dict()}, tmp_path / "c.pt")
    assert "4 names more than there are" in cli("import", tmp_path / "c.pt", *flags).err


def test_shapes_that_fit_in_one_way_need_no_names(cli: Cli, tmp_path: Path) -> None:
    pair = Pair(wide=1)
    pair.step()
    pair.save(tmp_path / "c.pt")
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root")
    other = Pair(wide=1)
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)
    assert [int(other.adam.state[p]["step"]) for p in other.parameters()] == [1, 1], "no fresh optimizer is the same as another"


def test_views_prefixes_dtypes_and_choices(cli: Cli, tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tensors = {
        "module.t": base.t(), "module.part": base[1:4, 2:7], "module.expanded": torch.ones(1).expand(3),
        "module.count": torch.arange(4), "module.f8": torch.randn(5).to(torch.float8_e4m3fn),
        "module.u16": torch.tensor([1, 65535], dtype=torch.uint16),
    }  # fmt: skip
    torch.save(tensors, tmp_path / "c.pt")
    report = run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "a")
    assert set(report["tensors"]) == {key.replace("module.", "model.") for key in tensors}
    state = {key.removeprefix("module."): torch.zeros_like(value).clone() for key, value in tensors.items()}
    restored(tmp_path / "a", strict=False, model=state)
    for key, value in tensors.items():
        assert torch.equal(state[key.removeprefix("module.")].view(value.dtype).float(), value.float()), key
    more = ("--prefix-map", "model.=net.", "--dtype", "BF16", "--only", "net.[tpc]*")
    report = run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "b", *more)
    dtypes = {key: dtype for key, (dtype, _) in report["tensors"].items()}
    assert dtypes == {"net.t": "BF16", "net.part": "BF16", "net.count": "I64"}
    found = {name: torch.zeros(tensors[f"module.{name}"].shape, dtype=torch.bfloat16) for name in ("t", "part")}
    restored(tmp_path / "b", strict=False, net=found)
    assert all(torch.equal(found[name], tensors[f"module.{name}"].to(torch.bfloat16)) for name in found)


def test_a_dry_run_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "c.pt")
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path / "c.pt", *flags, "--dry-run")
    assert ran.code == 0 and "model.embed.weight" in ran.out and "would be written" in ran.out
    assert not (tmp_path / "root").exists()
    ran = cli("import", tmp_path / "c.pt", *flags)
    assert "written to" in ran.out
    assert "has been started" in cli("import", tmp_path / "c.pt", *flags).err
    assert "begins no name: x" in cli("import", tmp_path / "c.pt", *flags, "--prefix-map", "x.=y.").err
    assert "not OLD=NEW" in cli("import", tmp_path / "c.pt", *flags, "--prefix-map", "x.").err
    assert "no dtype to import as: F4" in cli("import", tmp_path / "c.pt", *flags, "--dtype", "F4").err
    ran = cli("import", tmp_path / "c.pt", *flags, "--only", "x")
    assert "no tensor to import" in ran.err and "as in model.embed.weight" in ran.err
    assert "--from dcp, hf" in cli("import", tmp_path, *flags).err
    assert "--from torch" in cli("import", tmp_path / "c.pt", *flags[2:], "--from", "hf").err
    assert "--from tf" in cli("import", tmp_path / "c.pt", *flags[2:], "--from", "tf").err


def test_optimizers_in_other_places(cli: Cli, tmp_path: Path) -> None:
    """Lightning's list, a file of nothing else, and a module that is called as an optimizer's part is."""
    pair = Pair(groups=2)
    pair.step()
    names = pair.save(tmp_path / "c.pt")
    named = ("--param-names", names)
    lightning = {"state_dict": pair.state_dict(), "optimizer_states": [pair.adam.state_dict()], "epoch": 3}
    torch.save(lightning, tmp_path / "l.ckpt")
    torch.save(pair.adam.state_dict(), tmp_path / "o.pt")
    flags = ("--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root")
    assert "optimizer_states.0=optimizer" in cli("import", tmp_path / "l.ckpt", *flags, *named).err
    assert "import the model with it" in cli("import", tmp_path / "o.pt", *flags, *named).err
    run_import(cli, tmp_path / "l.ckpt", "torch", tmp_path / "root", "--prefix-map", "optimizer_states.0=optimizer", *named)
    other = Pair(groups=2)
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)
    torch.save({"model": {"state.proj.weight": torch.ones(2)}}, tmp_path / "s.pt")
    assert [*run_import(cli, tmp_path / "s.pt", "torch", tmp_path / "s")["tensors"]] == ["model.state.proj.weight"]


def test_dtypes_have_the_names_that_export_has(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "c.pt")
    for name in ("bfloat16", "bf16", "BF16", "BFLOAT16"):
        report = run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "root", "--dtype", name, "--dry-run")
        assert report["tensors"] == {"model.w": ["BF16", [2]]}


def test_a_step_and_a_scheduler_are_told(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    saved = {"model": model.state_dict(), "scheduler": scheduler.state_dict(), "epoch": 1, "global_step": 5}
    torch.save(saved, tmp_path / "c.pt")
    flags = ("import", tmp_path / "c.pt", "--from", "torch", "--job", JOB, "--storage-root", tmp_path / "root", "--dry-run")
    ran = cli(*flags)
    assert "step 0" in ran.out and "the file says global_step=5: --step 5 begins there" in ran.out
    assert "scheduler=extra.scheduler" in ran.out and "begins there" not in cli(*flags, "--step", 4).out
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "a", "--prefix-map", "scheduler=scheduler")
    run_import(cli, tmp_path / "c.pt", "torch", tmp_path / "b", "--prefix-map", "scheduler=extra.scheduler")
    for root, how in (("a", lambda one: {"scheduler": one}), ("b", lambda one: {"extra": {"scheduler": one}})):
        mine = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 2)
        restored(tmp_path / root, model=model, **how(mine))
        assert mine.state_dict() == scheduler.state_dict() and mine.last_epoch == 5


# --- safetensors ----------------------------------------------------------------------------------------------------
def test_files_of_safetensors(cli: Cli, tmp_path: Path) -> None:
    net = Net()
    folder = tmp_path / "hub"
    folder.mkdir()
    tensors = {key: value.clone() for key, value in net.state_dict().items() if key != "head.weight"}
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:4], names[4:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors", {"format": "pt"})
        weight_map.update(dict.fromkeys(part, f"model-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(run_import(cli, folder, "hf", tmp_path / "a", "--dry-run")["tensors"]) == set(names), "names as they are"
    run_import(cli, folder, "hf", tmp_path / "root", "--prefix-map", "=model.")
    model = Net(fill=0)
    restored(tmp_path / "root", model=model)
    expect_same(net, None, model, None)
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    flags = ("--from", "hf", "--job", "other", "--storage-root", tmp_path / "root")
    assert "torn" in cli("import", folder, *flags).err
    path.unlink()
    assert "torn: model-1.safetensors" in cli("import", folder, *flags).err


def test_numbered_files_without_an_index_are_all_there(cli: Cli, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    assert len(run_import(cli, tmp_path, "hf", tmp_path / "root", "--dry-run")["tensors"]) == 3
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    flags = ("--from", "hf", "--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path, *flags)
    assert ran.code == 1 and "torn: 2 files of 00003 are there, model-00002-of-00003.safetensors is not" in ran.err


def test_nothing_is_read_whole(cli: Cli, tmp_path: Path) -> None:
    """Neither by an import, converting or not, nor by a comparison: a few MiB, whatever a tensor's size."""
    count = 1 << 24
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, count // 2], "data_offsets": [0, 4 * count]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:  # a hole
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)
    with peak_below(32 << 20):
        paths = [
            run_import(cli, tmp_path / "big.safetensors", "hf", tmp_path / name, *more)["path"]
            for name, more in (("a", ()), ("b", ("--dtype", "BF16")))
        ]
        assert "other dtype" in cli("diff", *paths).out


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------
def save_dcp(folder: Path, **more: Any) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = trained()
    model, optim = get_state_dict(net, optimizer)
    save({"model": model, "optimizer": optim, "epoch": 4, **more}, folder)
    return net, optimizer


def save(state: dict[str, Any], folder: Path | str) -> None:
    """Without the copy ahead that asks for a stream of the device that other tests simulate."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, per_thread_copy_ahead=0))


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_beside_the_model_is_none_of_it(cli: Cli, tmp_path: Path) -> None:
    """It counted as one of those that the optimizer numbers."""
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    state = {"model": model.state_dict(), "optimizer": adam.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "one.pt")
    report = run_import(cli, tmp_path / "one.pt", "torch", tmp_path / "root", "--param-names", "model")
    assert "rng" in report["tensors"] and "optimizer.model.weight.exp_avg" in report["tensors"]


@pytest.mark.filterwarnings("ignore")
def test_a_directory_of_dcp(cli: Cli, tmp_path: Path) -> None:
    net, optimizer = save_dcp(tmp_path / "dcp")
    report = run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root")
    assert report["meta"] == ["epoch"]
    model, optim = fresh()
    restored(tmp_path / "root", model=model, optimizer=optim)
    expect_same(net, optimizer, model, optim)


def flat(pair: Pair) -> dict[str, Any]:
    return get_optimizer_state_dict(pair, pair.adam, options=StateDictOptions(flatten_optimizer_state_dict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["below", "beside"])
def test_a_flat_optimizer_of_dcp(cli: Cli, tmp_path: Path, layout: str) -> None:
    """As its owner's dict, or all of it at the top as torchtitan has it."""
    pair = Pair(groups=2)
    pair.step()
    top = {f"optimizer.{name}": value for name, value in flat(pair).items()} | pair.state_dict()
    save({"model": pair.state_dict(), "optimizer": flat(pair)} if layout == "below" else top, tmp_path / "dcp")
    report = run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root")
    assert "optimizer.groups" in report["objects"] and "model.enc.weight" in report["tensors"] and report["meta"] == []
    other = Pair(groups=2)
    for group in other.adam.param_groups:
        group["lr"] = 9.0
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["state_dict", "flat", "torchtitan"])
def test_what_export_wrote_for_dcp_comes_back(cli: Cli, tmp_path: Path, layout: str) -> None:
    pair = Pair(groups=2)
    pair.step()
    save({"model": pair.state_dict(), "optimizer": flat(pair)}, tmp_path / "dcp")
    first = run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root")["path"]
    ran = cli("export", first, tmp_path / "out", "--to", "dcp", "--layout", layout)
    assert ran.code == 0, ran.err
    run_import(cli, tmp_path / "out", "dcp", tmp_path / "again")
    other = Pair(groups=2)
    restored(tmp_path / "again", model=other, optimizer=other.adam)
    pair.same(other)


class App:
    """As in torch's tutorial of distributed checkpoints: a Stateful with model and optimizer in one dict."""

    def __init__(self, pair: Pair, *, flat: bool = False) -> None:
        self.pair, self.flat = pair, flat

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.pair, self.pair.adam, options=StateDictOptions(flatten_optimizer_state_dict=self.flat))
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_flat", [False, True])
def test_an_app_state_of_dcp_is_asked_for_names(cli: Cli, tmp_path: Path, is_flat: bool) -> None:
    pair = Pair(groups=2)
    pair.step()
    save({"app": App(pair, flat=is_flat)}, tmp_path / "dcp")
    ran = cli("import", tmp_path / "dcp", "--from", "dcp", "--job", JOB, "--storage-root", tmp_path / "root")
    maps = ("--prefix-map", "app.model=model", "--prefix-map", "app.optim=optimizer")
    assert ran.code == 1 and " ".join(maps) in " ".join(ran.err.split()), ran.err
    run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root", *maps)
    other = Pair(groups=2)
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)
    report = run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "b", "--prefix-map", "app.optim=", "--prefix-map", "app.=")
    assert {key.partition(".")[0] for key in report["tensors"]} == {"model"} and "app.optim: left out" in report["notes"][0]


@pytest.mark.filterwarnings("ignore")
def test_a_numbered_optimizer_of_dcp_is_asked_for_its_names(cli: Cli, tmp_path: Path) -> None:
    pair = Pair(groups=2)
    pair.step()
    names = pair.save(tmp_path / "c.pt")
    save({"model": pair.state_dict(), "optimizer": pair.adam.state_dict()}, tmp_path / "dcp")
    flags = ("--from", "dcp", "--job", JOB, "--storage-root", tmp_path / "root")
    assert "only numbers 4" in cli("import", tmp_path / "dcp", *flags).err
    run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root", "--param-names", names)
    other = Pair(groups=2)
    restored(tmp_path / "root", model=other, optimizer=other.adam)
    pair.same(other)


def by_two_ranks(save_one: Any, folder: Path) -> None:
    ranks = [multiprocessing.get_context("fork").Process(target=save_one, args=(rank, str(folder))) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0


def _save_rows(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}.store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = {"rows": torch.arange(35.0).view(7, 5), "columns": torch.arange(15, dtype=torch.int64).view(3, 5)}
    state = {name: distribute_tensor(value, mesh, [Shard(dim)]) for dim, (name, value) in enumerate(whole.items())}
    save({"model": state}, folder)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_uneven_shards_of_two_ranks(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    by_two_ranks(_save_rows, folder)
    run_import(cli, folder, "dcp", tmp_path / "root")
    state = {"rows": torch.zeros(7, 5), "columns": torch.zeros(3, 5, dtype=torch.int64)}
    restored(tmp_path / "root", model=state)
    assert torch.equal(state["rows"], torch.arange(35.0).view(7, 5))
    assert torch.equal(state["columns"], torch.arange(15).view(3, 5))
    flags = ("--from", "dcp", "--job", "other", "--storage-root", tmp_path / "root")
    torn = folder / "__1_0.distcp"
    torn.write_bytes(torn.read_bytes()[:-600])
    assert "torn" in cli("import", folder, *flags).err
    torn.unlink()
    assert "torn: __1_0.distcp" in cli("import", folder, *flags).err
    os.unlink(folder / ".metadata")
    assert "no .metadata" in cli("import", folder, *flags).err


@pytest.mark.filterwarnings("ignore")
def test_a_flat_buffer_of_fsdp1_says_nothing_of_parameters(cli: Cli, tmp_path: Path) -> None:
    save({"model": {"_fsdp_wrapped_module._flat_param": torch.zeros(8)}}, tmp_path / "dcp")
    ran = cli("import", tmp_path / "dcp", "--from", "dcp", "--job", JOB, "--storage-root", tmp_path / "root")
    assert ran.code == 1 and "LOCAL_STATE_DICT" in ran.err and "SHARDED_STATE_DICT" in ran.err


def _save_flat(rank: int, folder: str) -> None:
    """As FSDP1 gives it when it is asked for what it holds: one alone has nothing flat."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}.store", 2), rank=rank, world_size=2)
    cpu, wrap = torch.device("cpu"), FullyShardedDataParallel
    model = torch.nn.Sequential(wrap(Net().low.float(), device_id=cpu), wrap(Net().embed, device_id=cpu, use_orig_params=True))
    with wrap.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = {"model": model.state_dict()}
    torch.save(state, f"{folder}-{rank}.pt")
    save(state, folder)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp1_holds_says_nothing_of_parameters(cli: Cli, tmp_path: Path) -> None:
    """A real one, by both of torch's writers: of the file, the class of its tensors is one that no pickle of states has."""
    by_two_ranks(_save_flat, tmp_path / "dcp")
    flags = ("--job", JOB, "--storage-root", tmp_path / "root")
    ran = cli("import", tmp_path / "dcp", "--from", "dcp", *flags)
    assert ran.code == 1 and "LOCAL_STATE_DICT" in ran.err and "_flat_param" in ran.err, ran
    ran = cli("import", tmp_path / "dcp-1.pt", "--from", "torch", *flags)
    assert ran.code == 1 and "dcp-1.pt" in ran.err, ran
    assert not (tmp_path / "root").exists()
