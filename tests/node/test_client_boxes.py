"""register_boxes(): what an engine has cut by itself is saved box by box, and comes back into other boxes (D18)."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from ckptd_client import Blob, Box, CkptdError, Client

from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until


class Engine:
    """One logical weight [7, 5] and its moments, as pieces of a flat buffer, as ZeRO has them."""

    def __init__(self, pieces: list[tuple[int, int]], fill: bool = True) -> None:
        self.pieces = pieces
        self.flat = torch.arange(35.0) if fill else torch.full((35,), -1.0)
        self.moment = self.flat * 3 if fill else self.flat.clone()
        self.parts = [self.flat[a:b] for a, b in pieces]
        self.asked: list[bool] = []
        self.told: list[dict[str, Any]] = []
        self.text = b"config"

    def provide(self, loading: bool) -> Iterable[Box | Blob]:
        self.asked.append(loading)
        for (a, b), part in zip(self.pieces, self.parts, strict=True):
            yield Box("net.weight", part, (7, 5), (0, 0), sizes=(7, 5), flat=(a, b))
        yield Box("", self.moment.view(7, 5)[2:, 1:], (7, 5), (2, 1), of=("net.weight", "exp_avg"))
        yield Blob("common.pt", lambda: self.text)

    def registered(self, daemon: RankDaemonDouble) -> Client:
        client = Client.connect("job", socket=daemon.path)
        client.register_boxes("engine", self.provide, self.told.append)
        return client


def durable(client: Client, step: int) -> None:
    handle = client.snapshot(step, must=True)
    assert handle.wait("durable", 30) == "durable", handle.status


def test_boxes_come_back_into_other_boxes(daemon: RankDaemonDouble) -> None:
    saved = Engine([(0, 13), (13, 35)])
    with saved.registered(daemon) as client:
        assert client.restore() is None
        durable(client, 1)
        saved.text = b"another length, and no new layout"
        saved.flat += 1
        durable(client, 2)
    assert saved.asked == [False, True, False], "once per layout"
    fresh = Engine([(3, 4), (4, 30)], fill=False)
    with fresh.registered(daemon) as client:
        assert client.restore() == 2
    assert torch.equal(fresh.flat[3:30], torch.arange(35.0)[3:30] + 1)
    assert (fresh.flat[:3] == -1).all() and (fresh.flat[30:] == -1).all()
    assert torch.equal(fresh.moment.view(7, 5)[2:, 1:], saved.moment.view(7, 5)[2:, 1:])
    assert (fresh.moment.view(7, 5)[:2] == -1).all()
    assert fresh.told == [{"common.pt": saved.text}]


def test_what_register_saved_comes_back_into_boxes(daemon: RankDaemonDouble) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 300)
    optimizer = torch.optim.Adam(model.parameters())
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, optimizer=optimizer)
        client.restore()
        model(torch.ones(40)).sum().backward()
        optimizer.step()
        durable(client, 1)
    half, moment = torch.zeros(150, 40), torch.zeros(7000)

    def provide(loading: bool) -> Iterable[Box]:
        yield Box("model.weight", half, (300, 40), (150, 0))
        yield Box("", moment, (300, 40), (0, 0), sizes=(300, 40), flat=(100, 7100), of=("model.weight", "exp_avg"))

    with Client.connect("job", socket=daemon.path) as client:
        client.register_boxes("engine", provide)
        assert client.restore(strict=False) == 1
    assert torch.equal(half, model.weight.detach()[150:])
    assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"].flatten()[100:7100])


def test_the_provider_is_asked_again_when_a_tensor_lies_elsewhere(daemon: RankDaemonDouble) -> None:
    engine = Engine([(0, 35)])
    with engine.registered(daemon) as client:
        client.restore()
        durable(client, 1)
        before = len(engine.asked)
        engine.parts[0].data = torch.arange(35.0) * 2
        durable(client, 2)
        assert len(engine.asked) == before + 1
    fresh = Engine([(0, 35)], fill=False)
    with fresh.registered(daemon) as client:
        assert client.restore() == 2
    assert torch.equal(fresh.flat, torch.arange(35.0) * 2)


def test_only_what_a_seen_optimizer_steps_is_copied_behind(daemon: RankDaemonDouble) -> None:
    """A large box that nobody steps may be written right after snapshot() returns."""
    stepped, other = torch.nn.Parameter(torch.zeros(400, 300)), torch.zeros(400, 300)
    optimizer = torch.optim.SGD([stepped], lr=1.0)

    def provide(loading: bool) -> Iterable[Box]:
        yield Box("stepped", stepped.detach()[:, :150], (400, 300), (0, 0))
        yield Box("other", other, (400, 300), (0, 0))

    with Client.connect("job", socket=daemon.path) as client:
        client.register_boxes("engine", provide)
        client.restore()
        for step in (1, 2):
            stepped.grad = torch.ones(400, 300)
            optimizer.step()
            other += 1
            handle = client.snapshot(step, must=True)
            other.data.fill_(99.0)  # past every counter
            until(lambda: handle.status == "durable", what=handle.status)  # noqa: B023
            other.data.fill_(step)
        modes = {source.key: source.mode.name for source in client._snapshots._plan.sources}  # type: ignore[union-attr]
        assert modes == {"stepped": "FENCED", "other": "SYNC"}
    stepped.data.fill_(7.0)
    with Client.connect("job", socket=daemon.path) as client:
        client.register_boxes("engine", provide)
        assert client.restore() == 2
    assert (stepped[:, :150] == -2).all() and (stepped[:, 150:] == 7).all() and (other == 2).all()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: [Box("w", torch.zeros(3), (4,), (2,))], "leaves the shape"),
        (lambda: [Box("w", torch.zeros(3), (4, 4), (0,))], "are none of a tensor of shape"),
        (lambda: [Box("w", torch.zeros(3), (4,), (0,), sizes=(2,))], "for a box of sizes"),
        (lambda: [Box("w", torch.zeros(3), (4,), (0,), sizes=(4,), flat=(0, 2))], "for the range"),
        (lambda: [Box("w", torch.zeros(3), (4,), (0,)), Box("w", torch.zeros(2), (4,), (2,))], "overlap"),
        (lambda: [Box("w", torch.zeros(2), (4,), (0,)), Box("w", torch.zeros(2), (5,), (2,))], "different kinds"),
        (lambda: [Box("", torch.zeros(2), (2,), (0,))], "without a key"),
        (lambda: [Box("w", torch.zeros(2), (2,), (0,), role="weight")], "role 'weight'"),
        (lambda: [Box("w", torch.zeros(2), (2,), (0,)), Blob("w", b"")], "two of one name"),
        (lambda: [3], "not a Box or a Blob"),
    ],
)
def test_a_box_that_cannot_be_one_is_refused(daemon: RankDaemonDouble, what: Any, said: str) -> None:
    with Client.connect("job", socket=daemon.path) as client, pytest.raises(CkptdError, match=said):
        client.register_boxes("engine", lambda loading: what())


def test_a_restored_that_raises_leaves_dirty_objects(daemon: RankDaemonDouble) -> None:
    saved = Engine([(0, 35)])
    with saved.registered(daemon) as client:
        client.restore()
        durable(client, 1)

    def restored(blobs: dict[str, Any]) -> None:
        raise RuntimeError("no such layer")

    with Client.connect("job", socket=daemon.path) as client:
        client.register_boxes("engine", Engine([(0, 35)]).provide, restored)
        with pytest.raises(CkptdError, match=r"dirty.*no such layer"):
            client.restore()


def test_state_that_is_born_with_a_step_is_asked_for_then(daemon: RankDaemonDouble) -> None:
    """P15: a provider that has it only once it is there; and a Blob that says nothing where it is loaded."""
    weight = torch.nn.Parameter(torch.zeros(300, 20))
    optimizer = torch.optim.Adam([weight])

    def provide(loading: bool) -> Iterable[Box | Blob]:
        yield Box("w", weight, (300, 20), (0, 0))
        if "exp_avg" in optimizer.state[weight]:
            yield Box("", optimizer.state[weight]["exp_avg"], (300, 20), (0, 0), of=("w", "exp_avg"))
        yield Blob("note", None if loading else b"said")

    told: list[Any] = []
    with Client.connect("job", socket=daemon.path) as client:
        client.register_boxes("engine", provide, told.append)
        assert client.restore() is None
        durable(client, 1)
        weight.grad = torch.ones(300, 20)
        optimizer.step()
        durable(client, 2)
        expected = optimizer.state[weight]["exp_avg"].clone()
        optimizer.state[weight]["exp_avg"].zero_()
        assert client.restore() == 2
    assert torch.equal(optimizer.state[weight]["exp_avg"], expected)
    assert told == [{"note": b"said"}]


def test_an_optimizer_that_goes_makes_no_new_layout(daemon: RankDaemonDouble) -> None:
    """Of another model of the same process, say: a discriminator that is trained no more."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    other = torch.optim.SGD([weight])
    other.step()
    engine = Engine([(0, 35)])
    with engine.registered(daemon) as client:
        assert client.restore() is None
        durable(client, 1)
        del other
        gc.collect()
        durable(client, 2)
    assert engine.asked == [False, True, False]
