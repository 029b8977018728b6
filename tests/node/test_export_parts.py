"""Several processes, or nodes with one file system, write parts of one export, and one finishes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptd.choices import Share
from ckptd.core.errors import CkptdError
from ckptd.export import dcp as dcp_form
from ckptd.export.export import Report, Request, export
from ckptd.export.journal import NAME, Journal
from tests.node.checkpoints import World
from tests.node.commands import Cli
from tests.node.started import Started
from tests.node.test_export_written import TENSORS, Killed, of_world, opened, raw, saved
from tests.node.trained import trained

COUNT = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    return saved(tmp_path_factory.mktemp("parts") / "root", 2400)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_form, "CHUNK_BYTES", 512 << 10)
    monkeypatch.setattr(dcp_form, "FILE_BYTES", 1 << 20)


def exported(source: Path, dest: Path, to: str, part: str | None = None, dies_at: int | None = None) -> Report:
    def shown(done: int, total: int) -> None:
        if dies_at is not None and done >= dies_at:
            raise Killed

    how: dict[str, Any] = {"as_is": True, "shard_size": "3MB"} if to == "hf" else {}
    return export(Request(str(source), str(dest), to, TENSORS, part=part, **how), shown)


def check(dest: Path, to: str, world: World) -> None:
    found = opened(dest, to)
    assert found.keys() == {"model.wide", "model.tall", "model.norm", "model.mean", "model.head"}
    assert all(raw(value) == of_world(world, key.replace("head", "wide")) for key, value in found.items())
    assert not dest.with_name(dest.name + ".exporting").exists()


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_parts_one_after_the_other_are_all_of_it(original: tuple[Path, World], tmp_path: Path, to: str) -> None:
    """What one of them has written none of the others writes, and who finishes it only looks at it."""
    source, world = original
    parts = [exported(source, tmp_path / "out", to, f"{number}/{COUNT}") for number in range(1, COUNT + 1)]
    assert not (tmp_path / "out").exists()
    assert all(part.written > 0 and part.reused == 0 for part in parts)
    assert sum(part.written for part in parts) == parts[0].nbytes
    report = exported(source, tmp_path / "out", to)
    assert report.written == 0 and report.reused == report.nbytes
    check(tmp_path / "out", to, world)
    if to == "torch":
        exported(source, tmp_path / "whole", to)
        assert (tmp_path / "out").read_bytes()[-100_000:] == (tmp_path / "whole").read_bytes()[-100_000:]


def test_processes_side_by_side(original: tuple[Path, World], tmp_path: Path) -> None:
    """All of them begin it at once; one of them makes the frame of the file."""
    source, world = original
    command = ["export", source, tmp_path / "out", "--to", "torch", "--json"]
    command += [word for pattern in TENSORS for word in ("--only", pattern)]
    made = [Started(*command, "--part", f"{number}/{COUNT}") for number in range(1, COUNT + 1)]
    told = [process.report() for process in made]
    assert [row["part"] for row in told] == ["1/3", "2/3", "3/3"] and not (tmp_path / "out").exists()
    report = Started(*command).report()
    assert report["written"] == 0 and report["reused"] == report["nbytes"] == sum(row["written"] for row in told)
    check(tmp_path / "out", "torch", world)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_part_that_was_killed_goes_on_and_one_that_lacks_is_made_up_for(
    original: tuple[Path, World], tmp_path: Path, to: str
) -> None:
    source, world = original
    exported(source, tmp_path / "out", to, "1/3")
    with pytest.raises(Killed):
        exported(source, tmp_path / "out", to, "2/3", dies_at=2_000_000)
    again = exported(source, tmp_path / "out", to, "2/3")
    assert again.written > 0 and (again.reused > 0 or to == "torch"), "a tensor of one file is written anew, whole"
    report = exported(source, tmp_path / "out", to)
    assert 0 < report.written < report.nbytes and report.written + report.reused == report.nbytes
    check(tmp_path / "out", to, world)


def test_files_of_the_hub_in_parts_of_which_one_was_killed(original: tuple[Path, World], tmp_path: Path) -> None:
    """A file is whole when all of its tensors are, whoever wrote them; what is tied is there once."""
    source, world = original
    exported(source, tmp_path / "whole", "hf")
    first = exported(source, tmp_path / "out", "hf", "1/2")
    with pytest.raises(Killed):
        exported(source, tmp_path / "out", "hf", "2/2", dies_at=1)
    second = exported(source, tmp_path / "out", "hf", "2/2")
    assert not (tmp_path / "out").exists() and min(first.written, second.written) > 0
    assert first.written + second.written + second.reused == first.nbytes
    report = exported(source, tmp_path / "out", "hf")
    assert report.written == 0 and report.reused == report.nbytes
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()} and len(found) == 3
    values = {name: value for path in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(path).items()}
    assert {name: raw(value) for name, value in values.items()} == {
        key.removeprefix("model."): of_world(world, key) for key in ("model.wide", "model.tall", "model.norm", "model.mean")
    }


def test_a_universal_checkpoint_in_parts_of_which_one_was_killed(tmp_path: Path) -> None:
    """A file per parameter, moment and number of steps; who dies has some of them, and one by half."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    model.register_buffer("scale", torch.ones(3))  # which is in the files of two stages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.full((2, 40), number + 1.0)).square().sum().backward()
        optimizer.step()

    def written(name: str, part: str | None = None, dies_at: int | None = None) -> Report:
        return exported(source, tmp_path / name, "deepspeed", part, dies_at)

    def files(name: str) -> dict[Path, bytes]:
        folder = tmp_path / name
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with trained() as train:
        source = train("universal", {"model": model, "optim": optimizer}, step)
        nbytes = written("whole").nbytes
        for dies_at in (nbytes // 4, nbytes // 2):
            with pytest.raises(Killed):
                written("killed", dies_at=dies_at)
        again = written("killed")
        assert 0 < again.written < nbytes and again.written + again.reused == nbytes
        first = written("parts", "1/3")
        with pytest.raises(Killed):
            written("parts", "2/3", dies_at=first.written // 2)
        made = [first, written("parts", "2/3"), written("parts", "3/3")]
        assert not (tmp_path / "parts").exists() and min(part.written for part in made) > 0
        assert sum(part.written + part.reused for part in made) == nbytes
        assert written("parts").written == 0
    assert len(files("whole")) == 12 * 4 + 4
    assert files("killed") == files("whole") == files("parts")


def test_who_may_write_it_now(original: tuple[Path, World], tmp_path: Path) -> None:
    source, world = original
    folder = tmp_path / "out.exporting"
    exported(source, tmp_path / "out", "torch", "1/3")
    plan = json.loads((folder / NAME).read_text().splitlines()[0])["plan"]
    held = Journal(folder, plan, Share(0, COUNT), lambda: None)
    for part in ("1/3", None):  # the same one, and who finishes it
        with pytest.raises(CkptdError, match="another export is writing it"):
            exported(source, tmp_path / "out", "torch", part)
    with pytest.raises(CkptdError, match="another export is writing it"):  # by another plan
        export(Request(str(source), str(tmp_path / "out"), "torch", ("model.*",), part="2/3"))
    exported(source, tmp_path / "out", "torch", "2/3")
    held.close()
    exported(source, tmp_path / "out", "torch")
    check(tmp_path / "out", "torch", world)


def test_another_plan_throws_all_parts_away(original: tuple[Path, World], tmp_path: Path) -> None:
    source, world = original
    export(Request(str(source), str(tmp_path / "out"), "torch", ("model.*",), part="1/2"))
    report = exported(source, tmp_path / "out", "torch")
    assert report.reused == 0 and report.written == report.nbytes
    check(tmp_path / "out", "torch", world)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_line_that_a_death_has_torn_is_no_end(original: tuple[Path, World], tmp_path: Path, to: str) -> None:
    """Twice: what is written behind it is read by the next one."""
    source, world = original
    for dies_at in (1_000_000, 3_000_000):
        with pytest.raises(Killed):
            exported(source, tmp_path / "out", to, dies_at=dies_at)
        with (tmp_path / "out.exporting" / NAME).open("a") as file:
            file.write('{"part": "mod')
    report = exported(source, tmp_path / "out", to)
    assert 0 < report.reused < report.nbytes
    check(tmp_path / "out", to, world)


def test_a_part_behind_a_run_that_died_while_it_made_the_frame(
    original: tuple[Path, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, world = original
    real = torch.save

    def dies(tree: object, path: Path) -> None:
        real(tree, path)
        with path.open("r+b") as file:
            file.truncate(500)
        raise Killed

    monkeypatch.setattr(torch, "save", dies)
    for part in (None, "1/3"):
        with pytest.raises(Killed):
            exported(source, tmp_path / "out", "torch", part)
    monkeypatch.setattr(torch, "save", real)
    for part in ("3/3", "1/3", "2/3"):
        assert exported(source, tmp_path / "out", "torch", part).written > 0
    assert exported(source, tmp_path / "out", "torch").written == 0
    check(tmp_path / "out", "torch", world)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("harm", ["frame", "end", "longer", "shorter"])
def test_what_lies_around_the_tensors_is_as_it_is_made(
    original: tuple[Path, World], tmp_path: Path, harm: str, shared: bool
) -> None:
    """Its sum is nowhere: a flipped bit there came out as a whole export; a file that was cut ended in a traceback each time."""
    source, _ = original
    exported(source, tmp_path / "whole", "torch")
    for part in ("1/2", "2/2") if shared else ():
        exported(source, tmp_path / "out", "torch", part)
    if not shared:
        with pytest.raises(Killed):
            exported(source, tmp_path / "out", "torch", dies_at=5_000_000)
    content = tmp_path / "out.exporting" / "content"
    size = content.stat().st_size
    with content.open("r+b") as file:
        if harm in ("longer", "shorter"):
            file.truncate(size + (100 if harm == "longer" else -1000))
        else:
            file.seek(3 if harm == "frame" else size - 10)
            file.write(b"z")
    exported(source, tmp_path / "out", "torch")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "a/b", "-1/2", "1/0"])
def test_what_is_no_part(original: tuple[Path, World], tmp_path: Path, cli: Cli, text: str) -> None:
    ran = cli("export", original[0], tmp_path / "out", "--to", "torch", "--part", text)
    assert ran.code == 1 and "no part of the work" in ran.err and not os.listdir(tmp_path)


def test_a_running_job_has_no_parts(tmp_path: Path, cli: Cli) -> None:
    ran = cli("export", "run", tmp_path / "out", "--to", "torch", "--live", "--part", "1/2")
    assert ran.code == 1 and "it is for a checkpoint" in ran.err
