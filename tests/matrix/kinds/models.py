"""Models that the kinds spread over ranks, and the one batch of each step that all of them share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

WORDS, LENGTH, BATCH = 37, 8, 12  # a vocabulary that nothing divides; a batch that 1, 2, 3, 4 and 6 ranks share evenly
LAYERS = 6
WIDTH, EXPERTS, HIDDEN = 10, 12, 14


def tokens(step: int) -> Tensor:
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama(seed: int) -> nn.Module:
    """Grouped heads, which 1, 2, 3, 4 and 6 ranks share; a layer of 50 rows, which 3, 4 and 6 do not."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=48, intermediate_size=50, num_hidden_layers=LAYERS, num_attention_heads=24,
        num_key_value_heads=12, head_dim=2, max_position_embeddings=32, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=20, n_layer=2, n_head=4, n_positions=16, use_cache=False, **off))


def mixture(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=18, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=32, use_cache=False, attn_implementation="eager",
        experts_implementation="eager",
    )  # fmt: skip
    return MixtralForCausalLM(config)


class LowRank(nn.Module):
    """LoRA: a frozen layer and what is learnt beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + (x @ self.a.T) @ self.b.T
        return found


def adapted(seed: int) -> nn.Module:
    model: Any = llama(seed).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A layer of experts, of which each rank of ``group`` has some: tokens go to whom they are meant for and come back."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.count, self.at = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        mine = EXPERTS // self.count
        whole = torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH, torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN
        self.up, self.down = (nn.Parameter(one[self.at * mine : (self.at + 1) * mine].clone()) for one in whole)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, WIDTH] to the same."""
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent, to = x[order], chosen[order]
        counts = to.bincount(minlength=EXPERTS).view(self.count, -1)
        arrived, there = self._exchange(sent, counts)
        made = self._each(arrived, there)
        back = self._return(made, counts, there)
        found = torch.zeros_like(x).index_copy(0, order, back)
        return x + found * weight.unsqueeze(-1)

    def _exchange(self, sent: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """(what came, [from rank, expert of mine] how many)."""
        if self.count == 1:
            return sent, counts
        from torch.distributed.nn.functional import all_to_all_single

        there = torch.empty_like(counts)
        dist.all_to_all_single(there, counts.contiguous(), group=self.group)
        out, into = counts.sum(1).tolist(), there.sum(1).tolist()
        empty = sent.new_empty(sum(into), WIDTH)
        return all_to_all_single(empty, sent.contiguous(), into, out, group=self.group), there

    def _return(self, made: Tensor, counts: Tensor, there: Tensor) -> Tensor:
        if self.count == 1:
            return made
        from torch.distributed.nn.functional import all_to_all_single

        out, into = there.sum(1).tolist(), counts.sum(1).tolist()
        empty = made.new_empty(sum(into), WIDTH)
        return all_to_all_single(empty, made.contiguous(), into, out, group=self.group)  # type: ignore[no-any-return]

    def _each(self, arrived: Tensor, there: Tensor) -> Tensor:
        """By whom it came from, and of each by expert: so it lies, and so it goes back."""
        which = torch.arange(there.shape[1]).repeat(there.shape[0]).repeat_interleave(there.flatten())
        hidden = torch.relu(torch.einsum("tw,twh->th", arrived, self.up[which]))
        return torch.einsum("th,thw->tw", hidden, self.down[which])


class Sparse(nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.words, self.experts = nn.Embedding(WORDS, WIDTH), Experts(group)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        found: Tensor = self.head(self.experts(hidden.flatten(0, 1)).view_as(hidden))
        return found


def sparse(seed: int, group: Any = None) -> nn.Module:
    torch.manual_seed(seed)
    return Sparse(group)
