"""One comparison of saved state, for what ranks saved, what groups had and what modules took back (D11)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ckptd_client import optim
from ckptd_client.same import same

NAN = float("nan")

ALIKE: list[tuple[Any, Any]] = [
    (NAN, float("nan")), ({"lr": NAN}, {"lr": float("nan")}), (complex(NAN, 1), complex(NAN, 1)), (1, 1.0), (0.1, np.float64(0.1)),
    (np.float32(2), 2), (np.float32(NAN), NAN), ((0.9, 0.99), [0.9, 0.99]), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (None, None),
    (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])), ([torch.ones(2), NAN], [torch.ones(2), NAN]), ("x", "x"),
    (np.array([1.0, NAN]), np.array([1.0, NAN])), ({"m": [np.zeros(3)]}, {"m": [np.zeros(3)]}), ({1, 2}, {2, 1}),
    (torch.ones(3, 2).t(), torch.ones(2, 3)), (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)),
    (np.datetime64("NaT", "s"), np.datetime64("NaT", "s")),
]  # fmt: skip
DIFFERENT: list[tuple[Any, Any]] = [
    (NAN, 1.0), (1, 2.0), (1, True), (0, None), (torch.ones(2), torch.ones(2, dtype=torch.float64)), (torch.ones(1), 1.0),
    (torch.ones(2), torch.zeros(2)), ([torch.ones(2)], [torch.zeros(2)]), (np.zeros(2), np.zeros(3)), (np.zeros(2), [0.0, 0.0]),
    (np.zeros(2), 0.0), (np.zeros(2), np.zeros(2, np.float32)), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1), (b"x", "x"),
    (torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)), ({1}, [1]),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), ALIKE)
def test_the_same(a: Any, b: Any) -> None:
    assert same(a, b) and same(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_not_the_same(a: Any, b: Any) -> None:
    assert not same(a, b) and not same(b, a)


def test_hyperparameters_and_state_that_are_no_numbers_are_the_same_on_two_ranks() -> None:
    """They must not make "ranks saved different" of a merge into another world."""
    group = {"lr": NAN, "masks": [np.ones(2), torch.full((2,), NAN)], "betas": (0.9, 1)}
    other = {"lr": float("nan"), "masks": [np.ones(2), torch.full((2,), NAN)], "betas": (0.9, 1.0)}
    merged = optim.merge_groups([{"groups": [one], "of": {"model.w": 0}} for one in (group, other)])
    assert merged["of"] == {"model.w": 0}
    assert same(optim.merge_odd([{"model.w": group}, {"model.w": other}]), {"model.w": group})
