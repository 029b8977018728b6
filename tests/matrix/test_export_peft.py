"""`ckptd export --to hf` of a model with an adapter: the adapter's files, as peft loads them onto the base model."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open

from ckptd.core.errors import CkptdError
from ckptd.export.peft_names import adapter_of
from ckptd.export.stored import Stored
from tests.matrix.test_export_hf import MODELS, config_of, exported, logits, stepping
from tests.node.trained import Train, trained

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # peft's, of itself

KINDS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
    "dora-and-head": lambda: peft.LoraConfig(r=2, target_modules=["k_proj"], use_dora=True, modules_to_save=["lm_head"]),
    "embeddings": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "up_proj"], init_lora_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    with trained() as found:
        yield found


def adapted(kind: str, adapter: str = "default") -> tuple[Any, Any]:
    """The base model as it was, and the one that is trained."""
    torch.manual_seed(0)
    base = MODELS["llama"]()
    return base, peft.get_peft_model(copy.deepcopy(base), KINDS[kind](), adapter_name=adapter)


def folder_of(base: Any, model: Any, folder: Path) -> Path:
    """The adapter's config beside the base model's."""
    config_of(base, folder)
    for config in model.peft_config.values():
        config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapter", ["default", "mine"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_base_model_it_computes_the_same(train: Train, tmp_path: Path, kind: str, adapter: str) -> None:
    base, model = adapted(kind, adapter)
    optimizer, step = stepping(model)
    source = train(f"{kind}-{adapter}", {"model": model, "optimizer": optimizer}, step)
    report = exported(source, tmp_path / "out", hf_config=str(folder_of(base, model, tmp_path / "base")))
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    model.save_pretrained(tmp_path / "saved")
    theirs = tmp_path / "saved" / ("" if adapter == "default" else adapter)
    with safe_open(theirs / "adapter_model.safetensors", "pt") as saved, safe_open(
        tmp_path / "out" / "adapter_model.safetensors", "pt"
    ) as ours:
        assert set(saved.keys()) == set(ours.keys()), "the names that the library itself writes"
        assert all(torch.equal(saved.get_tensor(name), ours.get_tensor(name)) for name in ours.keys())  # noqa: SIM118
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "tokenizer_config.json"
    }  # fmt: skip
    assert any("of the base model are left out" in note for note in report.notes)


def test_a_module_that_is_called_like_it_is_no_adapter() -> None:
    state = ["model.default_head.weight", "model.q.lora_A.default.weight", "model.q.lora_E.default"]
    named = {name.replace(".default", ".mine"): Stored for name in state[1:]} | {"model.other_head.weight": Stored}
    assert adapter_of(state, named) == "mine"  # type: ignore[arg-type]
    assert adapter_of(state, dict.fromkeys(state, Stored)) == "default"  # type: ignore[arg-type]


def test_another_rank_or_no_adapter_at_all_is_refused(train: Train, tmp_path: Path) -> None:
    base, model = adapted("lora")
    optimizer, step = stepping(model)
    source = train("refused", {"model": model, "optimizer": optimizer}, step)
    folder = folder_of(base, model, tmp_path / "base")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    with pytest.raises(CkptdError, match=r"no such adapter: of another shape: .*lora_A.*\[4, 16\] for \[8, 16\]"):
        exported(source, tmp_path / "out", hf_config=str(folder))
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["o_proj"]}))
    with pytest.raises(CkptdError, match=r"no such adapter: missing: .*o_proj"):
        exported(source, tmp_path / "out", hf_config=str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CkptdError, match="an adapter is one file"):
        exported(source, tmp_path / "out", hf_config=str(folder), shard_size="1KiB")
    (folder / "config.json").unlink()
    with pytest.raises(CkptdError, match="nothing says what the base model is") as caught:
        exported(source, tmp_path / "out", hf_config=str(folder))
    assert "config.json beside adapter_config.json" in caught.value.hint


def test_of_two_adapters_one_is_picked(train: Train, tmp_path: Path) -> None:
    base, model = adapted("lora", "first")
    model.add_adapter("second", KINDS["lora"]())
    optimizer, step = stepping(model)
    source = train("two", {"model": model, "optimizer": optimizer}, step)
    folder = str(folder_of(base, model, tmp_path / "base"))
    with pytest.raises(CkptdError, match="several adapters: first, second") as caught:
        exported(source, tmp_path / "out", hf_config=folder)
    assert "--only '*.first.*'" in caught.value.hint
    exported(source, tmp_path / "out", hf_config=folder, only=("*.first.*",))
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    assert torch.equal(logits(again), logits(model)), "the active one is the first"
