"""What a training process reads: user state that a snapshot holds, and the daemon's catalogue."""

from __future__ import annotations

import collections
import datetime
import pathlib
from typing import Any

import numpy as np
import torch
from ckptd_client import tree
from ckptd_client.catalogue import Catalogue

from ckptd.core.errors import CkptdError
from tests.fuzz.target import Target
from tests.fuzz.targets_memory import _catalogues

STATE: list[Any] = [
    {"step": 3, "lr": [0.1, None, True], "betas": (0.9, 0.999), "name": "é", "raw": b"x"},
    {
        "set": {1, 2},
        "frozen": frozenset({"a"}),
        "count": collections.Counter("aab"),
        "od": collections.OrderedDict(a=1),
    },
    [
        pathlib.PurePosixPath("/a"),
        datetime.datetime(2026, 1, 2),
        torch.Size([2, 3]),
        torch.float32,
        1 << 70,
        1 + 2j,
    ],
    {"t": torch.arange(6).view(2, 3), "e": torch.empty(0, 3), "n": np.arange(4.0), "s": np.float32(1.5)},
    {"rng": torch.Generator().manual_seed(1)},
]


def _trees() -> list[bytes]:
    return [tree.encode(value, "state") for value in STATE]


def _catalogue(data: bytes) -> Any:
    return Catalogue.decode(data, 0)


TARGETS = [
    Target("state-tree", tree.decode, _trees, (ValueError,), "msgpack"),
    Target("client-catalogue", _catalogue, _catalogues, (CkptdError,), "msgpack"),
]
