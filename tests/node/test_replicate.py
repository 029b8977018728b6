"""A replica's way to a peer: offered, pushed, verified, sealed; with loss, repeats, damage and death (P3, P10)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckptd.arena.arena import Slot
from ckptd.arena.header import FILLING
from ckptd.core.failpoint import arm
from ckptd.core.ids import SnapshotId
from ckptd.protect import replicate, settle
from ckptd.wire.bulk import Ticket
from ckptd.wire.peer import ReplicaDone, ReplicaOffer, ReplicaTicket
from ckptd.wire.tcp import TcpTransport
from tests.node.links import eventually, stays
from tests.node.peers import Peer, Post
from tests.node.proxy import Proxy, flip
from tests.node.slots import JOB, MIB


@pytest.fixture(params=["none", "aead"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def a(post: Post, mode: str) -> Iterator[Peer]:
    peer = Peer(post, "a", mode=mode)
    yield peer
    peer.close()


@pytest.fixture
def b(post: Post, mode: str) -> Iterator[Peer]:
    peer = Peer(post, "b", mode=mode)
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds that would only be waited for."""
    monkeypatch.setattr(settle, "REPEAT_S", 0.05)
    monkeypatch.setattr(settle, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(replicate, "OFFER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(replicate, "VERIFY_TIMEOUT_S", 1.0)
    yield
    arm("")


def prefix(slot: Slot, tier: int) -> bytes:
    assert slot.record is not None
    return bytes(slot.payload[: slot.record.layout.live_bytes(tier)])


@pytest.mark.parametrize("tier", [0, 1, 2])
async def test_a_replica_is_the_tier_prefix_with_its_record(a: Peer, b: Peer, tier: int) -> None:
    slot = a.sealed()
    assert await a.replicator.replicate(JOB, slot, tier, "b") == (True, "")
    (held,) = b.arrived
    assert slot.record is not None
    assert held.record is not None
    assert held.record.tier == tier
    assert replace(held.record, tier=0, sums=b"") == replace(slot.record, sums=b"")
    assert held.tenant.kind == "peer"
    assert prefix(held, tier) == prefix(slot, tier)


async def test_several_at_once_both_ways(a: Peer, b: Peer) -> None:
    jobs = [a.replicator.replicate(JOB, a.sealed(step), 1, "b") for step in range(4)]
    jobs += [b.replicator.replicate(JOB, b.sealed(step), 1, "a") for step in range(4)]
    assert await asyncio.gather(*jobs) == [(True, "")] * 8
    assert (len(a.arrived), len(b.arrived)) == (4, 4)


@pytest.mark.parametrize("lost", [ReplicaOffer, ReplicaTicket, ReplicaDone])
async def test_any_message_may_get_lost_once(post: Post, a: Peer, b: Peer, lost: type) -> None:
    seen = 0

    def copies(sender: str, to: str, message: object) -> int:
        nonlocal seen
        seen += isinstance(message, lost)
        return 0 if isinstance(message, lost) and seen == 1 else 1

    post.copies = copies
    assert await a.replicator.replicate(JOB, a.sealed(), 1, "b") == (True, "")
    assert seen >= 2
    assert len(b.arrived) == 1


async def test_every_message_may_come_three_times(post: Post, a: Peer, b: Peer) -> None:
    post.copies = lambda *_: 3
    assert await a.replicator.replicate(JOB, a.sealed(), 1, "b") == (True, "")
    await stays(lambda: len(b.arrived) == 1)
    assert len(b.arena.slots) == 1


async def test_an_offer_is_not_repeated_without_need(post: Post, a: Peer, b: Peer) -> None:
    """It carries layout and sums: megabytes."""
    await a.replicator.replicate(JOB, a.sealed(), 1, "b")
    assert post.sent(ReplicaOffer) <= 2


async def test_no_memory_at_the_peer(post: Post, a: Peer, mode: str) -> None:
    small = Peer(post, "small", mode=mode, budget_bytes=2 * MIB)
    ok, reason = await a.replicator.replicate(JOB, a.sealed(), 0, "small")
    assert not ok
    assert reason.startswith("no memory")
    assert not small.arena.slots
    small.close()


async def test_a_peer_that_is_not_there_is_known_soon(a: Peer) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert await a.replicator.replicate(JOB, a.sealed(), 0, "nobody") == (False, "no answer")
    assert loop.time() - started < replicate.OFFER_TIMEOUT_S


async def test_a_peer_that_never_answers(post: Post, a: Peer, b: Peer) -> None:
    post.copies = lambda sender, to, message: 0
    assert await a.replicator.replicate(JOB, a.sealed(), 0, "b") == (False, "no answer")


async def test_damage_in_our_own_memory_is_found_by_the_receiver_and_admitted(a: Peer, b: Peer) -> None:
    """P10: never sealed at the peer, and our copy is named as the bad one."""
    slot = a.sealed()
    slot.payload[5000] ^= 1
    assert await a.replicator.replicate(JOB, slot, 0, "b") == (False, "damage")
    assert not b.arrived
    assert not b.arena.slots


async def test_damage_on_the_way_is_not_blamed_on_the_sender(a: Peer, b: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What mode none cannot see the block sums do."""
    slot = a.sealed()
    push = a.transport.push

    def bend(ticket: Ticket, spans: list[memoryview], **options: object) -> None:
        bent = bytearray(spans[0])
        bent[1234] ^= 64
        push(ticket, [memoryview(bent)], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(a.transport, "push", bend)
    assert await a.replicator.replicate(JOB, slot, 0, "b") == (False, "damaged on the way")
    assert not b.arena.slots


async def test_a_damaged_stream_is_refused_and_counted_by_whoever_received_it(a: Peer, b: Peer) -> None:
    """P10: by the chunk's tag in mode aead, by the block's sum in mode none."""
    slot = a.sealed()
    with Proxy(b.transport.address, bend=flip(500_000)) as proxy:
        a.send_through(proxy)
        ok, reason = await a.replicator.replicate(JOB, slot, 0, "b")
        assert not ok
        assert reason != "damage"
        await eventually(lambda: b.refused)
    assert (a.refused, b.refused) == ([], ["a"])
    assert not b.arena.slots


async def test_damage_at_the_peer_after_the_bytes_landed_is_found_by_the_next_who_reads_them(a: Peer, b: Peer) -> None:
    """P10: a replica was looked at as it landed, and never counts as verified for whoever it is served to."""
    assert await a.replicator.replicate(JOB, a.sealed(7), 0, "b") == (True, "")
    (held,) = b.arrived
    whole, part = (0, 4096), (100, 50)
    held.payload[120] ^= 1
    for span, reason in ((whole, "the slices do not match their sums"), (part, "damage")):
        into = memoryview(bytearray(span[1]))
        assert await a.fetcher.fetch(JOB, "b", SnapshotId(3, 7), 0, (span,), into) == (False, reason, False)
        await eventually(lambda: b.damage)
        b.damage.clear()
        await eventually(lambda: not b.fetcher._tasks.running)


async def test_a_slot_that_is_freed_and_filled_again_meanwhile_is_never_sealed_as_the_old_one(a: Peer, b: Peer) -> None:
    """P1: the receiver checks against the sums of what was offered."""
    slot = a.sealed(7)
    arm("protect.push:sleep=0.2")
    sending = asyncio.ensure_future(a.replicator.replicate(JOB, slot, 0, "b"))
    await eventually(lambda: b.arena.slots, what="the peer made room")
    slot.free()
    slot.payload[:] = b"\x55" * len(slot.payload)
    ok, _ = await sending
    assert not ok
    assert not b.arrived


async def test_a_slot_that_holds_nothing(a: Peer, b: Peer) -> None:
    slot = a.sealed()
    slot.free()
    assert await a.replicator.replicate(JOB, slot, 0, "b") == (False, "slot is gone")


async def test_a_failure_between_verification_and_seal_leaves_no_slot(a: Peer, b: Peer) -> None:
    arm("protect.seal:error")
    ok, _ = await a.replicator.replicate(JOB, a.sealed(), 0, "b")
    assert not ok
    assert not b.arrived
    assert not b.arena.slots
    arm("")
    assert await a.replicator.replicate(JOB, a.sealed(8), 0, "b") == (True, "")


async def test_a_sender_that_dies_leaves_no_slot(post: Post, a: Peer, b: Peer) -> None:
    arm("protect.push:sleep=1")
    sending = asyncio.ensure_future(a.replicator.replicate(JOB, a.sealed(), 0, "b"))
    await eventually(lambda: [slot for slot in b.arena.slots.values() if slot.state == FILLING])
    slot = next(iter(b.arena.slots.values()))
    receiving = next(iter(b.replicator._tasks.running))
    sending.cancel()
    receiving.cancel()  # as at the daemon's stop: the slot is given back only when nothing writes into it
    await eventually(lambda: not b.arena.slots)
    assert slot.record is None
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_offers_that_contradict_themselves_are_refused(post: Post, a: Peer, b: Peer) -> None:
    slot = a.sealed()
    assert slot.record is not None
    good = replicate._offer("t", slot.record, 1)
    told: list[ReplicaDone] = []
    b.replicator._send = lambda node, job, message: told.append(message) or True  # type: ignore[arg-type,func-returns-value]
    bad = [
        replace(good, transfer="1", layout=b"\x90"),
        replace(good, transfer="2", sums=good.sums[16:]),
        replace(good, transfer="3", rank=1),
        replace(good, transfer="4", tier=-1),
        replace(good, transfer="5", objects_bytes=-5),
        replace(good, transfer="6", snapshot=SnapshotId(-1, 2)),
    ]
    for offer in bad:
        b.replicator.on_message("a", JOB, offer)
    b.replicator.on_message("a", "no job at all", replace(good, transfer="7"))
    await eventually(lambda: len(told) == 7)
    assert not any(done.ok for done in told)
    assert not b.arena.slots


async def test_a_ticket_for_another_transfer_is_not_used(post: Post, a: Peer, b: Peer) -> None:
    into = memoryview(bytearray(4 * MIB))
    slot = a.sealed()
    assert slot.record is not None
    wrong = b.transport.expect(into[: slot.record.layout.live_bytes(0)], aad=b"replica|another")

    def copies(sender: str, to: str, message: object) -> int:
        if isinstance(message, ReplicaOffer):
            ticket = ReplicaTicket(message.transfer, wrong.ticket.encode())
            asyncio.get_running_loop().call_soon(a.replicator.on_message, "b", JOB, ticket)
            return 0
        return 1

    post.copies = copies
    assert await a.replicator.replicate(JOB, slot, 0, "b") == (False, "the ticket is for another transfer")
    assert bytes(into) == bytes(len(into))


async def test_replicas_that_wait_for_their_turn_are_not_offered_yet(
    post: Post, b: Peer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket that is not used soon expires, and four failures in a row would send the copy to another node."""
    monkeypatch.setattr(replicate, "PUSHES_MAX", 1)
    monkeypatch.setitem(TcpTransport.expect.__kwdefaults__, "ttl_s", 1.2)
    a = Peer(post, "a", mode=mode)
    try:
        arm("protect.push:sleep=0.5")
        results = await asyncio.gather(*(a.replicator.replicate(JOB, a.sealed(step), 1, "b") for step in range(4)))
        assert results == [(True, "")] * 4
        assert len(b.arrived) == 4
    finally:
        a.close()


async def test_memory_may_take_longer_than_an_offer_waits(
    b: Peer, a: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is touched for the first time comes at 0.4 to 2.3 GB/s. Each offer that was given up would take more of it."""
    monkeypatch.setattr(replicate, "OFFER_TIMEOUT_S", 0.2)
    allocate, calls = b.arena.allocate, list[int]()

    def slowly(*args: object) -> Slot:
        calls.append(1)
        threading.Event().wait(1.0)
        return allocate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(b.arena, "allocate", slowly)
    assert await a.replicator.replicate(JOB, a.sealed(), 1, "b") == (True, "")
    assert (len(calls), len(b.arrived)) == (1, 1)


async def test_a_slot_that_is_freed_while_it_waits_its_turn_is_not_sent(
    post: Post, b: Peer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds by then would not match its sums: a false alarm at the peer."""
    monkeypatch.setattr(replicate, "PUSHES_MAX", 1)
    a = Peer(post, "a", mode=mode)
    try:
        arm("protect.push:sleep=0.3")
        slots = [a.sealed(step) for step in (1, 2)]
        tasks = [asyncio.ensure_future(a.replicator.replicate(JOB, slot, 1, "b")) for slot in slots]
        await eventually(lambda: post.sent(ReplicaTicket))
        slots[1].free()
        assert await asyncio.gather(*tasks) == [(True, ""), (False, "slot is gone")]
        assert b.refused == []
        assert {m.snapshot.step for m in post.log if isinstance(m, ReplicaOffer)} == {1}
    finally:
        a.close()
