"""What an exporter and an importer have no natural place for: names of any text, dicts whose keys are one text, values and a tensor
in one object."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.export.export import Request, export
from tests.node.commands import Cli
from tests.node.imports import restored, run_import
from tests.node.trained import Train, trained

NAMES = ("new\nline", " sp ace ", "a/b", "üß", "[0]")

# torch's own loaders say so where there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


class Odd(nn.Module):
    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        for number, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((3,), float(number))))


class Progress:
    """As a data loader's state: numbers, and a tensor among them."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 3, "seen": torch.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    with trained() as found:
        yield found


def made(names: tuple[str, ...] = NAMES) -> tuple[Odd, torch.optim.Optimizer, Any]:
    """With what steps it."""
    model = Odd(names)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        sum(number * parameter.square().sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
        adam.step()

    return model, adam, step


@pytest.mark.parametrize("layout", ["state_dict", "flat", "torchtitan"])
def test_names_and_mixed_objects_go_through_dcp(train: Train, cli: Cli, tmp_path: Path, layout: str) -> None:
    """The object's numbers were left out, and what was left of it was refused by restore() as nobody's."""
    model, adam, step = made()
    saved = train(f"odd-{layout}", {"model": model, "optimizer": adam, "extra": {"progress": Progress()}}, step)
    export(Request(str(saved), str(tmp_path / "dcp"), "dcp", layout=layout))
    report = run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "root")
    assert not [note for note in report["notes"] if "progress" in note]
    again, other, _ = made()
    meta = restored(tmp_path / "root", model=again, optimizer=other)["meta"]["extra.progress"]
    assert meta["epoch"] == 3 and torch.equal(meta["seen"], torch.arange(3))
    for name, parameter in again.named_parameters():
        was = getattr(model, name)
        assert torch.equal(parameter, was) and torch.equal(other.state[parameter]["exp_avg"], adam.state[was]["exp_avg"]), name
    progress = Progress()
    progress.state = {}
    run_import(cli, tmp_path / "dcp", "dcp", tmp_path / "mapped", "--prefix-map", "extra.progress=extra.progress")
    restored(tmp_path / "mapped", model=again, optimizer=other, extra={"progress": progress})
    assert progress.state["epoch"] == 3 and torch.equal(progress.state["seen"], torch.arange(3))


def test_a_file_of_names_has_them_as_they_are(train: Train, cli: Cli, tmp_path: Path) -> None:
    names = NAMES[1:]  # of those with a line's end in them a file of lines cannot tell
    model, adam, step = made(names)
    saved = train("names", {"model": model, "optimizer": adam}, step)
    export(Request(str(saved), str(tmp_path / "a.pt"), "torch"))
    (tmp_path / "names.txt").write_text("\n".join(names))
    run_import(cli, tmp_path / "a.pt", "torch", tmp_path / "root", "--param-names", tmp_path / "names.txt")
    again, other, _ = made(names)
    restored(tmp_path / "root", model=again, optimizer=other)
    for name in names:
        assert torch.equal(other.state[getattr(again, name)]["exp_avg"], adam.state[getattr(model, name)]["exp_avg"]), name


@pytest.mark.parametrize("state", [{1: "a", "1": "b"}, {"a.b": 1, "a": {"b": 2}}], ids=["number and text", "dot"])
def test_two_keys_that_torch_makes_one_are_refused_before_anything_is_written(
    train: Train, cli: Cli, tmp_path: Path, state: Any
) -> None:
    """It was torch's own error with its trace, and --dry-run knew of nothing."""
    model, adam, step = made(NAMES[1:])
    progress = Progress()
    progress.state = {"k": state}
    saved = train(f"keys-{'a' in state}", {
        "model": model, "optimizer": adam, "extra": {"progress": progress}
    }, step)  # fmt: skip
    for how in ("--dry-run", "--json"):
        said = cli("export", saved, tmp_path / "dcp", "--to", "dcp", how)
        assert said.code == 1 and "extra.progress.k." in said.err and "--to torch" in said.err and "Traceback" not in said.err
        assert list(tmp_path.iterdir()) == []


def test_a_small_module_of_any_name_with_state_of_its_own_stays_one(cli: Cli, tmp_path: Path) -> None:
    """Other dicts with tensors and values in them are values."""
    torch.save(
        {"disc": {"w": torch.ones(2), "_extra_state": {"a": 1}}, "ema": {"decay": 0.9, "shadow": [torch.ones(2)]}},
        tmp_path / "a.pt",
    )
    report = run_import(cli, tmp_path / "a.pt", "torch", tmp_path / "root")
    assert {*report["tensors"]} == {"disc.w"} and {*report["meta"]} == {"ema"} and report["notes"] == []


def two(made: Callable[..., Any]) -> dict[str, Any]:
    """Two models alike, each with an optimizer of its own."""
    torch.manual_seed(1)
    models = {name: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for name in "GD"}
    return models | {f"of_{name}": made(model.parameters()) for name, model in models.items()}


def step_of(registered: dict[str, Any]) -> Callable[[int], None]:
    def step(number: int) -> None:
        for name in "GD":
            registered[name](torch.full((3, 4), 1.0 + number + ord(name))).square().mean().backward()
            registered[f"of_{name}"].step()
            registered[f"of_{name}"].zero_grad()

    return step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_two_models_alike_come_back_each_with_its_own(train: Train, cli: Cli, tmp_path: Path, to: str, kind: Any) -> None:
    """Of a name that both have the hint named a remedy that was none, and states that are no parameter's shape were refused."""
    is_lbfgs = kind is torch.optim.LBFGS
    registered = two(kind)
    step = step_of_closures(registered) if is_lbfgs else step_of(registered)
    saved = train(f"two-{to}-{kind.__name__}", registered, step)
    export(Request(str(saved), str(tmp_path / "out"), to))
    flags = ("--from", to, "--job", "j", "--step", "7", "--storage-root", tmp_path / "root")
    if to == "dcp":
        assert "may be D.0.weight or G.0.weight" in cli("import", tmp_path / "out", *flags).err
    names = [f"{name}.{at}.{what}" for name in "DG" for at in (0, 1) for what in ("weight", "bias")]
    (tmp_path / "names.txt").write_text("\n".join(names))
    run_import(cli, tmp_path / "out", to, tmp_path / "root", "--param-names", tmp_path / "names.txt")
    again = two(kind)
    restored(tmp_path / "root", **again)
    for name in "GD":
        for mine, its in zip(again[name].parameters(), registered[name].parameters(), strict=True):
            assert torch.equal(mine, its)
            kept, was = again[f"of_{name}"].state[mine], registered[f"of_{name}"].state[its]
            assert kept.keys() == was.keys() and all(torch.equal(kept[k], v) for k, v in was.items() if torch.is_tensor(v)), name


def test_every_process_has_the_same_plan(train: Train, tmp_path: Path) -> None:
    """Else parts that several write, or what a try that died has written, are thrown away: modules stood as a set has them."""
    registered = {name: nn.Linear(2, 2) for name in "ABCDEF"}
    saved = train("plan", registered, lambda number: None)
    for seed in "123":
        command = [sys.executable, "-m", "ckptd", "export", str(saved), str(tmp_path / seed), "--to", "torch"]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.DEVNULL)
    assert len({(tmp_path / seed).read_bytes() for seed in "123"}) == 1


def step_of_closures(registered: dict[str, Any]) -> Callable[[int], None]:
    def step(number: int) -> None:
        for name in "GD":

            def closure(name: str = name) -> torch.Tensor:
                registered[f"of_{name}"].zero_grad()
                loss: torch.Tensor = registered[name](torch.full((3, 4), 1.0 + number + ord(name)) / 99).square().mean()
                loss.backward()
                return loss

            registered[f"of_{name}"].step(closure)

    return step
