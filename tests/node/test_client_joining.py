"""The first snapshot of a rank that has not joined: training goes on meanwhile, and must=True waits within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ckptd_client import rendezvous
from ckptd_client.entries import State
from ckptd_client.joining import Joiner
from ckptd_client.session import READY

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from tests.node.client_training import Training, connected, stepped
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until


def test_a_first_snapshot_without_restore_joins_in_the_background(daemon: RankDaemonDouble) -> None:
    training = Training()
    with connected(daemon, training) as client:
        assert client.snapshot(0).status == "skipped: joining"

        def captured() -> bool:
            training.step()
            return client.snapshot(client._session.called + 1 if client._session.called >= 0 else 1).taken

        until(captured, what="a snapshot after the background join")
        assert client.wait("durable", 30) == "durable"
    assert daemon.messages(wire.Join)[0].ask is None


def test_a_rank_that_has_joined_before_the_call_ends_was_joining(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "skipped: ready" (a machine under load)."""
    with connected(daemon, Training()) as client:
        begin = Joiner.in_background

        def at_once(joiner: Joiner, state: State) -> None:
            begin(joiner, state)
            until(lambda: client._session.phase == READY, what="a background join")

        monkeypatch.setattr(Joiner, "in_background", at_once)
        assert client.snapshot(0).status == "skipped: joining"


@pytest.mark.parametrize(
    ("rank", "absent", "said"), [(0, "ranks 1, 2", "ranks 1, 2"), (1, "rank 0", "rank 0, or whom it waits for")]
)
def test_who_is_waited_for_is_told_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, rank: int, absent: str, said: str
) -> None:
    """It said "joining" for a minute, and nothing else."""
    told: list[str] = []
    store = dist.PrefixStore("job", dist.HashStore())
    monkeypatch.setattr(rendezvous, "LATE_S", 0.0)
    monkeypatch.setattr(rendezvous, "rank_and_size", lambda: (rank, 3))
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    with pytest.raises(CkptdError, match=f"not all ranks came .*missing {absent}"):
        rendezvous.meet("job", {"node": "n"}, "", time.monotonic() + 1.0, late=told.append)
    assert set(told) == {said}


def test_nobody_is_waited_for_after_a_meeting_that_ended_in_an_error(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, late: Callable[[str], None], **__: object) -> None:
        late("ranks 1")
        assert any("waits for ranks 1" in text for text in client.health().problems)
        raise CkptdError("two daemons of one name")

    monkeypatch.setattr(rendezvous, "meet", fails)
    with connected(daemon, Training()) as client:
        with pytest.raises(CkptdError, match="of one name"):
            client.restore()
        assert client.health().problems == []


@pytest.mark.parametrize("granting", ["always", "asked"])
def test_a_first_snapshot_that_must_be_waits_until_this_rank_has_joined(tmp_path: Path, granting: str) -> None:
    with RankDaemonDouble(tmp_path / "d.sock", granting=granting) as daemon, connected(daemon, training := Training()) as client:
        statuses = []
        for step in (1, 2, 3):
            training.step()
            statuses.append(client.snapshot(step, must=True).wait("sealed", 30))
        assert statuses == ["durable"] * 3


@pytest.mark.parametrize("waits", ["snapshot", "wait"])
def test_a_join_that_does_not_end_is_waited_for_within_bounds(tmp_path: Path, waits: str) -> None:
    """P5. Of wait() the bound is its own."""
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, connected(daemon, training := Training(), must_timeout_s=0.2) as client:
        daemon._on_join = lambda *_: None  # type: ignore[method-assign]
        training.step()
        assert client.snapshot(1, must=waits == "snapshot").status == "skipped: joining"
        daemon.wait_for(lambda: daemon.messages(wire.Join))
        if waits == "wait":
            assert client.wait("sealed", 0.2) == "skipped: joining"


def test_the_join_predicts_the_state_that_the_first_step_gives_birth_to(daemon: RankDaemonDouble) -> None:
    """Section 5: otherwise the first snapshot after step 1 would not fit and have to be skipped."""
    with stepped(daemon) as (client, _):
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
    assert daemon.messages(wire.Resize) == []
    (join,) = daemon.messages(wire.Join)
    need = daemon.held[1, 1][0].layout.payload_bytes
    assert need <= join.state_bytes <= 1.2 * need
