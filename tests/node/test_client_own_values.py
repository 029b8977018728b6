"""What turns out to be each rank's own is told while the job runs, once, with the rule that another world would need (D7, D18)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ckptd_client import Client, numbered, own, padded
from torch import nn

from ckptd.wire import rank as wire
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until

MEAN, VARIANCE = "model.1.running_mean", "model.1.running_var"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@contextmanager
def connected(daemon: RankDaemonDouble, **registered: Any) -> Iterator[Client]:
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=net(), **registered)
        client.restore()
        yield client


def told(client: Client, daemon: RankDaemonDouble, *keys: str, **facts: Any) -> list[str]:
    """What the rank's health says of it then: when it answers, it has heard this."""
    daemon._tell(wire.Health(0, True, [], {wire.OWN_VALUES: list(keys), **facts}))
    found: list[str] = client.health().facts["own"]
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_they_are_told_once_with_the_rule(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    with connected(daemon) as client:
        assert client.health().facts["own"] == []
        assert told(client, daemon, MEAN, VARIANCE) == [MEAN, VARIANCE]
        assert told(client, daemon, MEAN, "model.0.bias") == [MEAN, VARIANCE, "model.0.bias"]
        assert client.health().ok, "nothing is unprotected for that"
    (text,) = warnings(caplog)
    assert f"job job: 2 tensors differ between ranks: {MEAN}, {VARIANCE}. " in text
    assert f'register(rules={{"{MEAN}": own("mean")}})' in text


def test_a_mean_of_whole_numbers_is_neither_advised_nor_taken_for_a_rule(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    batches = "model.1.num_batches_tracked"
    with connected(daemon, rules={"model.1.*": own("mean")}) as client:
        assert told(client, daemon, MEAN) == []
        assert told(client, daemon, batches) == [batches]
    with connected(daemon) as client:
        told(client, daemon, batches, MEAN)
    first, second = warnings(caplog)
    assert f'{{"{batches}": own("first")}}' in first and f'{{"{MEAN}": own("mean")}}' in second


def test_many_are_counted_five_named_and_one_pattern_fits_those_of_a_kind(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"model.{layer}.{what}" for layer in range(40) for what in ("running_mean", "running_var")]
    with connected(daemon) as client:
        assert told(client, daemon, *keys) == keys
    (text,) = warnings(caplog)
    assert "80 tensors differ" in text and "model.2.running_mean and 75 more" in text and "model.2.running_var" not in text
    assert 'register(rules={"*.running_mean": own("mean")})' in text


@pytest.mark.parametrize(
    ("registered", "left"),
    [
        ({"rules": {"*.running_*": own("mean")}}, []),
        ({"rules": {"*.running_mean": own("max"), "*.running_var": padded(0, 4)}}, [VARIANCE]),
        ({"rules": {MEAN: own("first")}}, [VARIANCE]),
        ({"key_map": {"model": "net"}, "rules": {"net.1.running_mean": own("same")}}, ["net.1.running_var"]),
        ({"key_map": numbered("model.{}", 4), "rules": {"model.5.running_*": own("same")}}, []),
    ],
)
def test_what_a_rule_covers_is_not_told(
    daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture, registered: dict[str, Any], left: list[str]
) -> None:
    with connected(daemon, **registered) as client:
        owner = client._registry.owners["model"]
        assert told(client, daemon, owner.rename(MEAN), owner.rename(VARIANCE)) == left
    assert len(warnings(caplog)) == len(left)


def test_a_rule_is_for_what_was_registered_with_it(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """As a restore takes it; one that comes later takes its keys out of health."""
    other = net()
    with connected(daemon, rules={"*.running_*": own("mean")}) as client:
        client.register(other=other)
        assert told(client, daemon, MEAN, "other.1.running_mean") == ["other.1.running_mean"]
        client.register(other=other, rules={"other.1.*": own("mean")})
        assert client.health().facts["own"] == []
    assert len(warnings(caplog)) == 1


def test_what_lies_in_an_object_takes_no_rule(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """A loader's generator: its object divides it by a method, or is refused by name."""
    with connected(daemon) as client:
        assert told(client, daemon, "loader#0") == []
    assert warnings(caplog) == []


def test_other_news_say_nothing_of_it(daemon: RankDaemonDouble, caplog: pytest.LogCaptureFixture) -> None:
    """Also an older daemon's."""
    with connected(daemon) as client:
        daemon._tell(wire.Health(0, True, [], {"waits": "busy: with earlier snapshots"}))
        until(lambda: client._session.waits, what="it is heard")
        assert client.health().facts["own"] == []
    assert warnings(caplog) == []
