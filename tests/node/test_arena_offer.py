"""Memory that a trainer offers back to a daemon that lost it: taken only where it belongs (D1, P7, P13)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptd.arena import segment_pool
from ckptd.arena.arena import Arena, Slot, Tenant
from ckptd.arena.segment import Segment
from ckptd.process import Process
from tests.node.slots import JOB, MIB, OWN, PEER, fill_and_seal, small_arena


@pytest.fixture
def trainer() -> Iterator[Process]:
    process = Process.open(os.getpid())
    yield process
    process.close()


@pytest.fixture
def lost() -> Iterator[Slot]:
    """A sealed slot of a daemon that died without a keeper; the trainer still has the descriptor."""
    arena = small_arena()
    slot = arena.allocate(OWN, 3 * MIB)
    fill_and_seal(slot, step=6)
    yield slot
    arena.close()


def offer(
    arena: Arena, slot: Slot, trainer: Process, said: list[str] | None = None, *, job: str = JOB, uid: int = 1000
) -> list[Slot]:
    return take({slot.segment.name: slot.segment.fd}, arena, trainer, said, job=job, uid=uid)


def take(
    fds: dict[str, int], arena: Arena, trainer: Process, said: list[str] | None = None, *, job: str = JOB, uid: int = 1000
) -> list[Slot]:
    def refused(name: str, error: Exception) -> None:
        if said is not None:
            said.append(str(error))

    return arena.take_offer(fds, job=job, uid=uid, process=trainer, refused=refused)


def test_own_memory_is_taken_back_whole_and_the_mapper_is_known(lost: Slot, trainer: Process) -> None:
    arena = small_arena()
    (slot,) = offer(arena, lost, trainer)
    assert (slot.id, slot.record, slot.state) == (lost.id, lost.record, "sealed")
    assert slot.payload == lost.payload
    assert arena.foreign_mapper(slot)
    assert not arena.foreign_mapper(slot, trainer)
    assert arena.used_bytes == lost.segment.size
    os.fstat(lost.segment.fd)  # the offered descriptor stays the caller's
    assert offer(arena, lost, trainer) == [slot], "an offer of what is there changes nothing"
    assert arena.used_bytes == lost.segment.size
    arena.close()


def test_a_clock_that_was_set_back_takes_no_memory(lost: Slot, trainer: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: numbers are made of the time, and one of a minute that was yet to come again was none that a daemon gives."""
    first, said = segment_pool._first, list[str]()
    monkeypatch.setattr(segment_pool, "_first", lambda: first() - (60 << 16))
    arena = small_arena()
    (slot,) = offer(arena, lost, trainer, said)
    assert slot.record == lost.record and not said
    assert arena.allocate(OWN, MIB).id > slot.id


def test_nobody_finds_room_in_offered_memory_before_its_mapper_is_known(
    lost: Slot, trainer: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: another thread could have placed a slot for another process there."""
    arena, alone = small_arena(), list[bool]()
    real = Segment.lend

    def lend(segment: Segment, process: Process) -> bool:
        alone.append(arena._pool.lock._is_owned())  # type: ignore[attr-defined]
        return real(segment, process)

    monkeypatch.setattr(Segment, "lend", lend)
    assert offer(arena, lost, trainer) and alone == [True]
    arena.close()


@pytest.mark.parametrize(("job", "uid"), [("1001/gpt", 1001), ("1000/other", 1000), (JOB, 0)])
def test_memory_of_another_job_or_user_is_not_taken(lost: Slot, trainer: Process, job: str, uid: int) -> None:
    arena, said = small_arena(), list[str]()
    assert offer(arena, lost, trainer, said, job=job, uid=uid) == []
    assert "does not belong" in said[0]
    assert arena.used_bytes == 0
    arena.close()


def test_replicas_cannot_be_offered_by_a_trainer(trainer: Process) -> None:
    """It could have made them up: what peers hold comes from peers."""
    before, arena = small_arena(), small_arena()
    slot = before.allocate(PEER, 3 * MIB)
    assert offer(arena, slot, trainer) == []
    before.close()
    arena.close()


def test_an_offer_beyond_the_budget_is_refused(lost: Slot, trainer: Process) -> None:
    arena = small_arena(4 * MIB)
    arena.allocate(Tenant(JOB, 1000, "own", 1), MIB)
    said: list[str] = []
    assert offer(arena, lost, trainer, said) == []
    assert "no room" in said[0]
    arena.close()


def test_offers_do_not_make_more_segments_than_a_keeper_can_hand_back(
    lost: Slot, trainer: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: each user may offer many, and there are many users."""
    monkeypatch.setattr(segment_pool, "SEGMENTS_MAX", 1)
    arena, said = small_arena(), list[str]()
    arena.allocate(PEER, MIB)
    assert offer(arena, lost, trainer, said) == []
    assert "1 segments exist" in said[0]
    arena.close()


def test_another_memory_under_a_known_name_is_ignored(lost: Slot, trainer: Process) -> None:
    arena = small_arena()
    known = offer(arena, lost, trainer)
    other = os.memfd_create("other")
    assert take({lost.segment.name: other}, arena, trainer) == []
    assert list(arena.slots.values()) == known
    os.close(other)
    arena.close()
