"""release() beside a daemon that does not know it: the trainer says so, and stays connected (P5)."""

from __future__ import annotations

import pytest
from ckptd_client import CkptdError

from ckptd.wire import rank as wire
from tests.node.client_training import stepped
from tests.node.rank_daemon_double import RankDaemonDouble


def test_a_daemon_of_an_earlier_release_is_asked_nothing(daemon: RankDaemonDouble) -> None:
    with stepped(daemon) as (client, _):
        first = client.snapshot(5, keep=True, must=True)
        assert first.wait("sealed", 30) == "durable"
        with pytest.raises(CkptdError, match=r"(?s)the daemon is of an earlier release.*remove the file keep"):
            client.release(5)
        assert client.snapshot(5, keep=True) is first, "it is kept still"
        assert [row["step"] for row in client.steps()] == [5]
    assert daemon.messages(wire.Release) == [] and len(daemon.messages(wire.Hello)) == 1
