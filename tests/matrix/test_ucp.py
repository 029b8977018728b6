"""The table of test_client_ucp.py means what DeepSpeed means by it: its own converter puts the same tensors together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import dump_param_fragment, merge_tp_slices

from tests.node.test_client_ucp import CASES


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_makes_the_same_of_it(case: str, tmp_path: Path) -> None:
    info, whole, locals_ = CASES[case]
    for rank, local in enumerate(locals_):
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            dump_param_fragment(str(tmp_path / "slices"), rank, 0, state, local.flatten(), "weight", 0, local.numel())
    (tmp_path / "whole" / "weight").mkdir(parents=True)
    shapes = [tuple(local.shape) for local in locals_]
    left = merge_tp_slices(info, str(tmp_path / "whole"), str(tmp_path / "slices"), len(locals_), ("weight", shapes))
    assert left <= {"other"}
    assert torch.equal(torch.load(tmp_path / "whole" / "weight" / "fp32.pt", weights_only=False)["param"], whole)
