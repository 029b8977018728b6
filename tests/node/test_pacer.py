"""The node's one bucket: real threads, real sockets (P5, P14)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptd.arena.arena import Slot
from ckptd.core.ids import SnapshotId
from ckptd.core.pacing.slowdown import AT_DEADLINE, AT_FLOOR, HELD, NO_STEPS, OFF
from ckptd.core.pacing.traffic import CAPTURED, WAITED
from ckptd.persist import writer
from ckptd.persist.storage.memory import MemoryStorage
from ckptd.protect import pacer as shell
from ckptd.protect import replicate
from ckptd.protect.pacer import Pacer, Transfer
from ckptd.wire.bulk import TransferError
from ckptd.wire.peer import FetchBad, FetchDone
from ckptd.wire.tcp import TcpTransport
from tests.node.bulk_peers import MODES, transport
from tests.node.checkpoints import orders, small_world
from tests.node.links import eventually
from tests.node.pacers import limited
from tests.node.peers import Peer, Post
from tests.node.slots import JOB, MIB
from tests.waiting import until

FAST = 1e8
LONG_S = 600.0


def never() -> bool:
    return False


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(mode: str) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    yield from _closed_after(transport(mode), transport(mode, idle_timeout_s=60.0))


def _closed_after(*made: TcpTransport) -> Iterator[Any]:
    yield made
    for end in made:
        end.close()


@pytest.fixture
def impatient(mode: str) -> Iterator[tuple[TcpTransport, TcpTransport]]:
    """The receiver gives up after 1.5 s without a byte."""
    yield from _closed_after(transport(mode), transport(mode, idle_timeout_s=1.5))


def push(ends: tuple[TcpTransport, TcpTransport], data: bytes, **options: Any) -> bytes:
    into = bytearray(len(data))
    incoming = ends[1].expect(memoryview(into))
    ends[0].push(incoming.ticket, [memoryview(data)], **options)
    assert incoming.done.result(10) == len(data)
    return bytes(into)


# --- a transfer -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streams", [1, 3])
def test_paced_bytes_arrive_no_faster_than_the_rate(
    ends: tuple[TcpTransport, TcpTransport], streams: int
) -> None:
    data, rate = random.Random(1).randbytes(9 * MIB + 17), 8e6
    pacer = limited(rate)
    began = time.monotonic()
    with pacer.transfer("protect", len(data), LONG_S) as pace:
        assert push(ends, data, streams=streams, pace=pace) == data
    assert time.monotonic() - began > 0.9 * len(data) / rate
    assert pacer.throttled_s["protect"] > 0
    assert pace.left == 0


def test_what_nothing_speaks_against_goes_in_whole_chunks(ends: tuple[TcpTransport, TcpTransport]) -> None:
    pacer, data = Pacer("aimd"), bytes(9 * MIB)
    sizes: list[int] = []
    with pacer.transfer("protect", len(data), LONG_S) as pace:
        pace.sent = lambda nbytes: sizes.append(nbytes) or pacer.sent(pace, nbytes)  # type: ignore[method-assign,func-returns-value]
        push(ends, data, streams=1, pace=pace)
    assert pacer.state == NO_STEPS
    assert max(sizes) >= 4 * MIB
    assert len(sizes) == 4  # three chunks and the last word


def test_whoever_waits_can_be_called_off(ends: tuple[TcpTransport, TcpTransport]) -> None:
    """Without that a daemon could not stop, nor a job go, before its slowest copy."""
    pacer, cancelled = limited(16 * 1024), threading.Event()
    data = bytes(MIB)
    incoming = ends[1].expect(memoryview(bytearray(len(data))))
    with ThreadPoolExecutor(1) as pool, pacer.transfer("protect", len(data), LONG_S) as pace:
        pushing = pool.submit(
            ends[0].push, incoming.ticket, [memoryview(data)], cancelled=cancelled, pace=pace
        )
        until(lambda: pacer._waiting, what="the push to wait for its turn")
        cancelled.set()
        with pytest.raises(TransferError, match="cancelled"):
            pushing.result(10)


def test_a_stream_that_is_held_back_is_not_taken_for_dead(
    impatient: tuple[TcpTransport, TcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trickles is no traffic in the eyes of the loop."""
    monkeypatch.setattr(shell, "KEEPALIVE_S", 0.3)
    pacer = limited(FAST, held=True)
    assert pacer.state == HELD
    data = random.Random(2).randbytes(30_000)
    with pacer.transfer("protect", len(data), LONG_S) as pace:
        assert push(impatient, data, streams=1, pace=pace) == data
    assert pacer._traffic.kind(0, pacer._clock()) == "quiet"


def test_a_deadline_lets_it_go(ends: tuple[TcpTransport, TcpTransport]) -> None:
    """P14: at 16 KiB/s this would take nine minutes."""
    pacer, data = limited(16 * 1024), bytes(9 * MIB)
    with pacer.transfer("protect", len(data), 1.0) as pace:
        assert pacer.state == AT_DEADLINE
        push(ends, data, pace=pace)
    pacer.look(at_once=True)
    assert pacer.state == AT_FLOOR


def test_a_fault_of_the_wire_ends_the_send_in_the_books_too(ends: tuple[TcpTransport, TcpTransport]) -> None:
    """Or every later step would count as one with traffic."""
    pacer, data = Pacer("aimd"), bytes(64 * MIB)
    incoming = ends[1].expect(memoryview(bytearray(len(data))), witness=lambda at, n: incoming.cancel())
    with pacer.transfer("protect", len(data), LONG_S) as pace, pytest.raises(TransferError):
        ends[0].push(incoming.ticket, [memoryview(data)], pace=pace)
    assert not pacer._traffic._under_way


def test_bytes_that_come_are_heard_of_while_they_come(ends: tuple[TcpTransport, TcpTransport]) -> None:
    pacer = Pacer("aimd")
    ends[1].on_bytes(pacer.received)
    began = pacer._clock()
    push(ends, bytes(MIB))
    assert pacer._traffic.kind(began, pacer._clock()) == "unclear"
    assert pacer._traffic.kind(began - 10, began - 1) == "quiet"


# --- one bucket for all ---------------------------------------------------------------------------------------------
def test_all_senders_share_one_rate() -> None:
    pacer, rate, each = limited(2e6), 2e6, 400_000

    def send() -> None:
        with pacer.transfer("protect", each, LONG_S) as pace:
            drain(pace, each)

    began = time.monotonic()
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: send(), range(5)))
    assert time.monotonic() - began > 0.9 * 5 * each / rate


def drain(pace: Transfer, nbytes: int) -> None:
    while nbytes:
        allowed = pace.take(nbytes, never)
        pace.sent(allowed)
        nbytes -= allowed


def test_a_flush_gets_what_replicas_leave_but_never_nothing() -> None:
    """While replicas always wait: one slice each FLUSH_PATIENCE_S."""
    pacer, stop, replica_bytes = limited(1e6), threading.Event(), []

    def replica() -> None:
        with pacer.transfer("protect", 1 << 30, 1e9) as pace:
            while not stop.is_set():
                allowed = pace.take(1 << 20, never)
                pace.sent(allowed)
                replica_bytes.append(allowed)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            pool.submit(replica)
        until(lambda: len(replica_bytes) > 10)
        before = sum(replica_bytes)
        began = time.monotonic()
        with pacer.transfer("flush", 60_000, LONG_S) as pace:
            drain(pace, 60_000)
        took, moved = time.monotonic() - began, sum(replica_bytes) - before
        stop.set()
    assert took >= 3 * 0.9 * shell.FLUSH_PATIENCE_S
    assert moved > 4 * 60_000


def test_off_is_off() -> None:
    pacer = Pacer("off")
    pacer.stepped("job/0", [[1.0, 2.0, 1.0, 0.0]])
    with pacer.transfer("protect", 1 << 40, 1e-9) as pace:
        assert pace.take(1 << 40, never) == 1 << 40
        pace.sent(1 << 40)
    assert (pacer.state, pacer.rate, pacer.pacing.ranks) == (OFF, None, {})


# --- what ranks say -------------------------------------------------------------------------------------------------
def rows(first: float, count: int, seconds: float, disturbed: float = 0.0) -> list[list[float]]:
    return [[first + i * seconds, first + (i + 1) * seconds, 1.0, disturbed] for i in range(count)]


def test_steps_are_told_apart_by_what_went_beside_them() -> None:
    pacer = Pacer("aimd", clock=lambda: 1000.0)
    pacer._traffic.began(500.0)
    pacer._traffic.ended(600.0, 10**9, 0.05)
    pacer.stepped("job/0", rows(420.0, 30, 2.0))
    pacer.stepped("job/0", rows(500.0, 20, 4.0))
    pacer.stepped("job/0", rows(700.0, 30, 5.0, disturbed=WAITED))
    assert (pacer.pacing.ranks["job/0"].often, pacer.pacing.captures) == (0.0, 0.0)
    pacer.stepped("job/0", rows(700.0, 15, 3.0, disturbed=CAPTURED))
    times = pacer.pacing.ranks["job/0"]
    assert times.captures == pytest.approx(0.25 * 0.5, rel=0.1), "a quarter of the rows takes half as long again"
    assert times.baseline_s == 2.0
    assert pacer.pacing.slowdown == pytest.approx(1.0)
    pacer.forget("job/")
    assert not pacer.pacing.ranks


@pytest.mark.parametrize(
    "row",
    [[], [1.0], [2.0, 1.0, 1.0, 0.0], [1.0, 2.0, 0.0, 0.0], [1.0, float("nan"), 1.0, 0.0], [0.0, float("inf"), 1.0, 0.0]],
)  # fmt: skip
def test_step_times_that_are_none_are_refused(row: list[float]) -> None:
    with pytest.raises(ValueError, match="step times"):
        Pacer("aimd").stepped("job/0", [row])


def test_too_many_rows_or_spans_are_refused() -> None:
    for arguments in (
        (rows(1.0, 65, 1.0),),
        (rows(1.0, 1, 1.0), [[0.0, 0.1]] * 65),
        (rows(1.0, 1, 1.0), [[2.0, 1.0]]),
    ):
        with pytest.raises(ValueError, match="step times"):
            Pacer("windows").stepped("job/0", *arguments)


def test_another_machines_clock_is_not_believed() -> None:
    pacer = Pacer("aimd", clock=lambda: 1000.0)
    pacer.stepped("job/0", rows(90_000.0, 30, 1.0))
    pacer.stepped("job/0", rows(100.0, 30, 1.0))  # what went beside them is forgotten
    assert "job/0" not in pacer.pacing.ranks


def test_a_rank_that_waits_is_not_slowed_down() -> None:
    pacer = limited(1e5)
    pacer.waits()
    assert (pacer.state, pacer.rate) == (NO_STEPS, None)
    pacer.trains()
    assert (pacer.state, pacer.rate) == (AT_FLOOR, 1e5)


# --- windows --------------------------------------------------------------------------------------------------------
def test_windows_let_bytes_go_between_communications_only() -> None:
    """Steps of 0.4 s, the wire is training's in the second half of each."""
    pacer = Pacer("windows")
    now, period = pacer._clock(), 0.4
    pacer._traffic.line_bytes_s = 1e7
    for index in range(20):
        begin = now - (20 - index) * period
        pacer.stepped("job/0", [[begin, begin + period, 1.0, 0.0]], [[0.5 * period, period]])
    assert pacer.state == shell.WINDOWS
    went: list[tuple[float, int]] = []
    with pacer.transfer("protect", 2_000_000, LONG_S) as pace:
        left = 2_000_000
        while left and pacer.state == shell.WINDOWS:
            allowed = pace.take(left, never)
            went.append((((pacer._clock() - now) % period) / period, allowed))
            pace.sent(allowed)
            left -= allowed
    assert sum(nbytes for _, nbytes in went) > 1_000_000
    inside = sum(nbytes for phase, nbytes in went if phase < 0.5)
    assert inside > 0.9 * sum(nbytes for _, nbytes in went)  # a thread may wake up late


# --- replicas and restores ------------------------------------------------------------------------------------------
@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    post = Post()
    pair = Peer(post, "a", pacer=limited(2e6)), Peer(post, "b")
    yield pair
    for peer in pair:
        peer.close()


async def test_replicas_and_what_parity_reads_are_paced_restores_are_not(peers: tuple[Peer, Peer]) -> None:
    a, b = peers
    slot = a.sealed()
    assert slot.record is not None
    nbytes = slot.record.layout.live_bytes(1)
    began = time.monotonic()
    assert await a.replicator.replicate(JOB, slot, 1, "b") == (True, "")
    assert time.monotonic() - began > 0.9 * nbytes / 2e6
    throttled = a.pacer.throttled_s["protect"]
    fragment = slot.record.layout.fragments[0]
    into = memoryview(bytearray(fragment.nbytes))
    spans = ((fragment.offset, fragment.nbytes),)
    assert await b.fetcher.fetch(JOB, "a", SnapshotId(3, 7), 0, spans, into) == (True, "", False)
    assert a.pacer.throttled_s == {"protect": throttled, "flush": 0.0}
    assert await b.fetcher.fetch(JOB, "a", SnapshotId(3, 7), 0, spans, into, protects=True) == (True, "", False)
    assert a.pacer.throttled_s["protect"] > throttled + 0.9 * (fragment.nbytes - 200_000) / 2e6


async def test_a_replica_waits_for_its_turn_before_it_has_a_ticket(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket expires: those of copies that queued behind slow ones did, and were asked for again and again."""
    monkeypatch.setattr(replicate, "PACED_PUSHES_MAX", 1)
    a, b = peers
    expect = b.transport.expect
    monkeypatch.setattr(b.transport, "expect", lambda *args, **options: expect(*args, ttl_s=0.4, **options))
    copies = [a.replicator.replicate(JOB, a.sealed(step), 1, "b") for step in range(4)]
    assert await asyncio.gather(*copies) == [(True, "")] * 4


def held_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> tuple[threading.Event, threading.Event]:
    """(it was called, it may go on)"""
    called, go, real = threading.Event(), threading.Event(), getattr(owner, name)

    def held(*arguments: Any, **options: Any) -> Any:
        called.set()
        assert go.wait(20)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, held)
    return called, go


def fill_anew(slot: Slot) -> None:
    """Released, and taken for the next capture."""
    slot.free()
    slot.fill(9)
    slot.extent[:] = bytes(len(slot.extent))


@pytest.mark.parametrize("pacing", ["off", "aimd"])
async def test_a_copy_ends_with_what_it_is_a_copy_of(pacing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that was released meanwhile is filled anew: its receiver called the sender a liar for that."""
    post = Post()
    a, b = Peer(post, "a", pacer=limited(16 * 1024) if pacing == "aimd" else Pacer("off")), Peer(post, "b")
    slot = a.sealed()
    gate, go = held_at(monkeypatch, a.replicator, "_push")
    copying = asyncio.ensure_future(a.replicator.replicate(JOB, slot, 1, "b"))
    await eventually(gate.is_set)
    fill_anew(slot)
    go.set()
    ok, reason = await copying
    assert (ok, b.refused) == (False, []), reason
    assert "cancelled" in reason
    for peer in (a, b):
        peer.close()


@pytest.mark.parametrize(
    ("pacing", "protects", "reason"),
    [("off", 1.0, "cancelled"), ("aimd", 1.0, "cancelled"), ("off", 0.0, "was freed"), ("aimd", 0.0, "was freed")],
)
async def test_what_is_lent_to_parity_ends_with_the_slot_it_is_read_from(
    pacing: Any, protects: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that was released meanwhile is filled anew: who had asked took that for damage on the wire, and told the holder to
    look. A restore's bytes go at once, so that they are of no use is said after them."""
    post = Post()
    a, b = Peer(post, "a", pacer=limited(16 * 1024) if pacing == "aimd" else Pacer("off")), Peer(post, "b")
    slot = a.sealed()
    assert slot.record is not None
    fragment = slot.record.layout.fragments[0]
    gate, go = held_at(monkeypatch, a.transport, "push")
    into = memoryview(bytearray(fragment.nbytes))
    spans = ((fragment.offset, fragment.nbytes),)
    asking = asyncio.ensure_future(b.fetcher.fetch(JOB, "a", SnapshotId(3, 7), 0, spans, into, protects=protects))
    await eventually(gate.is_set)
    fill_anew(slot)
    go.set()
    ok, why, _ = await asking
    assert (ok, b.refused, post.sent(FetchBad)) == (False, [], 0), why
    await eventually(lambda: not a.fetcher._tasks.running)
    said = [message for message in post.log if isinstance(message, FetchDone)]
    assert [reason in done.reason for done in said] == [True], said
    for peer in (a, b):
        peer.close()


async def test_turns_are_given_back_by_those_who_were_called_off(peers: tuple[Peer, Peer]) -> None:
    a, _ = peers
    first = [asyncio.ensure_future(a.replicator.replicate(JOB, a.sealed(step), 1, "b")) for step in range(5)]
    turns = a.replicator._turns
    await eventually(lambda: turns._inside == replicate.PACED_PUSHES_MAX and turns._waiting)
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    assert await a.replicator.replicate(JOB, a.sealed(9), 1, "b") == (True, "")
    assert not a.pacer._transfers


# --- flush ----------------------------------------------------------------------------------------------------------
def test_a_flush_waits_for_its_turn_and_can_be_called_off() -> None:
    pieces = orders(small_world(ranks=1), nodes=1)["n0"]
    pacer, cancelled = limited(16 * 1024), threading.Event()
    with ThreadPoolExecutor(1) as pool, pacer.transfer("flush", 4 * MIB, LONG_S) as pace:
        storage = MemoryStorage()
        where = storage, "1000/gpt", SnapshotId(1, 1), "a1", "n0"
        writing = pool.submit(writer.write_pieces, *where, pieces, cancelled, pace=pace)
        until(lambda: pace.left < 4 * MIB, what="the flush to be let through in part")
        assert not writing.done()
        cancelled.set()
        with pytest.raises(writer.Cancelled):
            writing.result(10)
