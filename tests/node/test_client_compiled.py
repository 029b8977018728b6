"""A compiled step is not traced into ckptd's hooks."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.node.client_training import Training, restored
from tests.node.rank_daemon_double import RankDaemonDouble


@pytest.mark.chaos
def test_a_compiled_optimizer_step_is_compiled_alone(daemon: RankDaemonDouble) -> None:
    training = Training()
    step = torch.compile(lambda: training.optimizer.step(), backend="eager")
    with warnings.catch_warnings(record=True) as said, restored(daemon, training) as client:
        warnings.simplefilter("always")
        for number in range(1, 6):
            training.model(torch.randn(4, training.width)).square().mean().backward()
            step()
            assert client.snapshot(number, must=True).wait("sealed", 30) == "durable"
    assert not [text for text in said if "trace the builtin" in str(text.message)]
