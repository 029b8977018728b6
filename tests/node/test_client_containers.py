"""What lies in a registered dict or list is what lies there at each snapshot, not what lay there at ``register`` (P15)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ckptd_client import CkptdError, Client

from ckptd.daemon.ranks import LAYOUTS_PER_RANK_MAX
from tests.node.client_training import Training, connected, load, save
from tests.node.rank_daemon_double import RankDaemonDouble

STEPS = 3


def live() -> dict[str, Any]:
    """As a trainer keeps it: counters beside tensors, averages made by hand."""
    zeros = torch.zeros(2)
    return {"n": 0, "deep": {"k": 0}, "lst": [0], "ema": zeros, "in": zeros.clone(), "mixed": [zeros.clone(), 0]}


def advance(values: dict[str, Any]) -> None:
    values["n"] += 1
    values["deep"]["k"] += 1
    values["lst"][0] += 1
    values["ema"] = values["ema"] * 0.5 + 1
    values["in"] += 1
    values["mixed"][0] = values["mixed"][0] + 1
    values["mixed"][1] += 1


def trained(client: Client, training: Training, values: dict[str, Any], steps: int) -> list[str]:
    statuses = []
    for step in range(1, steps + 1):
        training.step()
        advance(values)
        statuses.append(client.snapshot(step, must=True).wait("sealed", 30))
    return statuses


@pytest.mark.parametrize("name", ["extra", "mine"])
def test_what_was_replaced_in_a_dict_or_list_comes_back(daemon: RankDaemonDouble, name: str) -> None:
    values, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(**{name: values})
        client.restore()
        assert trained(client, training, values, STEPS) == ["durable"] * STEPS
    again, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(**{name: again})
        assert client.restore() == STEPS
    assert (again["n"], again["deep"], again["lst"], again["mixed"][1]) == (STEPS, {"k": STEPS}, [STEPS], STEPS)
    assert torch.equal(again["ema"], values["ema"]), "an average made by hand is another tensor at each step"
    assert torch.equal(again["in"], values["in"])
    assert torch.equal(again["mixed"][0], values["mixed"][0])


def test_what_came_later_is_captured_and_put_there_again(daemon: RankDaemonDouble) -> None:
    values, training = live() | {"deep.er": {"t": torch.zeros(3)}}, Training(8)
    late: dict[str, Any] = {}
    plain: dict[str, Any] = {"n": 0}
    with connected(daemon, training) as client:
        client.register(extra=values, late=late, plain=plain)
        client.restore()
        values["tensor"], values[7], values["a.b"] = torch.ones(9_000), [1, {"x": (2,)}], "text"
        values["deep.er"]["more"] = torch.full((2,), 3.0)
        values["mixed"] += [torch.ones(5), "end", *range(10)]
        late["now"], late[0] = torch.ones(4), 5
        plain["n"], plain["t"] = 2, torch.ones(1)
        trained(client, training, values, 1)
    again, training = live() | {"deep.er": {"t": torch.zeros(3)}}, Training(8)
    late, plain = {}, {"n": 0}
    with connected(daemon, training) as client:
        client.register(extra=again, late=late, plain=plain)
        assert client.restore() == 1
        assert any(note.startswith("extra.tensor: ") for note in client.last_restore["notes"])
        training.step()
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
    assert torch.equal(again["tensor"], values["tensor"]) and again[7] == values[7] and again["a.b"] == "text"
    assert torch.equal(again["deep.er"]["more"], torch.full((2,), 3.0))
    assert torch.equal(again["mixed"][2], torch.ones(5)) and again["mixed"][3:] == ["end", *range(10)]
    assert torch.equal(late["now"], torch.ones(4)) and late[0] == 5 and len(late) == 2
    assert plain["n"] == 2 and torch.equal(plain["t"], torch.ones(1))


@pytest.mark.parametrize("how", [{}, {"only": ["late.*"]}])
def test_an_empty_dict_gets_what_was_in_it_when_it_was_saved(daemon: RankDaemonDouble, how: dict[str, Any]) -> None:
    save(daemon, late={"now": torch.ones(4), 0: 5})
    fresh: dict[Any, Any] = {}
    load(daemon, how, late=fresh)
    assert torch.equal(fresh["now"], torch.ones(4)) and fresh[0] == 5


def test_what_came_later_goes_where_the_process_goes_back(daemon: RankDaemonDouble) -> None:
    """The restore was refused, as the snapshot has none of it. What the program has from its beginning is never taken out."""
    values, training = {"t": torch.zeros(1), "list": [torch.zeros(1), 0]}, Training(8)
    with connected(daemon, training) as client:
        client.register(values=values)
        client.restore()
        assert trained(client, training, live(), 1) == ["durable"]
        values["late"], values["n"] = torch.ones(2), 5
        values["list"] += [1, torch.ones(1), 2]
        assert client.restore() == 1
        assert values.keys() == {"t", "list"} and len(values["list"]) == 2
        assert len(client.last_restore["notes"]) == 5
    with connected(daemon, training) as client:
        client.register(values=values)
        values["early"] = torch.ones(2)
        with pytest.raises(CkptdError, match=r"values\.early: not in the snapshot"):
            client.restore()


def test_what_a_program_has_in_a_variable_beside_its_dict_is_filled(daemon: RankDaemonDouble) -> None:
    """Another list lay in the dict afterwards: the program went on appending to its own, of which no snapshot heard any more."""
    shared = [0]
    save(daemon, progress={"n": 2, "deep": {"losses": [0.5, 0.25]}, "a": [1], "b": [2], "seen": np.arange(3)})
    losses: list[float] = []
    seen = np.zeros(3, np.int64)
    progress = {"n": 0, "deep": {"losses": losses}, "a": shared, "b": shared, "seen": seen}
    load(daemon, progress=progress)
    assert losses == [0.5, 0.25] and progress["deep"]["losses"] is losses  # type: ignore[index]
    assert seen.tolist() == [0, 1, 2]
    assert (progress["n"], progress["a"], progress["b"]) == (2, [1], [2]), "one list holds no two values"


def test_an_object_with_a_state_of_its_own_that_came_later_is_missed_by_name(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """A dict of what it saved would be no such object. strict=False goes on without it, and says so."""
    values, training = live(), Training(8)
    values["net"], values["scaler"] = torch.nn.Linear(3, 3), torch.amp.GradScaler("cpu")
    with connected(daemon, training) as client:
        client.register(extra=values)
        client.restore()
        trained(client, training, values, 1)
    again, training = live(), Training(8)
    with connected(daemon, training) as client:
        client.register(extra=again)
        with pytest.raises(CkptdError, match=r"extra\.net\.bias, extra\.net\.weight.*nobody registered it"):
            client.restore()
        assert client.restore(strict=False) == 1
        notes = client.last_restore["notes"]
    assert "scaler" not in again and again["n"] == 1
    assert all(any(name in note for note in notes) for name in ("extra.scaler", "extra.net.weight")), notes
    warned = " ".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "extra.scaler" in warned and "extra.net.weight" in warned, warned


@pytest.mark.parametrize(
    "value", [3, 0.5, "text", b"x", True, (1, 2), ([1], 2), frozenset({1}), np.float64(2.0), torch.Size((2,)), torch.float32]
)
def test_a_value_that_no_restore_could_give_back_is_refused_at_register(daemon: RankDaemonDouble, value: Any) -> None:
    with Client.connect("job", socket=daemon.path) as client:
        with pytest.raises(TypeError, match=r"epoch: no restore could give this .* register\(progress=\{\"epoch\": ...\}\)"):
            client.register(epoch=value)
        with pytest.raises(TypeError, match=r"pair\.1: no restore"):
            client.register(pair=(torch.zeros(2), value))
        client.register(extra={"epoch": value}, nothing=None, progress={"epoch": value}, held=[torch.zeros(1), value])


def test_a_structure_that_comes_back_after_many_others_is_told_to_the_daemon_again(daemon: RankDaemonDouble) -> None:
    """It remembers a few layouts of each rank; the rank took all that it had ever sent for known, and what came back was void."""
    training, values = Training(), {"carry": torch.zeros(1)}
    with connected(daemon, training) as client:
        client.register(values=values)
        client.restore()
        for step in range(2 * (LAYOUTS_PER_RANK_MAX + 2)):
            training.step()
            values["carry"] = torch.zeros(1 + step % (LAYOUTS_PER_RANK_MAX + 2))  # as long as the sequence of this batch
            assert client.snapshot(step, must=True).wait("sealed", 30) == "durable"


def test_a_layout_that_the_daemon_does_not_know_is_sent_again(daemon: RankDaemonDouble) -> None:
    """It had not taken it: there were too many at once. The snapshots that followed were void until training ended."""
    training = Training()
    with connected(daemon, training) as client:
        client.restore()
        assert trained(client, training, live(), 2) == ["durable"] * 2
        daemon._members()[0].layouts.clear()
        for step, status in ((3, "void: seal failed: layout unknown"), (4, "durable")):
            training.step()
            assert client.snapshot(step, must=True).wait("sealed", 30) == status


CHANGED: list[tuple[Any, Any]] = [
    ({"a": 1}, [1]), ([1], None), ({1}, {"a": 1}), (np.zeros(3), np.zeros(4)), (np.zeros(3), np.zeros(3, np.int32)),
    (None, {"a": 1}), ([1], torch.Generator()), (np.ones(3), np.broadcast_to(0.0, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "registered"), CHANGED)
def test_a_value_that_has_become_another_kind_is_refused_at_the_restore(
    daemon: RankDaemonDouble, saved: Any, registered: Any
) -> None:
    """Nothing is written, and nothing is dropped without a word."""
    weight = torch.zeros(3)
    save(daemon, mine=saved, weight=torch.ones(3))
    with pytest.raises(CkptdError, match=r"mine: a \w+ was saved, the registered \w+ cannot take it back"):
        load(daemon, mine=registered, weight=weight)
    assert not weight.any()
