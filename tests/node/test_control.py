"""The control link between living peers: messages, verdicts, restarts (design D3)."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ckptd.core.errors import CkptdError
from ckptd.core.ids import NodeInfo
from ckptd.core.protocol import messages as m
from ckptd.wire import control, outbox
from ckptd.wire import link_frames as lf
from tests.node.links import JOB, Link, LinkProcess, eventually, stays

QUICK_S = 0.6  # down_after_s where a test waits for silence


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[Link, Link]]:
    async with Link("a") as a, Link("b") as b:
        yield a, b


async def test_messages_arrive_typed_with_job_and_sender(pair: tuple[Link, Link]) -> None:
    a, b = pair
    await a.met(b)
    await b.met(a)
    assert a.send("b", JOB, m.Grant(1, 2, 3))
    assert b.send("a", "0/other", m.FlushAsk(1, 8))
    await eventually(lambda: a.messages and b.messages)
    assert b.messages == [("a", JOB, m.Grant(1, 2, 3))]
    assert a.messages == [("b", "0/other", m.FlushAsk(1, 8))]
    assert (a.peers, b.peers) == ([("b", True)], [("a", True)])
    assert not a.problems + b.problems


async def test_who_was_not_connected_to_can_still_answer(pair: tuple[Link, Link]) -> None:
    a, b = pair
    await a.met(b)
    assert b.send("a", JOB, m.FlushAsk(1, 7))
    await eventually(lambda: a.messages)
    assert (b.up("a"), b.peers) == (None, [])  # b never asked to hear of a


async def test_nobody_is_sent_to_where_nobody_is(pair: tuple[Link, Link]) -> None:
    a, b = pair
    assert not a.send("b", JOB, m.FlushAsk(1, 8))
    assert not a.send("a", JOB, m.FlushAsk(1, 8))
    a.connect(a.info)
    assert a.up("a") is None
    await a.met(b)
    a.release("")
    assert not a.send("b", JOB, m.FlushAsk(1, 8))


async def test_connect_is_idempotent(pair: tuple[Link, Link]) -> None:
    a, b = pair
    await a.met(b)
    link = a._links["b"]
    for _ in range(3):
        a.connect(b.info)
    assert a._links["b"] is link
    assert a.peers == [("b", True)]


async def test_large_messages_cross_both_ways_and_small_ones_follow(pair: tuple[Link, Link]) -> None:
    a, b = pair
    await a.met(b)  # b answers over a's connection
    big = m.LayoutReply(1, {"id": bytes(12 << 20) + b"end"})
    for link, to in ((a, "b"), (b, "a")):
        assert link.send(to, JOB, big)
        assert link.send(to, JOB, m.FlushAsk(1, 1))
    await eventually(lambda: len(a.messages) == len(b.messages) == 2)
    assert [message for _, _, message in a.messages] == [message for _, _, message in b.messages] == [big, m.FlushAsk(1, 1)]


async def test_a_message_that_is_too_long_is_a_problem_and_not_an_exception(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    await a.met(b)
    assert not a.send("b", JOB, m.LayoutReply(1, {"id": bytes(65 << 20)}))
    assert not a.send("b", "j" * 300, m.FlushAsk(1, 1))
    assert a.said("longer than a message may be")
    assert a.said("a job name of 300 bytes")


async def test_a_message_to_many_is_encoded_once(pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    await a.met(b)
    count = 0

    def encode(message: object) -> bytes:
        nonlocal count
        count += 1
        return original(message)

    original = control.codec.encode
    monkeypatch.setattr(control.codec, "encode", encode)
    message = m.FlushAsk(1, 1)
    for _ in range(4):
        a.send("b", JOB, message)
    assert count == 1
    a.send("b", "0/another", message)
    assert count == 2


async def test_no_wake_up_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """zmq's descriptors are edge-triggered: a send that finds something has come in eats the wake-up for it."""
    monkeypatch.setattr(control, "LOOK_S", 1e9)
    async with Link("a", down_after_s=60) as a, Link("b", down_after_s=60) as b:
        await a.met(b)
        for _ in range(5):
            assert b.send("a", JOB, m.FlushAsk(1, 1))
            threading.Event().wait(0.02)  # it is in a's socket now, and a's event loop has not seen it
            assert a.send("b", JOB, m.FlushAsk(1, 2))
        await eventually(lambda: len(a.messages) == len(b.messages) == 5, 3)


# --- verdicts ---------------------------------------------------------------------------------------------------
async def test_a_refused_connection_is_known_fast(pair: tuple[Link, Link]) -> None:
    a, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    a.connect(NodeInfo("gone", address, "", ""))
    await eventually(lambda: a.peers == [("gone", False)], 1.5)
    assert a.up("gone") is False


async def test_a_port_that_never_answers_is_down_in_time() -> None:
    async with Link("a", down_after_s=QUICK_S) as a:
        mute = socket.create_server(("127.0.0.1", 0))
        a.connect(NodeInfo("mute", f"tcp://127.0.0.1:{mute.getsockname()[1]}", "", ""))
        started = time.monotonic()
        await eventually(lambda: a.peers == [("mute", False)], QUICK_S + 2)
        assert time.monotonic() - started >= QUICK_S * 0.9
        mute.close()


async def test_a_killed_peer_is_down_at_once_and_up_again_when_restarted(pair: tuple[Link, Link]) -> None:
    a, _ = pair
    with LinkProcess("c", "i1") as first:
        await a.met(first.info)
        a.send("c", JOB, m.FlushAsk(1, 1))
        await eventually(lambda: a.messages)
        first.end()
        await eventually(lambda: a.up("c") is False, 1.5, "down before any ping is late")
        assert not a.send("c", JOB, m.FlushAsk(1, 1))
    with LinkProcess("c", "i2", first.info.control):
        await eventually(lambda: a.up("c"))
        assert a.peers == [("c", True), ("c", False), ("c", True)]
        assert not a.problems


async def test_a_stopped_peer_is_down_within_the_configured_time_and_up_again_when_it_goes_on() -> None:
    with LinkProcess("c") as child:
        async with Link("a", down_after_s=QUICK_S) as a:
            await a.met(child.info)
            child.signal(signal.SIGSTOP)
            started = time.monotonic()
            await eventually(lambda: a.up("c") is False, QUICK_S * 3)
            assert time.monotonic() - started > QUICK_S / 2
            child.signal(signal.SIGCONT)
            await eventually(lambda: a.up("c"), 10)


async def test_sending_to_a_stopped_peer_never_blocks_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_BYTES_MAX", 64 << 20)
    with LinkProcess("c") as child:
        async with Link("a", down_after_s=30) as a:
            await a.met(child.info)
            child.signal(signal.SIGSTOP)
            message, longest, sent = m.LayoutReply(1, {"id": bytes(16 << 20)}), 0.0, 0
            while sent < 50:
                started = time.monotonic()
                accepted = a.send("c", JOB, message)
                longest = max(longest, time.monotonic() - started)
                if not accepted:
                    break
                sent += 1
            assert 3 <= sent < 50
            assert longest < 1.0
            child.signal(signal.SIGCONT)
            await eventually(lambda: len(a.messages) == sent, 20, "everything accepted came back")


async def test_our_own_standstill_is_not_held_against_peers() -> None:
    with LinkProcess("c") as child:
        async with Link("a", down_after_s=QUICK_S) as a:
            await a.met(child.info)
            threading.Event().wait(QUICK_S * 2)  # the event loop stands still
            await stays(lambda: a.peers == [("c", True)], QUICK_S / 2)
            assert a.up("c") and not a.problems


async def test_a_peer_that_moves_is_followed(pair: tuple[Link, Link]) -> None:
    a, b = pair
    await a.met(b)
    await b.stop()
    await eventually(lambda: a.up("b") is False, 2)
    async with Link("b", incarnation="second") as moved:
        await a.met(moved)
        assert a.peers == [("b", True), ("b", False), ("b", True)]
        assert not a.problems


async def test_a_restart_that_nobody_saw_is_told_as_down_and_up(pair: tuple[Link, Link]) -> None:
    """Whoever relied on its memory must hear of it."""
    a, b = pair
    await a.met(b)
    await b.stop()
    async with Link("b", incarnation="second") as second:
        a.connect(second.info)  # before a noticed anything
        await eventually(lambda: len(a.peers) >= 3)
        assert a.peers == [("b", True), ("b", False), ("b", True)]


# --- start and stop ---------------------------------------------------------------------------------------------
async def test_stop_is_idempotent_and_the_port_is_free_again(pair: tuple[Link, Link]) -> None:
    a, _ = pair
    address = a.address
    with pytest.raises(CkptdError, match="cannot listen"):
        await Link("c", address).start()
    await a.stop()
    await a.stop()
    async with Link("c", address) as again:
        assert again.address == address


async def test_the_advertised_address_has_the_bound_port() -> None:
    async with Link("a", advertise="10.0.0.7") as link:
        assert link.address.startswith("tcp://10.0.0.7:")
        assert link.address.rpartition(":")[2] != "*"


async def test_a_frame_limit_is_below_the_message_limit() -> None:
    """P13: what libzmq holds for a stranger is one frame."""
    assert lf.FRAME_BYTES_MAX <= 256 * 1024
    async with Link("a") as link:
        assert link._listener is not None
        assert 0 < link._listener.socket.maxmsgsize <= lf.FRAME_BYTES_MAX + 64
