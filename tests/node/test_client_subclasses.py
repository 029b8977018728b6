"""P15 for tensor subclasses: taken apart, put together again, or refused at register in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ckptd_client import CkptdError, Client
from torch import Tensor, nn
from torch.optim import AdamW

from tests.node.client_training import begun, load, net, save
from tests.node.optimizer_zoo import train
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.node.tensor_zoo import Adam8, Moment, Opaque, Quantised, Shape, Unwritable, quantise


def outcome(do: Callable[[], object]) -> str:
    """What it was refused with; "" when it was not."""
    try:
        do()
    except (CkptdError, TypeError) as error:
        return str(error)
    return ""


def test_a_quantised_weight_comes_back_beside_an_adapter(daemon: RankDaemonDouble) -> None:
    model = quantise(net())
    optimizer = AdamW(model[2].parameters(), lr=1e-2)
    train(model, [optimizer], 2)
    assert not outcome(lambda: save(daemon, model=model, optimizer=optimizer)), "a quantised weight"
    keys = {fragment.key for fragment in daemon.held[1, 1][0].layout.fragments}
    assert {"model.0.weight.codes", "model.0.weight.scale"} <= keys
    expected = train(model, [optimizer], 3)
    fresh = net()
    with torch.no_grad():
        fresh[0].weight.mul_(3)
    quantise(fresh)
    other = AdamW(fresh[2].parameters(), lr=1e-2)
    load(daemon, model=fresh, optimizer=other)
    assert isinstance(fresh[0].weight, Quantised)
    assert torch.equal(fresh[0].weight.codes, model[0].weight.codes)
    assert train(fresh, [other], 3) == expected


def test_moments_of_eight_bits_are_born_again_at_a_restore(daemon: RankDaemonDouble) -> None:
    model = net()
    optimizer = Adam8(model.parameters())
    train(model, [optimizer], 3)
    assert not outcome(lambda: save(daemon, model=model, optimizer=optimizer)), "8-bit moments"
    expected = train(model, [optimizer], 3)
    fresh = net()
    other = Adam8(fresh.parameters())
    load(daemon, model=fresh, optimizer=other)
    moments = [other.state[parameter]["exp_avg_sq"] for parameter in fresh.parameters()]
    assert all(isinstance(moment, Moment) and not moment.signed for moment in moments)
    assert train(fresh, [other], 3) == expected
    load(daemon, model=fresh, optimizer=other)  # and into moments that are there
    train(fresh, [other], 3)
    assert torch.equal(fresh[0].weight, model[0].weight)


def weighing(signed: bool) -> nn.Module:
    module = nn.Module()
    codes = torch.full((50, 50), 3, dtype=torch.uint8)
    module.weight = nn.Parameter(Moment(codes, torch.ones(()), signed), requires_grad=False)
    return module


def test_what_is_no_tensor_comes_back_too(daemon: RankDaemonDouble) -> None:
    assert not outcome(lambda: save(daemon, model=weighing(signed=True)))
    fresh = weighing(signed=False)
    parameter = fresh.weight
    load(daemon, model=fresh)
    assert fresh.weight is parameter
    assert parameter.signed
    assert torch.equal(parameter.whole(), torch.full((50, 50), 3.0) / 127)


def test_what_cannot_be_put_together_from_the_parts_is_refused_by_name(daemon: RankDaemonDouble) -> None:
    """The class of its context is the program's own; only a live one of the same form can take the parts."""
    assert not outcome(lambda: save(daemon, model=quantise(net())))
    why = outcome(lambda: load(daemon, model=quantise(net(), offset=0.5)))
    assert "model.0.weight was saved as another kind of Quantised" in why, why


def hidden() -> type[Moment]:
    """A class that nobody can find by its name."""

    class Hidden(Moment):
        pass

    return Hidden


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hidden()(torch.zeros(4, dtype=torch.uint8), torch.ones(()), True), "<locals>.Hidden"),
        (lambda: Quantised.of(torch.ones(10)), "a Quantised cannot be put together"),
    ],
)
def test_optimizer_state_that_no_restore_could_make_again_fails_the_snapshot(
    daemon: RankDaemonDouble, make: Callable[[], Tensor], words: str
) -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with begun(daemon, model=model, optimizer=optimizer) as client:
        train(model, [optimizer], 1)
        optimizer.state[model[0].weight]["codes"] = make()
        status = client.snapshot(1, must=True).wait("sealed", 30)
        assert words in status, status
        assert "[optimizer.model.0.weight.codes]" in client.health().problems[0]


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (lambda: Opaque(torch.zeros(30, 20), torch.ones(())), "a Opaque cannot be saved"),
        (
            lambda: Unwritable(torch.zeros(30, 20, dtype=torch.int8), torch.ones(60), Shape(30, 10), 0.0),
            "its object cannot be written down",
        ),
        (lambda: torch.eye(30).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_at_register(
    daemon: RankDaemonDouble, weight: Callable[[], Tensor], words: str
) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(weight(), requires_grad=False)
    with Client.connect("job", socket=daemon.path) as client:
        why = outcome(lambda: client.register(model=model))
        assert words in why, why
        assert "model.weight" in why
        assert "exclude=" in why
        client.register(model=model, exclude="model.weight")


class Waves(nn.Module):
    """Complex numbers, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("z", torch.randn(3, 3, dtype=torch.complex64))
        self.register_buffer("f", torch.eye(3))


CHANGES: dict[str, Callable[[Waves], Tensor]] = {
    "conj": lambda model: model.z.conj(),
    "neg": lambda model: model.z.conj().imag,
    "sparse": lambda model: model.f.to_sparse(),
    "csr": lambda model: model.f.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("inside", ["buffer", "dict"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_comes_to_show_other_values_than_its_memory_holds(daemon: RankDaemonDouble, change: str, inside: str) -> None:
    """In mid-run, of the same dtype, shape and memory: a conjugated one was durable with the sign that it had before (P1)."""
    model = Waves()
    state = {"z": model.z.clone(), "f": model.f.clone()}
    optimizer = AdamW(model.parameters())
    with begun(daemon, model=model, optimizer=optimizer, state=state) as client:
        model.weight.square().sum().backward()
        optimizer.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        name = "z" if change == "conj" else "f"
        if inside == "buffer":
            setattr(model, name, CHANGES[change](model))
        else:
            state[name] = CHANGES[change](model)
        optimizer.step()
        told = client.snapshot(2, must=True).wait("sealed", 30)
    key = f"model.{name}" if inside == "buffer" else f"state.{name}"
    assert told.startswith("failed: ") and f"[{key}]" in told and "RuntimeError" not in told
