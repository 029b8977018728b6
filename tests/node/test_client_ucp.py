"""What DeepSpeed says of parallel parameters, as rules: each kind of pattern against a tensor that was cut by hand (D18)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, copied, own, padded, shard, ucp_rules
from ckptd_client.placing import Axes
from ckptd_client.rules import Axis
from torch import Tensor, nn

from tests.node.test_client_rules import wrong

RANKS = 2


@pytest.fixture(autouse=True)
def _ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axes, "_find", lambda self, key, over: Axis(tuple(range(RANKS)), 0))


def model_of(local: Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(local)
    return model


def cut_in(parts: Sequence[Tensor], dim: int, widths: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """What each rank has of parts that are cut each by itself."""
    rows = widths or [[part.shape[dim] // RANKS] * RANKS for part in parts]
    pieces = [part.split(list(row), dim) for part, row in zip(parts, rows, strict=True)]
    return [torch.cat([piece[rank] for piece in pieces], dim) for rank in range(RANKS)]


W = torch.arange(12 * 6.0).view(12, 6)
FUSED = {"patterns": [r"wei.*"], "partition_dim": 0}
CASES: dict[str, tuple[dict[str, Any], Tensor, list[Tensor]]] = {
    "no pattern": ({}, W, cut_in([W], 0)),
    "rows": ({"parameter_with_row_parallelism_patterns": ["other", r"w\w+$"]}, W, cut_in([W], 1)),
    "two halves": ({"parameter_with_2_sub_params_cat_dim_0": ["weight"]}, W, cut_in(W.chunk(2), 0)),
    "three, counted": ({"parameter_with_sub_params": [{**FUSED, "shape": (3, -1)}]}, W, cut_in(W.chunk(3), 0)),
    "three, sizes": ({"parameter_with_sub_params": [{**FUSED, "shape": ((8, 2, 2), 6)}]}, W, cut_in(W.split((8, 2, 2)), 0)),
    "three, widths": (
        {"parameter_with_sub_params": [{**FUSED, "shape": ((7, 3, 2), 6)}], "universal_checkpoint_version": 0.4,
         "sub_param_shard_widths": {r"wei.*": [[4, 3], [3, 0], [1, 1]]}},
        W, cut_in(W.split((7, 3, 2)), 0, [[4, 3], [3, 0], [1, 1]]),
    ),
    "a vocabulary": (
        {"vocabulary_parameter_patterns": ["weight"], "original_vocab_size": 9},
        W[:9], cut_in([torch.cat([W[:9], torch.full((3, 6), -1.0)])], 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_cut_parameter_lies_where_its_rule_says(case: str) -> None:
    info, whole, locals_ = CASES[case]
    for rank, local in enumerate(locals_):
        rule = ucp_rules(info, model_of(local), tensor="tp")["model.weight"]
        assert wrong(whole, rule, local, tp=(RANKS, rank)) == []


def test_what_is_not_cut() -> None:
    def rule(info: dict[str, Any], **over: Any) -> Any:
        return ucp_rules(info, model_of(W), **over).get("model.weight")

    assert rule({"tp_replicated_parameter_patterns": ["weight"]}, tensor="tp") == [copied("tp")]
    assert rule({"parameter_to_average_patterns": ["weight"]}, tensor="tp") == own("mean")
    tied = {"pipeline_replicated_parameter_patterns": ["weight"], "vocabulary_parameter_patterns": ["weight"]}
    assert rule({**tied, "original_vocab_size": 9}, tensor="tp", pipeline="pp") == [shard(0, over="tp"), padded(0, 9), copied("pp")]
    assert rule({"expert_parameter_patterns": ["weight"]}, tensor="tp", expert="ep") == [shard(0, over="ep")]
    assert rule({}) is None


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"affine_map": {"version": 1, "params": {"weight": {}}}}, "an affine map"),
        ({"autotp_unsupported_parameter_patterns": ["weight"]}, "not supported by AutoTP"),
        ({"expert_parameter_patterns": ["weight"]}, "expert="),
        ({"parameter_with_sub_params": [{**FUSED, "shape": ((7, 3, 2), 6)}]}, r"parts of \[7, 3, 2\] over 2 ranks"),
    ],
)
def test_what_has_no_rule_is_named(info: dict[str, Any], says: str) -> None:
    with pytest.raises(CkptdError, match=says) as caught:
        ucp_rules(info, model_of(W), tensor="tp")
    assert "model.weight" in str(caught.value)
