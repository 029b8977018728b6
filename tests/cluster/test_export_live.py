"""`ckptd export --live`: one step of a running job, whole, and training is granted what it would have been without it (P1, P5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptd_client import CkptdError
from ckptd_client.reader import Reading
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd.export import live, stored
from ckptd.export.export import Report, Request, export
from tests.cluster.nodes import Cluster, Node, Trainer, together
from tests.waiting import until

JOB = "live"
AT, STEPS = 3, 5
AT_READ = 4  # of the export: amid its tensors


def trained(nodes: Cluster, made: list[Node], kind: str, level: str) -> list[Trainer]:
    """At a step that is at that level."""
    world = nodes.world(made, JOB, kind=kind)
    together(world, "restore")
    together(world, "train", steps=AT, snapshot=False)
    together(world, "snapshot", must=True)
    assert all(level in str(said) for said in together(world, "wait", level=level))
    return world


def go_on(world: list[Trainer], level: str) -> list[Any]:
    """What became of the snapshots that it asks for at each step, one after the other. Each waits for its grant: on a busy machine
    one may come later than the next step."""
    said = []
    for _ in range(STEPS):
        together(world, "train", steps=1, snapshot=False)
        said += [str(answer) for answer in together(world, "snapshot", must=True)]
        said += [str(answer) for answer in together(world, "wait", level=level)]
    return said


def amid(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Each tensor is read by itself, and before one of them this happens."""
    read, reads = Reading.read, []

    def reading(self: Reading, *how: Any) -> None:
        reads.append(self)
        if len(reads) == AT_READ:
            act()
        read(self, *how)

    monkeypatch.setattr(live, "TOGETHER_BYTES", 0)
    monkeypatch.setattr(Reading, "read", reading)


def exported(node: Node, dest: Path, to: str = "torch", **how: Any) -> Report:
    return export(Request(JOB, str(dest), to, live=True, socket=str(node.socket), **how))


def digest_of(found: Any, optimizer: str) -> str:
    """As a rank makes it of its own state (trainer.py)."""
    names = found[optimizer]["param_groups"][0]["params"]
    tensors = dict(found["model"])
    for name, state in found[optimizer]["state"].items():
        tensors |= {f"{names.index(name)}.{key}": value for key, value in state.items()}
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    loader = found["extra"]["extra.loader"] if "extra" in found else found["extra.loader"]
    made.update(str(loader["at"]).encode())
    return made.hexdigest()


def torch_file(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.chaos
def test_a_running_job_is_exported_and_is_granted_the_same_steps(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slow export reads one, two own slots take turns as they do without one."""
    made = nodes.several(2, own_slots=2)
    world = trained(nodes, made, "statistics", "protected")
    alone = go_on(world, "protected")
    digests = together(world, "digest")
    beside: list[Any] = []
    amid(monkeypatch, lambda: beside.extend(go_on(world, "protected")))
    report = exported(made[0], tmp_path / "live.pt")
    assert alone == beside
    found = torch_file(tmp_path / "live.pt")
    assert found["step"] == AT + STEPS and digest_of(found, "optimizer") == digests[0], "rank 0's statistics"
    assert [note for note in report.notes if "differ between ranks" in note] == report.notes
    now = together(world, "digest")[0]
    done = made[1].cli("export", "--live", JOB, tmp_path / "live", "--to", "dcp")
    assert done.returncode == 0 and "wrote" in done.stdout, done.stderr
    dcp_to_torch_save(tmp_path / "live", tmp_path / "dcp.pt")
    assert digest_of(torch_file(tmp_path / "dcp.pt"), "optim") == now, "the newest step"
    done = made[1].cli("export", "--live", "nobody", tmp_path / "none", "--to", "dcp")
    assert done.returncode != 0 and "nothing of this job is known" in done.stderr


def test_a_loop_that_waits_for_no_grant_gets_as_many_beside_it(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it asks at each step, the grant of one may come at the next, with an export or without."""
    made = nodes.several(2, own_slots=2)
    world = trained(nodes, made, "plain", "protected")
    said: list[str] = []

    def taken() -> bool:
        said.extend(together(world, "train")[0]["statuses"])
        return sum(not text.startswith("skipped") for text in said) >= STEPS

    amid(monkeypatch, lambda: until(taken))
    exported(made[0], tmp_path / "live.pt")
    assert not [text for text in said if "memory" in text]
    assert torch_file(tmp_path / "live.pt")["step"] == AT


def test_without_its_memory_it_ends_with_a_word(nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two own slots neither waits for an export."""
    node = nodes.node(own_slots=2, replicas=0)
    world = trained(nodes, [node], "plain", "sealed")
    amid(monkeypatch, lambda: go_on(world, "sealed"))
    with pytest.raises(CkptdError, match=f"step {AT} cannot be read from memory any more.*no copy on storage") as error:
        exported(node, tmp_path / "live.pt")
    assert "export it again" in error.value.hint
    assert list(tmp_path.iterdir()) == []
    report, found = exported(node, tmp_path / "live.pt"), torch_file(tmp_path / "live.pt")
    assert (found["step"], report.notes) == (AT + STEPS, [])


def test_without_its_memory_it_goes_on_from_the_same_steps_copy_on_storage(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which came there after the export had begun: until then it knew of memory alone."""
    node = nodes.node(own_slots=2, replicas=0, storage_root=nodes.root / "storage", keep_last=9)
    world = trained(nodes, [node], "plain", "durable")
    digests = together(world, "digest")
    amid(monkeypatch, lambda: go_on(world, "durable"))
    opened: list[str | None] = []

    def first_in_memory(job: str, step: int | None, source: str | None = None, **how: Any) -> Reading:
        opened.append(source)
        return live_open(job, step, source or "memory", **how)

    live_open = live.open_job
    monkeypatch.setattr(live, "open_job", first_in_memory)
    report = exported(node, tmp_path / "live.pt")
    found = torch_file(tmp_path / "live.pt")
    assert found["step"] == AT and digest_of(found, "optimizer") == digests[0]
    assert opened == [None, "durable"] and "the rest is of its copy on storage" in report.notes[0]


def test_other_forms_and_tensors_that_come_in_parts(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = nodes.node(replicas=0)
    trained(nodes, [node], "plain", "sealed")
    exported(node, tmp_path / "live.pt")
    found = torch_file(tmp_path / "live.pt")
    exported(node, tmp_path / "hf", "hf", as_is=True, step=AT)
    exported(node, tmp_path / "universal", "deepspeed")
    masters = tmp_path / "universal" / f"global_step{AT}_universal" / "zero"
    weights = load_file(tmp_path / "hf/model.safetensors"), torch_file(masters / "0.weight/fp32.pt")["param"]
    assert weights[0].keys() == found["model"].keys()
    assert torch.equal(weights[0]["0.weight"], found["model"]["0.weight"]) and torch.equal(weights[1], found["model"]["0.weight"])
    monkeypatch.setattr(stored, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(live, "WINDOW_BYTES", 5 << 10)  # five pieces; one is read by itself
    exported(node, tmp_path / "parts.pt")
    assert (tmp_path / "parts.pt").read_bytes() == (tmp_path / "live.pt").read_bytes()
