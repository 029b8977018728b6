"""`consolidate`: what stays for good lies beside its checkpoint as whole tensors, written by the daemons while training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cluster.nodes import Cluster, together
from tests.cluster.test_bad_storage import checkpoint
from tests.waiting import until

JOB = "store"
PATIENCE_S = 60.0


def test_what_stays_for_good_is_there_for_the_library_to_read(nodes: Cluster, tmp_path: Path) -> None:
    storage = nodes.root / "storage"
    made = nodes.several(2, storage_root=storage, replicas=1, keep_last=1, consolidate="true")
    world = nodes.world(made, JOB, kind="fsdp")
    assert together(world, "restore") == [None] * 2
    for keep in (True, False):
        together(world, "train", steps=1, snapshot=False)
        together(world, "snapshot", must=True, keep=keep)
        assert together(world, "wait", level="durable", timeout=PATIENCE_S) == ["durable"] * 2
    kept, last = checkpoint(storage, 1), checkpoint(storage, 2)
    until(lambda: (kept / "whole").exists(), PATIENCE_S, "the kept one to be whole")
    found = load_file(kept / "consolidated" / "model.safetensors")
    assert not (last / "consolidated").exists()
    rows = json.loads(made[0].cli("ls", storage, "--json").stdout)["rows"]
    assert [(row["step"], row["keep"], row["whole"]) for row in rows] == [(2, False, False), (1, True, True)]
    assert "consolidated" in made[1].cli("ls").stdout
    assert made[0].cli("verify", storage).returncode == 0
    out = made[0].cli("export", kept, tmp_path / "out.pt", "--to", "torch")
    assert out.returncode == 0, out.stderr
    exported = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert {f"model.{name}" for name in exported} == found.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, found[f"model.{name}"]) and tensor.dtype == found[f"model.{name}"].dtype
