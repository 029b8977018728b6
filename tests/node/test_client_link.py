"""No daemon, a dead one, a stopped one, one that refuses: training runs on, and the client comes back by itself (P5)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from ckptd_client import CkptdError, Client, link, session
from ckptd_client import client as client_module
from ckptd_client.capture import Engine
from ckptd_client.session import Session
from ckptd_client.troubles import Troubles
from ckptd_client.world import World

from ckptd.core import failpoint
from ckptd.core.ids import NodeInfo
from ckptd.wire import rank as wire
from tests.node.client_training import Training, assert_same, connected, first_snapshot, restored
from tests.node.rank_daemon_double import Peer, RankDaemonDouble
from tests.waiting import until


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoint.arm("")


def trains(training: Training, client: Client, first: int, steps: int = 3) -> list[str]:
    """Statuses of ``steps`` steps, each of which must not be held up."""
    found = []
    for step in range(first, first + steps):
        training.step()
        began = time.monotonic()
        found.append(client.snapshot(step).status)
        assert time.monotonic() - began < 0.5
    return found


def test_without_a_daemon_training_runs_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with caplog.at_level(logging.WARNING, "ckptd"):
        began = time.monotonic()
        with Client.connect("job", socket=tmp_path / "none.sock", timeout_s=0.2) as client:
            assert time.monotonic() - began < 1
            client.register(model=training.model, optimizer=training.optimizer)
            assert trains(training, client, 1) == ["skipped: no daemon"] * 3
            health = client.health()
            assert not health.ok
            assert "none.sock" in health.problems[0]
            assert client.wait("durable", timeout=5) == "unreachable"
            client.fence()
            with pytest.raises(CkptdError, match="does not answer"):
                client.steps()
    assert len(caplog.records) == 1, [record.message for record in caplog.records]


def test_restore_without_a_daemon_raises_unless_a_fresh_start_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    with Client.connect("job", socket=tmp_path / "none.sock", timeout_s=0.2) as client:
        with pytest.raises(CkptdError, match="nothing is registered"):
            client.restore()
        client.register(model=training.model, optimizer=training.optimizer)
        with pytest.raises(CkptdError) as caught:
            client.restore()
        assert "allow_fresh" in caught.value.hint
        assert "keeper or systemd starts again" in caught.value.hint, "any other daemon has lost what it held"
        assert "none.sock" in str(caught.value)
        assert client.restore(allow_fresh=True) is None
        assert (client.last_restore["mode"], client.last_restore["step"]) == ("no daemon", None)
        assert "no daemon for rank 0" in client.last_restore["passed_over"][0]
        assert "restore() begins anew, whatever memory and storage have of this job: no daemon for rank 0" in caplog.text


def test_required_raises_at_once(tmp_path: Path) -> None:
    with pytest.raises(CkptdError, match="no daemon") as caught:
        Client.connect("job", socket=tmp_path / "none.sock", required=True, timeout_s=0.2)
    assert "ckptd run" in caught.value.hint


def test_the_socket_is_named_by_argument_or_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SOCKET", str(tmp_path / "d.sock"))
    with RankDaemonDouble(tmp_path / "d.sock"), Client.connect("job", required=True) as client:
        assert client.health().ok


def test_a_refusal_is_passed_on(tmp_path: Path) -> None:
    daemon = RankDaemonDouble(tmp_path / "d.sock")
    daemon._on_hello = lambda peer, message, fds: peer.sock.send(  # type: ignore[method-assign]
        wire.Refused("no job of this name is wanted", "job", "choose another")
    )
    with daemon:
        with pytest.raises(CkptdError, match="no job of this name") as caught:
            Client.connect("job", socket=daemon.path, required=True)
        assert caught.value.hint == "choose another"


def test_a_refusal_is_passed_on_though_the_connection_ended_before_the_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(path: str) -> link.RankSocket:
        mine, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with daemons:
            link.RankSocket(daemons, ()).send(wire.Refused("too many connections"))
        return link.RankSocket(mine, wire.TO_RANK)

    monkeypatch.setattr(link.RankSocket, "connect", connect)
    with pytest.raises(CkptdError, match="too many connections"):
        Client.connect("job", socket="/nowhere", required=True, timeout_s=5)


@pytest.mark.parametrize("says", [True, False])
def test_a_daemon_that_takes_the_connection_and_not_the_rank_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: bool
) -> None:
    """Fifteen times a second, with a line each time: every welcome began the pauses anew."""
    pauses: list[float] = []
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()

    def turn_away(peer: Peer, message: object, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # the rank has just left
            if says:
                peer.sock.send(wire.Refused("rank 0 trains on node a", "", "restart the trainer"))
            peer.sock.sock.shutdown(socket.SHUT_RDWR)

    with restored(daemon, training) as client, caplog.at_level(logging.WARNING, "ckptd"):
        daemon.stop()
        until(lambda: not client._session.link.up)
        monkeypatch.setattr(link.Link, "_sleep", lambda self, seconds: pauses.append(seconds))
        again = restarted(daemon)
        again._on_join = turn_away  # type: ignore[method-assign]
        with again:
            again.wait_for(lambda: len(again.messages(wire.Join)) >= 20)
            assert min(pauses[-5:]) == (link.REFUSED_BACKOFF_S if says else link.BACKOFF_MAX_S)
            problems = " ".join(client._troubles.problems())
        monkeypatch.undo()
    assert "connection to the daemon lost" in problems
    assert ("rank 0 trains on node a" in problems and "restart the trainer" in problems) == says
    assert len(caplog.records) == 1 + says, [record.message for record in caplog.records]


def test_a_grant_says_that_the_rank_is_taken_as_well_as_ready_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that lost what it knew, and hears of the running epoch from its ranks, does not tell them Ready."""
    monkeypatch.setattr(link, "REFUSED_BACKOFF_S", 0.01)
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()

    def refuse(peer: Peer, message: object, fds: list[int]) -> None:
        peer.sock.send(wire.Refused("not here"))

    def take(peer: Peer, message: wire.Join, fds: list[int]) -> None:
        peer.rank = message.rank
        last._joined[last._attempt][message.rank] = (peer, message)
        last._resize(peer, message.state_bytes)
        last._ready = True
        last._grant_free()

    with restored(daemon, training) as client:
        daemon.stop()
        refusing, last = restarted(daemon), restarted(daemon)
        refusing._on_join = refuse  # type: ignore[method-assign]
        last._on_join = take  # type: ignore[method-assign]
        with refusing:
            until(lambda: "not protected: not here" in client._troubles.problems())
        with last:
            until(lambda: len(client._session.grants), what="new grants")
            assert client._troubles.problems() == [] and not client._session._lost_at


def test_a_daemon_that_comes_later_is_found(tmp_path: Path) -> None:
    training = Training()
    with Client.connect("job", socket=tmp_path / "d.sock", timeout_s=0.2) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        assert trains(training, client, 1) == ["skipped: no daemon"] * 3
        with RankDaemonDouble(tmp_path / "d.sock") as daemon:
            daemon.wait_for(lambda: daemon._ready)
            steps = iter(range(10, 1000))

            def captured() -> bool:
                training.step()
                return client.snapshot(next(steps)).taken

            until(captured)
            assert client.wait("durable", 30) == "durable"
            assert client.health().ok


def restarted(daemon: RankDaemonDouble) -> RankDaemonDouble:
    """Not started yet. It knows which epoch its job is in, and has no memory."""
    again = RankDaemonDouble(daemon.path)
    again._attempt, again.epoch, again.world = daemon._attempt, daemon.epoch, 1
    again._joined = {daemon._attempt: {}}
    return again


def test_a_daemon_that_dies_and_comes_back(tmp_path: Path) -> None:
    """Grants of the dead one are dropped, the capture in progress is void, the memory is offered to the new one."""
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    with restored(daemon, training) as client:
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        failpoint.arm("capture.tensor:sleep=0.5")
        training.step()
        handle = client.snapshot(2, must=True)
        daemon.stop()
        until(lambda: handle.status == "void: connection to the daemon lost")
        failpoint.arm("")
        assert trains(training, client, 3) == ["skipped: no daemon"] * 3
        assert not client.health().ok
        with restarted(daemon) as again:
            again.wait_for(lambda: again._ready)
            offers, joins = again.messages(wire.Offer), again.messages(wire.Join)
            assert [len(offer.segments) for offer in offers] == [3]
            assert joins[0].attempt == daemon._attempt
            assert joins[0].ask is None
            until(lambda: len(client._session.grants), what="new grants")
            expected = training.tensors()
            handle = client.snapshot(6)
            assert handle.taken
            training.step()
            assert handle.wait("sealed", 30) == "durable"
            assert_same(again.held[1, 6][0], expected)
            assert client.health().ok
            assert len(client._session.segments._known) == 3  # the dead one's memory was let go


def test_a_snapshot_that_must_be_waits_for_a_daemon_that_was_lost_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was skipped at once, though a daemon is started again within seconds. One that stays away holds up nothing (P5)."""
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    with restored(daemon, training) as client:
        daemon.stop()
        until(lambda: not client._session.link.up)
        training.step()
        again = restarted(daemon)
        again.granting = "asked"
        with again:
            expected = training.tensors()
            handle = client.snapshot(1, must=True)
            assert handle.status == "capturing"
            training.step()
            assert handle.wait("sealed", 30) == "durable"
            assert_same(again.held[1, 1][0], expected)
        until(lambda: not client._session.link.up)
        monkeypatch.setattr(session, "SILENT_AFTER_S", 0.0)
        assert client.snapshot(2, must=True).status == "skipped: no daemon"


def test_wait_answers_for_no_older_step_than_one_that_was_skipped_without_a_daemon(tmp_path: Path) -> None:
    """P2: it said "durable", and meant the step before."""
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    with restored(daemon, training) as client:
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        daemon.stop()
        until(lambda: not client._session.link.up)
        training.step()
        assert client.snapshot(2).status == "skipped: no daemon"
        again = restarted(daemon)
        again.granting = "asked"  # it takes back no later grant for the step that is waited for, as a daemon does
        with again:
            again.wait_for(lambda: again._ready)
            until(lambda: client._session.link.up)
            expected = training.tensors()
            assert client.wait("durable", 30) == "skipped: no daemon"
            assert client.snapshot(2, must=True).wait("durable", 30) == client.wait("durable", 30) == "durable"
            assert_same(again.held[1, 2][0], expected)


def test_a_world_of_4096_ranks_is_told_at_the_join_and_again_to_a_new_daemon(tmp_path: Path) -> None:
    """A frame holds a few hundred nodes (D2)."""
    nodes = [
        NodeInfo(f"node-{n:04}", f"tcp://n{n}:1", f"n{n}:2", f"rack-{n // 8}") for n in range(512)
    ]
    ranks = tuple(node.node for node in nodes for _ in range(8))
    world = World(9, len(ranks), ranks, tuple(map(asdict, nodes)), "attempt")
    session = Session(str(tmp_path / "d.sock"), "gpt", Troubles("gpt"))
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    try:
        session.link.start()
        assert session.wait_up(30)
        session.join(world, 1 << 20, 0, 0, None, restoring=False)
        daemon.wait_for(lambda: daemon.worlds == {"attempt": (ranks, tuple(nodes))})
        daemon.stop()
        with RankDaemonDouble(daemon.path) as again:
            again.wait_for(lambda: again.worlds == {"attempt": (ranks, tuple(nodes))})
            assert again.messages(wire.Join) == daemon.messages(wire.Join)
    finally:
        session.link.close(None)


def test_what_is_wrong_with_the_daemon_is_said_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait for durable on a full storage used to be ten minutes of silence."""
    monkeypatch.setattr(session, "ASK_EVERY_S", 0.05)
    training = Training()
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, Client.connect("job", socket=daemon.path) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        client.restore()
        full = "flush of step %d: no space [/ckpt/%s.part/n0]\n  hint: free some"
        daemon.problems = [full % (7, "c0ffee"), "and more"]
        told = [f"ckptd job job: the daemon says: {text}" for text in daemon.problems]
        waiting = client._session
        waiting.wait(lambda: len(caplog.messages) == 2, time.monotonic() + 30)
        assert caplog.messages == told
        daemon.problems = [full % (9, "deadbeef"), "another"]  # each try has a place of its own
        waiting.wait(lambda: caplog.messages[-1].endswith("another"), time.monotonic() + 30)
        assert caplog.messages == [*told, "ckptd job job: the daemon says: another"], "each once, whatever its numbers and place"
        assert client.health().problems == daemon.problems
        daemon.problems = []
        assert client.health().ok


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    path = tmp_path / "d.sock"
    command = [sys.executable, "-m", "tests.node.rank_daemon_double", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process, path
        process.kill()


def test_a_stopped_daemon_holds_up_nothing(
    child: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, path = child
    monkeypatch.setattr(session, "SILENT_AFTER_S", 0.5)
    monkeypatch.setattr(session, "ASK_EVERY_S", 0.1)
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.3)
    training = Training()
    with Client.connect("job", socket=path) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        client.restore()
        training.step()
        assert client.snapshot(1, must=True).wait("sealed", 30) == "durable"
        os.kill(process.pid, signal.SIGSTOP)
        statuses = trains(training, client, 2, 6)
        assert statuses[-1].startswith(("skipped: no grant yet", "skipped: the daemon is silent"))
        began = time.monotonic()
        assert client.wait("durable", timeout=20) != "durable"
        assert time.monotonic() - began < 10
        assert any("does not answer" in text for text in client.health().problems)
        os.kill(process.pid, signal.SIGCONT)
        steps = iter(range(10, 1000))

        def captured() -> bool:
            training.step()
            return client.snapshot(next(steps)).taken

        until(captured)
        assert client.wait("durable", timeout=20) == "durable"
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < 8
    os.kill(process.pid, signal.SIGCONT)


def test_a_stopped_daemon_is_asked_once(child: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: health() after each step, as README suggests, waited its whole patience each time."""
    process, path = child
    with Client.connect("job", socket=path) as client:
        assert "daemon" in client.health().facts
        monkeypatch.setattr(client_module, "ANSWER_TIMEOUT_S", 0.3)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: "the daemon does not answer" in client.health().problems)  # what it sent before has come by then
        asked = client._session._requests
        assert all("the daemon does not answer" in client.health().problems for _ in range(5))
        assert client._session._requests == asked
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: "daemon" in client.health().facts)


def test_connect_to_a_stopped_daemon_is_bounded(child: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = child
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    with Client.connect("job", socket=path, timeout_s=0.3) as client:
        assert time.monotonic() - began < 2
        training = Training()
        client.register(model=training.model, optimizer=training.optimizer)
        assert trains(training, client, 1) == ["skipped: no daemon"] * 3
        assert "does not answer" in client.health().problems[0]
    os.kill(process.pid, signal.SIGCONT)


def test_a_killed_daemon_process_is_noticed(child: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = child
    training = Training()
    with Client.connect("job", socket=path) as client:
        client.register(model=training.model, optimizer=training.optimizer)
        client.restore()
        process.kill()
        until(lambda: not client._session.link.up)
        assert trains(training, client, 1) == ["skipped: no daemon"] * 3
        assert client.wait("durable", timeout=5) == "unreachable"


def test_a_wait_whose_daemon_is_gone_says_so_and_not_what_once_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P15: a script that ends with wait("durable") ended as if all were well."""
    training = Training()
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    daemon.durable = False
    with caplog.at_level(logging.WARNING, "ckptd"), connected(daemon, training) as client:
        client.restore()
        training.step()
        handle = client.snapshot(1, must=True)
        assert client.wait("protected", 30) == "protected"
        daemon.stop()
        until(lambda: not client._session.link.up)
        for wait in (client.wait, handle.wait):
            assert wait("durable", timeout=0.3) == "unreachable"
        assert client.wait("protected", timeout=0.3) == "protected", "it was reached"
    assert "wait('durable') ended otherwise: step 1 is protected as far as the daemon had said" in caplog.text


def test_forked_children_hold_neither_socket_nor_memory(tmp_path: Path) -> None:
    """D2: loader workers held the socket open for seconds, and would pin the memory of a dead node."""
    training = Training()
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, connected(daemon, training) as client:
        first_snapshot(client, training)
        guarded = {segment.fd for segment in client._session.segments._known.values()}
        socket_fd = client._session.link._socket.fileno()  # type: ignore[union-attr]
        inodes = {str(os.fstat(fd).st_ino) for fd in guarded}
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child: says what it still has
            still = [fd for fd in [*guarded, socket_fd] if os.path.exists(f"/proc/self/fd/{fd}")]
            mapped = [
                line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[4] in inodes
            ]
            status = client.snapshot(2, must=True).status
            os.write(writing, f"{len(still)} {len(mapped)} {status}".encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 1000) == b"0 0 skipped: this process was forked from the one that connected"
        os.close(reading)
        os.close(writing)
        training.step()
        assert client.snapshot(3, must=True).wait("sealed", 30) == "durable"


def test_close_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    with RankDaemonDouble(tmp_path / "d.sock") as daemon:
        training = Training()

        def round_trip() -> None:
            with restored(daemon, training) as client:
                training.step()
                client.snapshot(1, must=True)

        round_trip()
        until(lambda: daemon.messages(wire.Goodbye))
        before = mine()
        for _ in range(3):
            round_trip()
        until(lambda: no_more(mine(), before), what=f"{mine()} threads, memfds and descriptors, {before} at first")
        assert no_more(mine(), before)


def mine() -> tuple[int, int, int]:
    """Our threads, the memfds that this process has mapped, and its descriptors."""
    maps = {
        line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:double" in line
    }
    threads = sum(thread.name.startswith("ckptd") for thread in threading.enumerate())
    return threads, len(maps), len(os.listdir("/proc/self/fd"))


def no_more(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(now, before, strict=True))


def test_an_engine_closes_in_mid_copy() -> None:
    engine = Engine(lambda job: None, lambda job, reason: None)
    engine.close()
    assert engine.idle
