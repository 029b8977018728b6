"""A load plan in parts: what can be refused is refused before the first write, what fails after it says dirty (D11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, Client

from ckptd.wire import rank as wire
from tests.node.client_training import Tied, Training, assert_equal, load, net, save
from tests.node.rank_daemon_double import RankDaemonDouble


class Loader:
    """Its state holds a tensor, large enough to travel as one."""

    def __init__(self, at: int = 0) -> None:
        self.state = {"at": at, "order": torch.arange(float(at * 1000))}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("pieces", [1, 3])
def test_part_by_part_is_bit_exact(daemon: RankDaemonDouble, pieces: int) -> None:
    training = Training()
    training.step()
    save(daemon, model=training.model, optimizer=training.optimizer, loader=Loader(7))
    daemon.part_pieces = pieces
    other, loader = Training(seed=9), Loader()
    client = load(daemon, model=other.model, optimizer=other.optimizer, loader=loader)
    assert_equal(other.tensors(), training.tensors())
    assert loader.state["at"] == 7 and torch.equal(loader.state["order"], torch.arange(7000.0))
    assert client.last_restore["mode"] == "direct" and client.last_restore["step"] == 1
    answered = [message.part for message in daemon.messages(wire.LoadedPart)]
    assert answered == list(range(len(answered))) and len(answered) > 2
    assert [message.ok for message in daemon.messages(wire.Loaded)] == [True]


def test_one_part_is_verified_mode(daemon: RankDaemonDouble) -> None:
    save(daemon, model=net())
    assert load(daemon, model=net()).last_restore["mode"] == "verified"
    assert not daemon.messages(wire.LoadedPart)


def test_values_that_are_only_compared_come_before_the_first_write(daemon: RankDaemonDouble) -> None:
    """Two values for a tied tensor: refused, though each comes in a part of its own."""
    save(daemon, model=Tied(False), extra={"other": net()})
    again, other = Tied(True), net()
    with torch.no_grad():
        other[0].weight.zero_()  # type: ignore[index, union-attr]
    before, untouched = again.embed.weight.clone(), {k: v.clone() for k, v in other.state_dict().items()}
    daemon.part_pieces = 1
    with pytest.raises(CkptdError, match="tied here, but saved with different values") as caught:
        load(daemon, model=again, extra={"other": other})
    assert torch.equal(again.embed.weight, before)
    assert_equal(other.state_dict(), untouched)
    assert "dirty" not in str(caught.value)


def test_a_part_that_fails_after_the_first_write_says_dirty(daemon: RankDaemonDouble) -> None:
    """With the remedy; and the same client restores when it asks again."""
    model = net()
    save(daemon, model=model)
    other = net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    daemon.part_pieces, daemon.spoil_part = 1, 2
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=other)
        with pytest.raises(CkptdError, match="rank 0 are dirty") as caught:
            client.restore()
        assert "leaves its segment" in str(caught.value) and "restore() again" in caught.value.hint
        assert any(parameter.any() for parameter in other.parameters()), "it was written to"
        daemon.spoil_part = -1
        assert client.restore() == 1
    assert_equal(other.state_dict(), dict(model.state_dict()))


def test_the_first_part_may_fail_without_a_trace(daemon: RankDaemonDouble) -> None:
    """A tensor inside of an object is in it: that is memory of the client's own."""
    save(daemon, model=net(), loader=Loader(7))
    other, loader = net(), Loader()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    daemon.part_pieces, daemon.spoil_part = 1, 0
    with pytest.raises(CkptdError) as caught:
        load(daemon, model=other, loader=loader)
    assert "leaves its segment" in str(caught.value) and "dirty" not in str(caught.value)
    assert not any(parameter.any() for parameter in other.parameters()) and loader.state["at"] == 0
