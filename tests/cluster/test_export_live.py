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
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptd.export import live
from ckptd.export.export import Report, Request, export
from tests.cluster.nodes import Cluster, Node, Trainer, together

JOB, OTHER = "live", "alone"
STEPS = 5
AT_READ = 4  # of the export: amid its tensors


def trained(nodes: Cluster, made: list[Node], job: str, kind: str, level: str) -> tuple[list[Trainer], list[str]]:
    """At step 3, which is at that level; and digests of its state."""
    world = nodes.world(made, job, kind=kind)
    together(world, "restore")
    together(world, "train", steps=3, snapshot=False)
    digests = together(world, "digest")
    together(world, "snapshot", must=True)
    assert all(level in str(said) for said in together(world, "wait", level=level))
    return world, digests


def go_on(world: list[Trainer], level: str) -> list[Any]:
    """What became of the snapshots that it asks for at each step, one after the other."""
    said = []
    for _ in range(STEPS):
        said += [answer["statuses"] for answer in together(world, "train", steps=1)]
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


def exported(node: Node, dest: Path, to: str = "torch") -> Report:
    return export(Request(JOB, str(dest), to, live=True, socket=str(node.socket)))


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


def test_a_running_job_is_exported_and_is_granted_the_same_steps(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slow export reads step 3, two own slots take turns as they do without one."""
    made = nodes.several(2, own_slots=2)
    alone, _ = trained(nodes, made, OTHER, "statistics", "protected")
    wanted = go_on(alone, "protected")
    for trainer in alone:
        trainer.kill()
    world, digests = trained(nodes, made, JOB, "statistics", "protected")
    granted: list[Any] = []
    amid(monkeypatch, lambda: granted.extend(go_on(world, "protected")))
    report = exported(made[0], tmp_path / "live.pt")
    assert granted == wanted and len({str(one) for one in granted}) < len(granted)
    found = torch_file(tmp_path / "live.pt")
    assert found["step"] == 3 and digest_of(found, "optimizer") == digests[0], "rank 0's statistics"
    assert [note for note in report.notes if "differ between ranks" in note] == report.notes
    now = together(world, "digest")[0]
    done = made[1].cli("export", "--live", JOB, tmp_path / "live", "--to", "dcp")
    assert done.returncode == 0 and "wrote" in done.stdout, done.stderr
    dcp_to_torch_save(tmp_path / "live", tmp_path / "dcp.pt")
    assert digest_of(torch_file(tmp_path / "dcp.pt"), "optim") == now, "the newest step"
    done = made[1].cli("export", "--live", "nobody", tmp_path / "none", "--to", "dcp")
    assert done.returncode != 0 and "nothing of this job is known" in done.stderr


def test_without_its_memory_it_ends_with_a_word(nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two own slots neither waits for an export."""
    node = nodes.node(own_slots=2, replicas=0)
    world, _ = trained(nodes, [node], JOB, "plain", "sealed")
    amid(monkeypatch, lambda: go_on(world, "sealed"))
    with pytest.raises(CkptdError, match="step 3 cannot be read from memory any more.*no copy on storage") as error:
        exported(node, tmp_path / "live.pt")
    assert "export it again" in error.value.hint
    assert list(tmp_path.iterdir()) == []
    report = exported(node, tmp_path / "live.pt")
    assert (torch_file(tmp_path / "live.pt")["step"], report.notes) == (3 + STEPS, [])


def test_without_its_memory_it_goes_on_from_the_same_steps_copy_on_storage(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which came there after the export had begun: until then it knew of memory alone."""
    node = nodes.node(own_slots=2, replicas=0, storage_root=nodes.root / "storage", keep_last=9)
    world, digests = trained(nodes, [node], JOB, "plain", "durable")
    amid(monkeypatch, lambda: go_on(world, "durable"))
    opened: list[str | None] = []

    def first_in_memory(job: str, step: int | None, source: str | None = None, **how: Any) -> Reading:
        opened.append(source)
        return live_open(job, step, source or "memory", **how)

    live_open = live.open_job
    monkeypatch.setattr(live, "open_job", first_in_memory)
    report = exported(node, tmp_path / "live.pt")
    found = torch_file(tmp_path / "live.pt")
    assert found["step"] == 3 and digest_of(found, "optimizer") == digests[0]
    assert opened == [None, "durable"] and "the rest is of its copy on storage" in report.notes[0]
