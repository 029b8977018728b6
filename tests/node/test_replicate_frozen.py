"""Replicas of snapshots with a frozen part, over real sockets: it is sent to each peer once (D6, D8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from ckptd.arena.arena import Slot
from ckptd.arena.sums import bad_blocks
from ckptd.core.failpoint import arm
from ckptd.protect import replicate, settle
from ckptd.wire.peer import FetchAsk, ReplicaOffer
from tests.node.links import eventually
from tests.node.peers import Peer, Post
from tests.node.slots import JOB


@pytest.fixture(params=["none", "aead"])
def peers(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer, Post]]:
    post = Post()
    a, b = Peer(post, "a", mode=request.param), Peer(post, "b", mode=request.param)
    yield a, b, post
    arm("")
    a.close()
    b.close()


def is_sound(slot: Slot) -> bool:
    record = slot.record
    assert record is not None
    return not bad_blocks(slot.payload, record.layout, record.sums, tier=record.tier)


@pytest.mark.parametrize("tier", [0, 1, 2])
async def test_the_frozen_part_is_sent_once_and_leaned_on_from_then_on(
    peers: tuple[Peer, Peer, Post], tier: int
) -> None:
    a, b, post = peers
    first = a.sealed_frozen(1)
    assert await a.replicator.replicate(JOB, first, tier, "b") == (True, "")
    for step in (2, 3):
        assert await a.replicator.replicate(JOB, a.sealed_frozen(step, first.frozen), tier, "b") == (True, "")
    assert post.sent(FetchAsk) == 1
    assert all(is_sound(slot) for slot in b.arrived)
    frozen = {id(slot.frozen) for slot in b.arrived}
    assert len(frozen) == 1 and b.arrived[0].frozen is not None
    assert b.arrived[0].frozen.leaning == 3
    assert len(b.arena.slots) == 4


async def test_a_tier_above_all_frozen_fragments_leans_on_nothing(peers: tuple[Peer, Peer, Post]) -> None:
    a, b, post = peers
    assert await a.replicator.replicate(JOB, a.sealed_frozen(), 3, "b") == (True, "")
    assert b.arrived[0].frozen is None and is_sound(b.arrived[0])
    assert post.sent(FetchAsk) == 0


async def test_two_replicas_at_once_wait_for_one_frozen_part(peers: tuple[Peer, Peer, Post]) -> None:
    a, b, _ = peers
    first = a.sealed_frozen(1)
    slots = [first, *(a.sealed_frozen(step, first.frozen) for step in (2, 3))]
    results = await asyncio.gather(*(a.replicator.replicate(JOB, slot, 1, "b") for slot in slots))
    assert results == [(True, "")] * 3
    assert all(is_sound(slot) for slot in b.arrived) and len(b.arrived) == 3
    assert len({slot.frozen for slot in b.arrived}) == 1


async def test_a_damaged_frozen_part_is_refused_and_leaves_nothing(peers: tuple[Peer, Peer, Post]) -> None:
    """P10: the receiver keeps no half, and the sender finds out that its own memory is bad."""
    a, b, _ = peers
    slot = a.sealed_frozen()
    assert slot.frozen is not None
    slot.frozen.extent[5000] ^= 1
    ok, reason = await a.replicator.replicate(JOB, slot, 1, "b")
    assert not ok and "frozen part" in reason
    assert b.arrived == [] and b.arena.slots == {}
    await eventually(lambda: a.damage)
    assert len(a.damage) == 1 and b.refused == [], "the holder finds it before it sends a byte"


async def test_no_memory_for_the_frozen_part_is_said(peers: tuple[Peer, Peer, Post]) -> None:
    a, b, _ = peers
    b.arena.budget_bytes = b.arena._pool._budget_bytes = 1 << 20
    ok, reason = await a.replicator.replicate(JOB, a.sealed_frozen(), 1, "b")
    assert not ok and "memory" in reason
    assert b.arena.slots == {}


async def test_a_frozen_part_may_take_longer_than_the_word_on_the_bytes(
    peers: tuple[Peer, Peer, Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model is many times what the adapter's replica is. A sender that gave up would offer it anew, and each try takes
    memory of its own at the peer while all wait for the same frozen part (P8)."""
    a, b, _ = peers
    monkeypatch.setattr(settle, "REPEAT_S", 0.05)
    monkeypatch.setattr(replicate, "VERIFY_TIMEOUT_S", 0.3)
    arm("fetch.serve:sleep=1.2")
    assert await a.replicator.replicate(JOB, a.sealed_frozen(), 1, "b") == (True, "")
    assert len(b.arrived) == 1 and is_sound(b.arrived[0])
    assert len(b.arena.slots) == 2


async def test_a_receiver_that_falls_silent_after_the_last_byte_is_given_up(
    peers: tuple[Peer, Peer, Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, post = peers
    monkeypatch.setattr(settle, "REPEAT_S", 0.05)
    monkeypatch.setattr(replicate, "VERIFY_TIMEOUT_S", 0.3)
    arm("fetch.serve:sleep=3")
    offered = 0

    def copies(sender: str, to: str, message: object) -> int:
        nonlocal offered
        offered += isinstance(message, ReplicaOffer)
        return 0 if sender == "b" and offered > 3 else 1

    post.copies = copies
    assert await a.replicator.replicate(JOB, a.sealed_frozen(), 1, "b") == (False, "no word after the last byte")
