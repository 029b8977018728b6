"""`ckptd export --to hf`, judged by logits: from_pretrained() of what was exported computes what the model in training does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from ckptd.core.errors import CkptdError
from ckptd.export.export import Report, Request, export
from tests.node.trained import Train, trained

TOKENS = torch.arange(12).view(2, 6) * 5 % 31
SMALL: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=3)),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=8)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_embd=16, n_head=2, n_layer=2, n_positions=32, bos_token_id=0, eos_token_id=1)
    ),
    "tied llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)),
}


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    with trained() as found:
        yield found


def stepping(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()

    return optimizer, step


def config_of(model: Any, folder: Path) -> Path:
    """As a program's folder of the base model has it, beside a tokenizer's file."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def exported(source: Path, dest: Path, **how: Any) -> Report:
    return export(Request(str(source), str(dest), "hf", **how))


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_computes_the_same(train: Train, tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer, step = stepping(model)
    source = train(name.replace(" ", "-"), {"model": model, "optimizer": optimizer}, step)
    config = config_of(model, tmp_path / "base")
    report = exported(source, tmp_path / "out", hf_config=str(config), shard_size="8KiB")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert torch.equal(logits(again), logits(model))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.nbytes and len({*index["weight_map"].values()}) > 1
    model.save_pretrained(tmp_path / "saved")
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(index["weight_map"]), "the names that the library itself writes"
    assert {path.name for path in (tmp_path / "out").iterdir()} - {*index["weight_map"].values()} == {
        "config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"
    }  # fmt: skip

    exported(source, tmp_path / "half", hf_config=str(config), dtype="bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16, "its config says so"
    wanted = {key: value.bfloat16() for key, value in model.state_dict().items()}
    assert all(torch.equal(value, wanted[key]) for key, value in half.state_dict().items())


def test_a_model_inside_of_another(train: Train, tmp_path: Path) -> None:
    """Registered as net, in a module of its own: what is before the library's names is mapped; without, they are named."""
    torch.manual_seed(0)

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = MODELS["mixtral"]()
            self.head = nn.Linear(2, 2)

    task = Task()
    optimizer, step = stepping(task.backbone)
    source = train("inside", {"net": task, "optimizer": optimizer}, step)
    config = str(config_of(task.backbone, tmp_path / "base"))
    with pytest.raises(CkptdError, match=r"no MixtralForCausalLM: missing: .* and \d+ more; unexpected: backbone") as caught:
        exported(source, tmp_path / "out", hf_config=config)
    assert "--prefix-map" in caught.value.hint
    exported(source, tmp_path / "out", hf_config=config, prefix_map=("backbone=",), only=("net.backbone.*",))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(task.backbone))


def test_another_shape_and_another_class(train: Train, tmp_path: Path) -> None:
    model = MODELS["llama"]()
    optimizer, step = stepping(model)
    source = train("shapes", {"model": model, "optimizer": optimizer}, step)
    other = config_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "vocab_size": 32})), tmp_path / "other")
    with pytest.raises(CkptdError, match=r"of another shape: model.embed_tokens.weight \[31, 16\] for \[32, 16\]"):
        exported(source, tmp_path / "out", hf_config=str(other))
    tied = config_of(MODELS["tied llama"](), tmp_path / "tied")
    with pytest.raises(CkptdError, match=r"config ties lm_head.weight to model.embed_tokens.weight, and the checkpoint has two"):
        exported(source, tmp_path / "out", hf_config=str(tied))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysModel"]}))
    with pytest.raises(CkptdError, match=r"no model of transformers .*: NobodysModel"):
        exported(source, tmp_path / "out", hf_config=str(other))


def test_as_is(train: Train, tmp_path: Path) -> None:
    """By the user's word, without the library: one file, and what is tied once."""
    model = MODELS["gpt2"]()
    optimizer, step = stepping(model)
    source = train("as-is", {"model": model, "optimizer": optimizer}, step)
    report = exported(source, tmp_path / "out", as_is=True, hf_config=str(config_of(model, tmp_path / "base")))
    assert report.notes == ["tied, and left out: lm_head.weight"]
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:flex_attention called without")
def test_torchtitan_permutes_its_queries_and_keys(train: Train, tmp_path: Path) -> None:
    """Renaming alone would load, and compute something else. Its model fuses query, key and value in memory, too."""
    pytest.importorskip("triton", reason="torchtitan's models import it")
    from torchtitan.models.llama3 import model_registry

    torch.manual_seed(0)
    spec = model_registry("debugmodel")
    model = spec.model.build()
    model.init_states()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()

    source = train("titan", {"model": model, "optimizer": optimizer}, step)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=16, rms_norm_eps=1e-5,
        intermediate_size=model.layers["0"].feed_forward.w1.weight.shape[0], architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling}, max_position_embeddings=131072,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "base")
    exported(source, tmp_path / "out", hf_config=str(tmp_path / "base"), titan="llama3/debugmodel")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        wanted = model(TOKENS, positions=positions, attention_masks=model.get_attention_masks(positions=positions))
    torch.testing.assert_close(logits(again), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(CkptdError, match="torchtitan has no llama3/9B"):
        exported(source, tmp_path / "no", titan="llama3/9B")
    with pytest.raises(CkptdError, match="torchtitan has no llama9/8B"):
        exported(source, tmp_path / "no", titan="llama9/8B")
