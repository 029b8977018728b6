"""What peers ask of a slot that is freed and filled anew meanwhile: an error, never other bytes, never a false alarm (P1, P10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.protect import fetch
from ckptd.wire.peer import FetchBad
from tests.node.daemon_rig import rig
from tests.node.links import eventually
from tests.node.peers import Peer, Post
from tests.node.slots import JOB, fill_and_seal

SNAPSHOT = SnapshotId(3, 7)


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def holder(post: Post) -> Iterator[Peer]:
    peer = Peer(post, "holder")
    yield peer
    peer.close()


@pytest.fixture
def asker(post: Post, holder: Peer) -> Iterator[Peer]:
    peer = Peer(post, "asker")
    yield peer
    peer.close()


async def test_parts_of_blocks_that_change_after_they_were_verified_are_not_served(
    asker: Peer, holder: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder sums what it sends there: sums of another snapshot's bytes would pass at the asker."""
    slot, real = holder.sealed(7), fetch._sums

    def refill_first(*args: Any) -> bytes:
        slot.free()
        fill_and_seal(slot, 8)
        return real(*args)

    monkeypatch.setattr(fetch, "_sums", refill_first)
    into = bytearray(100)
    ok, reason, _ = await asker.fetcher.fetch(JOB, "holder", SNAPSHOT, 0, ((5000, 100),), memoryview(into))
    assert not ok and "freed" in reason
    assert not holder.damage


async def test_a_second_look_at_a_slot_that_was_filled_anew_finds_no_damage(
    holder: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new content does not match the old sums, and is good all the same."""
    slot, looks = holder.sealed(7), []
    real = fetch.count_bad

    async def refill_first(work: Any, payload: Any, *rest: Any) -> int:
        slot.free()
        fill_and_seal(slot, 8)
        looks.append(await real(work, payload, *rest))
        return looks[0]

    monkeypatch.setattr(fetch, "count_bad", refill_first)
    holder.fetcher.on_message("asker", JOB, FetchBad(SNAPSHOT, 0))
    await eventually(lambda: looks and not holder.fetcher._tasks.running)
    assert looks[0] > 0 and not holder.damage


async def test_answers_with_their_sums_are_not_kept_for_ever(
    asker: Peer, holder: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are megabytes for a large slot, and a restore asks for hundreds."""
    monkeypatch.setattr(fetch, "SERVED_KEPT_S", 0.05)
    slot = holder.sealed(7)
    assert slot.record is not None
    ok, *_ = await asker.fetcher.fetch(JOB, "holder", SNAPSHOT, 0, ((0, 4096),), memoryview(bytearray(4096)))
    assert ok
    await eventually(lambda: not holder.fetcher._served)


async def test_a_replica_nobody_wants_takes_no_memory(asker: Peer, holder: Peer) -> None:
    """P8: peer_sets bounds what a peer keeps of a rank, before the bytes travel."""
    asker.replicator.refusal = lambda job, snapshot, rank: "full"
    assert await holder.replicator.replicate(JOB, holder.sealed(7), 1, "asker") == (False, "full")
    assert not asker.arena.slots and not asker.arrived
    asker.replicator.refusal = lambda job, snapshot, rank: ""
    assert await holder.replicator.replicate(JOB, holder.sealed(8), 1, "asker") == (True, "")


async def test_the_daemon_asks_its_machine_before_it_takes_a_replica() -> None:
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        shell, refusal = house.shell(), house.daemon.services.replicator.refusal
        assert refusal(shell.job, SnapshotId(1, 5), 1) == ""
        shell.machine.slots.mark_void(SnapshotId(1, 5), "the test")
        assert refusal(shell.job, SnapshotId(1, 5), 1) == "void"
        assert refusal("1/unknown", SnapshotId(1, 5), 1) == ""
        assert "1/unknown" not in house.daemon.jobs


async def test_the_daemon_counts_what_it_refused_on_arrival() -> None:
    async with rig() as house:
        services = house.daemon.services
        for room in (services.replicator, services.fetcher):
            room.on_refused(JOB, "peer")
        line = f'ckptd_quarantines_total{{job="{JOB}",where="wire"}} 2.0'
        assert line in house.daemon.metrics.render().decode()


async def test_a_damaged_copy_is_reported_once_and_only_what_was_looked_at() -> None:
    """P10: a slot that holds something else by now is not quarantined for what it held before."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        shell = house.shell()
        slot = next(slot for slot in shell.all_slots() if slot.record is not None)
        record = slot.record
        assert record is not None
        shell.damaged(slot, None, "late")
        assert "damage" not in house.problems() and shell.held(record.snapshot, 0) is slot
        shell.machine.slots.pin("the test", record.snapshot)
        shell.damaged(slot, record, "seen")
        assert "seen" in house.problems()["damage"]
        assert (
            slot.record is record and shell.held(record.snapshot, 0) is None
        )  # pinned, but nobody is served from it
        shell.damaged(slot, record, "seen again")
        assert "again" not in house.problems()["damage"]
        shell.machine.slots.unpin("the test")
