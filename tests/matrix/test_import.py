"""`ckptd import` of what DeepSpeed and transformers wrote, restored by a real client, beside what they read themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.demo.job import free_port
from tests.cluster.nodes import REPO
from tests.matrix.zero_files_worker import TAG, Net, two_groups
from tests.node.imports import JOB, STEP, restored

WORKER = Path(__file__).parent / "zero_files_worker.py"
TIMEOUT_S = 480.0


def environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
    return kept | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{REPO}:{REPO / 'client'}"}


def ran(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], env=environ(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def imported(source: Path, kind: str, root: Path, *more: object) -> dict[str, Any]:
    flags = ("--job", JOB, "--step", STEP, "--storage-root", root, "--json", *more)
    report: dict[str, Any] = json.loads(ran("ckptd", "import", source, "--from", kind, *flags))
    return report


@pytest.fixture(scope="module", params=[(1, "half"), (2, "whole"), (3, "whole")], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By three ranks; converted by DeepSpeed's own converter beside it."""
    stage, how = request.param
    folder = tmp_path_factory.mktemp(f"zero{stage}{how}")
    launch = ("torch.distributed.run", "--nproc-per-node=3", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    ran(*launch, WORKER, stage, how, folder / "zero")
    flags = ("--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state")
    places = ("--input_folder", folder / "zero" / TAG, "--output_folder", folder / "universal")
    ran("deepspeed.checkpoint.ds_to_universal", *places, *flags)
    return folder


@pytest.mark.parametrize("kind", ["zero", "universal"])
def test_what_deepspeed_wrote(saved: Path, kind: str, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    report = imported(saved / kind, kind, tmp_path / "root")
    assert report["foreign"] == ["deepspeed.runtime.fp16.loss_scaler.LossScaler"] and report["meta"] == ["mine"]
    net = Net()
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.zero_()
    optimizer = two_groups(net)
    for group in optimizer.param_groups:
        group |= {"lr": 1.0, "weight_decay": 0.0}
    said = restored(tmp_path / "root", strict=False, model=net, optimizer=optimizer)  # frozen and buffers may be bfloat16 there
    assert said["meta"] == {"mine": [1, 2]}
    expected = get_fp32_state_dict_from_zero_checkpoint(str(saved / "zero"), TAG)
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert len(trained) == 4
    for name, parameter in trained.items():
        assert torch.equal(parameter, expected[name]), name
        state = optimizer.state[parameter]
        for part in ("exp_avg", "exp_avg_sq"):
            found = torch.load(saved / "universal" / "zero" / name / f"{part}.pt", weights_only=False)
            whole = found["param"] if isinstance(found, dict) else found
            assert torch.equal(state[part].flatten(), whole.flatten()) and state[part].any(), (name, part)
        assert state["step"].item() == 3
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.01, 0.01), (0.01, 0.5)]
    if "whole" in str(saved):  # what no step writes, which DeepSpeed itself does not put together in every stage
        first = Net().state_dict()
        assert all(torch.equal(value, first[name]) for name, value in net.state_dict().items() if name not in trained)


def test_a_torn_directory_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    folder.mkdir()
    for file in (saved / "zero" / TAG).iterdir():
        (folder / file.name).symlink_to(file)
    gone = next(file for file in folder.iterdir() if "rank_1" in file.name and "optim" in file.name)
    gone.unlink()
    flags = ("--from", "zero", "--job", JOB, "--storage-root", str(tmp_path))
    command = [sys.executable, "-m", "ckptd", "import", str(folder), *flags]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and "torn: the files of ranks [1] of 3" in done.stderr


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_wrote(tied: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    imported(tmp_path / "hub", "hf", tmp_path / "root", "--prefix-map", "=model.")
    torch.manual_seed(2)
    other = LlamaForCausalLM(config).to(torch.bfloat16)
    restored(tmp_path / "root", model=other)
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens).logits, other(tokens).logits)
