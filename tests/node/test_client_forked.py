"""A forked child (a loader's worker, a subprocess of a launcher) has the client's objects, and neither its memory, its threads nor
its connection: each call says so at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ckptd_client import CkptdError, Client, Handle

from ckptd.core import failpoint
from tests.node.client_training import copying, stepped
from tests.node.rank_daemon_double import RankDaemonDouble

HANGS_S = 20  # a child that says nothing for so long is ended
TEXT_BYTES_MAX = 4096


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def in_a_child(call: Callable[[], Any]) -> str:
    """What ``call`` returns or raises in a forked child; how the child ended, when that was a signal."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S)
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:TEXT_BYTES_MAX])
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else said


def left(client: Client) -> str:
    with client:
        pass
    client.close()
    return "left"


def anew(client: Client) -> str:
    """What the error's hint says."""
    with Client.connect("job", socket=client._session.link.path, required=True) as mine:
        return f"{len(mine.steps())} steps"


FORKED = "this process was forked from the one that connected"
CALLS: dict[str, tuple[Callable[[Client, Handle], Any], str]] = {
    "wait": (lambda client, _: client.wait("sealed", 60), f"unreachable: {FORKED}"),
    "handle": (lambda _, handle: handle.wait("sealed", 60), f"unreachable: {FORKED}"),
    "snapshot": (lambda client, _: client.snapshot(2, must=True).status, f"skipped: {FORKED}"),
    "its wait": (lambda client, _: client.snapshot(1, must=True).wait("sealed", 60), f"unreachable: {FORKED}"),
    "restore": (lambda client, _: client.restore(), f"CkptdError: {FORKED} [job]"),
    "steps": (lambda client, _: client.steps(), f"CkptdError: {FORKED} [job]"),
    "health": (lambda client, _: (client.health().ok, client.health().problems), f"(False, ['not protected: {FORKED}'])"),
    "fences": (lambda client, _: (client.stepped(), client.fence(), client.hold()), "(None, None, None)"),
    "close": (lambda client, _: left(client), "left"),
    "connect": (lambda client, _: anew(client), "0 steps"),
}


def test_in_a_forked_child_each_call_ends_at_once_and_names_the_fork(daemon: RankDaemonDouble) -> None:
    """P5. While a capture ran, wait() and the handle's copied along into memory that the child has not."""
    with stepped(daemon) as (client, training):
        failpoint.arm("capture.tensor:sleep=1")
        handle = client.snapshot(1, must=True)
        copying(client)
        failpoint.arm("")
        said = {name: in_a_child(lambda call=call: call(client, handle)) for name, (call, _) in CALLS.items()}
        assert {name: text.partition("\n")[0] for name, text in said.items()} == {name: text for name, (_, text) in CALLS.items()}
        training.step()  # nothing of the parent's has changed
        assert handle.wait("sealed", 30) == "durable"
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"


def test_a_closed_client_says_so_at_once(daemon: RankDaemonDouble) -> None:
    """wait() lasted for as long as a daemon may be silent (15 s). What was reached before stays so."""
    with stepped(daemon) as (client, _):
        handle = client.snapshot(1, must=True)
        assert handle.wait("sealed", 30) == "durable"
    assert handle.wait("protected") == client.wait() == "durable"
    assert client.snapshot(2).wait() == "unreachable: the client is closed"
    for call in (client.restore, client.steps):
        with pytest.raises(CkptdError, match="the client is closed"):
            call()
    assert client.snapshot(1).status == "skipped: the client is closed"
