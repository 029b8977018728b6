"""The segment header: torn writes leave the older header valid, anything corrupt or forged is refused (P6, P7, P13)."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ckptd.arena import memory
from ckptd.arena.arena import Arena, Slot, Tenant
from ckptd.arena.header import (
    HEADER_BYTES,
    MAPPERS_MAX,
    SLOTS_PER_SEGMENT_MAX,
    Header,
    SlotRow,
    encode_header,
    place_of,
)
from ckptd.arena.segment import Segment
from ckptd.arena.sums import bad_blocks
from ckptd.core import failpoint
from ckptd.process import Process
from tests.node.slots import JOB, MIB, OWN, PEER, fill_and_seal, small_arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = small_arena()
    yield made
    failpoint.arm("")
    made.close()


def reborn(*slots: Slot) -> tuple[Arena, dict[int, Slot]]:
    """What a new daemon finds in the memory of these slots."""
    fds = {slot.segment.name: slot.segment.fd for slot in slots}
    arena = small_arena()
    return arena, {slot.id: slot for slot in arena.adopt({name: os.dup(fd) for name, fd in fds.items()})}


def test_sealed_slots_come_back_as_they_were_with_their_ids(arena: Arena) -> None:
    """P7: nothing is copied, payload, record and sums agree; FILLING is dropped, FREE stays."""
    own, filling, free = (arena.allocate(OWN, 3 * MIB) for _ in range(3))
    peers = [arena.allocate(PEER, 3 * MIB) for _ in range(2)]
    records = {slot.id: fill_and_seal(slot, step) for step, slot in enumerate([own, *peers])}
    filling.fill(9)
    again, slots = reborn(own, filling, free, *peers)
    assert {i: slot.record for i, slot in slots.items() if slot.record} == records
    assert {i: slot.state for i, slot in slots.items()} == {
        own.id: "sealed", filling.id: "free", free.id: "free", peers[0].id: "sealed", peers[1].id: "sealed",
    }  # fmt: skip
    assert {i: slot.tenant for i, slot in slots.items()} == {s.id: s.tenant for s in arena.slots.values()}
    assert again.used_bytes == arena.used_bytes
    for slot in slots.values():
        if slot.record:
            assert bad_blocks(slot.payload, slot.record.layout, slot.record.sums) == []
    assert again.allocate(Tenant(JOB, 1000, "own", 5), MIB).id not in slots, "ids are never given twice"


def test_released_and_retired_slots_do_not_come_back(arena: Arena) -> None:
    one, two = arena.allocate(PEER, 3 * MIB), arena.allocate(PEER, 3 * MIB)
    fill_and_seal(one, 1)
    arena.release(one)
    _, slots = reborn(two)
    assert set(slots) == {two.id}


@pytest.mark.parametrize("where", ["arena.header.half", "arena.seal.meta"])
def test_a_seal_that_is_cut_short_never_happened(arena: Arena, where: str) -> None:
    """P6: the daemon dies in the middle of the header, or between the record and the header."""
    slot, other = arena.allocate(PEER, 3 * MIB), arena.allocate(PEER, 3 * MIB)
    record = fill_and_seal(other, 1)
    failpoint.arm(f"{where}:error")
    with pytest.raises(failpoint.FailpointError):
        fill_and_seal(slot, 2)
    failpoint.arm("")
    _, slots = reborn(slot)
    assert (slots[slot.id].state, slots[other.id].record) == ("free", record)


def test_a_free_that_is_cut_short_keeps_the_older_snapshot(arena: Arena) -> None:
    slot = arena.allocate(OWN, 3 * MIB)
    record = fill_and_seal(slot, 1)
    failpoint.arm("arena.header.half:error")
    with pytest.raises(failpoint.FailpointError):
        slot.free()
    failpoint.arm("")
    _, slots = reborn(slot)
    assert slots[slot.id].record == record


def test_any_damage_to_the_ledger_is_survived_or_refused_never_believed(arena: Arena) -> None:
    """Bytes of one header: the other one counts. Of both: the memory is refused and its pages are not trusted."""
    slot = arena.allocate(OWN, 3 * MIB)
    record = fill_and_seal(slot, 1)
    view, noise = slot.segment.view, random.Random(3)
    saved = bytes(view[: 2 * HEADER_BYTES])
    newest = place_of(slot.segment._serial)
    for _ in range(60):
        at = noise.randrange(120)  # within the shorter of the two
        view[newest + at] ^= 1 << noise.randrange(8)
        view[HEADER_BYTES - newest + at] ^= 1 << noise.randrange(8)
        arena_after, slots = reborn(slot)
        assert slots == {}
        assert "no valid header" in arena_after.refused[0][1]
        view[: 2 * HEADER_BYTES] = saved
        view[HEADER_BYTES - newest + at] ^= 1
        _, slots = reborn(slot)
        assert slots[slot.id].record == record
        view[: 2 * HEADER_BYTES] = saved


def test_a_record_that_does_not_match_its_sum_is_dropped(arena: Arena) -> None:
    good, bad = arena.allocate(PEER, 3 * MIB), arena.allocate(PEER, 3 * MIB)
    fill_and_seal(good, 1)
    fill_and_seal(bad, 2)
    bad.segment.view[bad.offset + bad.capacity + 20] ^= 1
    _, slots = reborn(good)
    assert (slots[good.id].state, slots[bad.id].state) == ("sealed", "free")


FORGERIES: dict[str, Callable[[Header], Header]] = {
    "another user's job": lambda h: replace(h, tenant=Tenant("0/gpt", 0, "own", 0)),
    "another name": lambda h: replace(h, name=h.name.replace("own", "peer")),
    "another size": lambda h: replace(h, size=h.size * 2),
    "a slot outside": lambda h: replace(h, slots=(replace(h.slots[0], capacity=1 << 40),)),
    "a slot over the segment header": lambda h: replace(h, slots=(replace(h.slots[0], offset=0),)),
    "overlapping slots": lambda h: replace(h, slots=(h.slots[0], replace(h.slots[0], id=5))),
    "a slot twice": lambda h: replace(h, slots=(h.slots[0], replace(h.slots[0], offset=h.slots[0].end))),
    "an unknown state": lambda h: replace(h, slots=(replace(h.slots[0], state="golden"),)),
    "a huge record": lambda h: replace(h, slots=(replace(h.slots[0], meta_bytes=1 << 40),)),
    "a process that the kernel has no number for": lambda h: replace(h, mappers=((1 << 40, 5),)),
    "a serial that cannot grow": lambda h: replace(h, serial=(1 << 64) - 1),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_trainer_cannot_forge_its_way_with_a_valid_checksum(arena: Arena, forgery: str) -> None:
    """P13: the trainer maps the segment header writable. What it writes there counts only for its own rank's memory."""
    slot = arena.allocate(OWN, 3 * MIB)
    fill_and_seal(slot, 1)
    header = slot.segment._header()
    for serial in (header.serial + 1, header.serial + 2):
        forged = FORGERIES[forgery](replace(header, serial=serial))
        data = encode_header(forged)
        slot.segment.view[place_of(serial) : place_of(serial) + len(data)] = data
    after, slots = reborn(slot)
    assert slots == {}
    assert len(after.refused) == 1
    assert after.used_bytes == 0


def test_a_record_of_another_job_is_dropped(arena: Arena) -> None:
    slot = arena.allocate(OWN, 3 * MIB)
    fill_and_seal(slot, 1)
    from ckptd.arena.record import encode_record

    assert slot.record is not None
    for wrong in (replace(slot.record, job="1000/other"), replace(slot.record, rank=1)):
        with slot.segment.lock:
            row = slot.segment.write_meta(slot.row, encode_record(wrong))
            slot.row = row
            slot.segment.write_ledger()
        _, slots = reborn(slot)
        assert slots[slot.id].state == "free"


def test_memory_that_is_not_ours_is_refused() -> None:
    """Unsealed, or made read-only by somebody, or with a name that no arena gives."""
    arena = small_arena()
    name = f"own-1-{OWN.tag}"
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    read, write = os.pipe()
    os.close(write)
    assert arena.adopt({name: plain, f"own-2-{OWN.tag}": read, "../../etc": os.dup(0)}) == []
    assert [name for name, _ in arena.refused] == [name, f"own-2-{OWN.tag}"]
    empty = memory.make_memfd("empty", MIB)
    assert arena.adopt({name: empty}) == []
    arena.close()


def test_a_slot_id_that_is_taken_refuses_the_segment(arena: Arena) -> None:
    slot = arena.allocate(OWN, MIB)
    fd = os.dup(slot.segment.fd)
    assert arena.adopt({slot.segment.name: fd}) == []
    assert "exists already" in arena.refused[0][1]


def test_the_fullest_header_fits_its_place() -> None:
    job = "4294967295/" + "j" * 100
    tenant = Tenant(job, 4294967295, "scratch", 0)
    rows = tuple(
        SlotRow((1 << 62) + i, 1 << 50, 1 << 50, 1 << 50, "filling", 1 << 40, b"s" * 16)
        for i in range(SLOTS_PER_SEGMENT_MAX)
    )
    mappers = ((1 << 22, 1 << 60),) * MAPPERS_MAX
    header = Header("scratch-" + "f" * 20 + "-" + "0" * 16, 1 << 50, tenant, "i" * 32, mappers, rows, 1 << 61)
    assert len(encode_header(header)) <= HEADER_BYTES


def test_adoption_remembers_who_maps_the_memory() -> None:
    """D1: the daemon was restarted, the trainer was not; its memory is still given to no other process."""
    arena = small_arena()
    slot = arena.allocate(OWN, MIB)
    here = Process.open(os.getpid())
    assert arena.lend(slot, here)
    again, slots = reborn(slot)
    other = Process.open(os.getppid())
    assert again.foreign_mapper(slots[slot.id], other)
    assert not again.foreign_mapper(slots[slot.id], here)
    assert isinstance(slots[slot.id].segment, Segment)
    other.close()


@pytest.fixture
def thread_number() -> Iterator[int]:
    """What is a thread's of some process: threads are numbered among the processes."""
    go, begun, numbers = threading.Event(), threading.Event(), []

    def stand() -> None:
        numbers.append(threading.get_native_id())
        begun.set()
        go.wait(30)

    thread = threading.Thread(target=stand)
    thread.start()
    begun.wait(10)
    yield numbers[0]
    go.set()
    thread.join()


def test_memory_comes_back_though_the_number_of_its_rank_is_a_threads_by_now(arena: Arena, thread_number: int) -> None:
    """P7: the rank died hours ago and its job's memory lies orphaned; the kernel has given its number to something else."""
    slot = arena.allocate(OWN, 3 * MIB)
    rank = Process.open(os.getpid())
    rank.pid, rank.started = thread_number, 5
    assert arena.lend(slot, rank)
    record = fill_and_seal(slot, step=8)
    again, slots = reborn(slot)
    assert again.refused == []
    assert slots[slot.id].record == record
    assert not again.foreign_mapper(slots[slot.id])


def test_memory_whose_ranks_cannot_be_looked_at_now_stays_with_the_keeper(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: the daemon lacks a descriptor while it starts; its next start has the memory, and only damage is given up."""
    slot = arena.allocate(OWN, MIB)
    assert arena.lend(slot, Process.open(os.getpid()))
    fd, name, forgotten = os.dup(slot.segment.fd), slot.segment.name, []

    def lacks(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    again = small_arena()
    monkeypatch.setattr(again._pool.keeper, "remove", forgotten.append)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", lacks)
        assert again.adopt({name: fd}) == []
    assert [of for of, _ in again.refused] == [name] and forgotten == []
    assert again.adopt({name: memory.make_memfd("empty", MIB)}) == [] and forgotten == [name]
    again.close()
