"""DeepSpeed's words for what parallel layers did to their parameters, as rules: ``universal_checkpoint_info``, which AutoTP and
Megatron-DeepSpeed fill (its meaning: ``merge_tp_slices`` in DeepSpeed 0.19's checkpoint/ds_to_universal.py; Lian et al., 2024)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ckptd.core.errors import CkptdError
from ckptd_client.placing import Axes
from ckptd_client.rules import Cut, Rule, copied, own, padded, shard

WIDTHS_SINCE = 0.4  # the version of the info that says what each rank has of a fused parameter


def ucp_rules(
    info: Mapping[str, Any], model: nn.Module, *, tensor: Any = None, expert: Any = None, pipeline: Any = None, mesh: Any = None,
    name: str = "model",
) -> dict[str, Rule]:  # fmt: skip
    """For ``register(rules=)``: a rule for each parameter of ``model`` that is registered as ``name``.

    tensor, expert, pipeline: the ranks of that kind, as ``over`` in a rule (a dimension of ``mesh`` by name, a mesh of one
    dimension, a process group); None: there is no such parallelism. Parameters that no pattern fits are cut in dimension 0, as
    DeepSpeed takes them. Raises CkptdError naming what has no rule: an affine map, what AutoTP does not support, experts without
    ``expert``.
    """
    found: dict[str, Rule] = {}
    for key, parameter in model.named_parameters():
        rule = _Info(info, f"{name}.{key}", key, parameter, Axes(mesh)).rule(tensor, expert, pipeline)
        if rule:
            found[f"{name}.{key}"] = rule
    return found


class _Info:
    """What is said of one parameter, which DeepSpeed calls ``name``."""

    def __init__(self, info: Mapping[str, Any], key: str, name: str, parameter: Tensor, axes: Axes) -> None:
        self._info, self._key, self._name, self._parameter, self._axes = info, key, name, parameter, axes

    def rule(self, tensor: Any, expert: Any, pipeline: Any) -> Rule:
        for what, patterns in {
            "an affine map": self._info.get("affine_map", {}).get("params", ()),
            "not supported by AutoTP": self._info.get("autotp_unsupported_parameter_patterns", ()),
        }.items():
            if self._fits(patterns):
                raise CkptdError(f"{what}: there is no rule for it", where=self._key, hint="register_boxes() takes any layout")
        experts = self._said("expert_parameter_patterns")
        if experts and expert is None:
            raise CkptdError("it is of experts, its info says", where=self._key, hint="ucp_rules(..., expert=): the ranks of these")
        if self._said("parameter_to_average_patterns"):
            return own("mean")
        cuts: list[Cut] = [shard(0, over=expert)] if experts else []
        if tensor is not None and not experts:
            cuts += self._tensor_parallel(tensor)
        if self._said("vocabulary_parameter_patterns"):
            cuts.append(padded(0, int(self._info["original_vocab_size"])))
        if pipeline is not None and self._said("pipeline_replicated_parameter_patterns"):
            cuts.append(copied(pipeline))
        return cuts

    def _tensor_parallel(self, over: Any) -> list[Cut]:
        ranks = len(self._axes.of(self._key, over).ranks)
        if self._said("tp_replicated_parameter_patterns") or self._parameter.ndim == 0:
            return [copied(over)]
        if self._said("parameter_with_2_sub_params_cat_dim_0"):
            return [shard(0, over=over, parts=(self._parameter.shape[0] * ranks // 2,) * 2)]
        for fused in self._info.get("parameter_with_sub_params", ()):
            pattern = self._fits(fused["patterns"])
            if pattern:
                return [self._fused(fused["shape"], int(fused["partition_dim"]), pattern, over, ranks)]
        return [shard(1 if self._said("parameter_with_row_parallelism_patterns") else 0, over=over)]

    def _fused(self, shape: Sequence[Any], dim: int, pattern: str, over: Any, ranks: int) -> Cut:
        """Sizes of the parts are told or, in old infos, how many equal ones there are."""
        parts = shape[dim]
        if not isinstance(parts, Iterable):
            whole = self._parameter.shape[dim] * ranks
            parts = (whole // parts,) * parts
        widths = None
        if float(self._info.get("universal_checkpoint_version", 0)) >= WIDTHS_SINCE:
            widths = self._info["sub_param_shard_widths"][pattern]
        elif any(part % ranks for part in parts):
            raise CkptdError(f"parts of {list(parts)} over {ranks} ranks, and its info does not say how", where=self._key)
        return shard(dim, over=over, parts=parts, widths=widths)

    def _said(self, patterns: str) -> str:
        return self._fits(self._info.get(patterns, ()))

    def _fits(self, patterns: Iterable[str]) -> str:
        return next((pattern for pattern in patterns if re.match(pattern, self._name)), "")
