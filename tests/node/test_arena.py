"""Slots, segments and the budget of one arena in one process (D1, P6, P8)."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from ckptd.arena.arena import Arena, MetaTooLarge, NoMemory, Slot, SlotMisuse, Tenant
from ckptd.arena.header import EXTENTS_AT
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import Layout
from ckptd.core.state_map.layout_build import build_layout
from ckptd.process import Process
from tests.node.slots import JOB, MIB, OWN, PEER, fill_and_seal, small_arena, small_layout
from tests.waiting import until


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = small_arena()
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that stands for a trainer."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_slot_goes_free_filling_sealed_free(arena: Arena) -> None:
    slot = arena.allocate(OWN, 3 * MIB)
    assert (slot.state, slot.record, slot.capacity) == ("free", None, 3 * MIB)
    record = fill_and_seal(slot, step=8)
    assert (slot.state, slot.record) == ("sealed", record)
    slot.free()
    assert (slot.state, slot.record) == ("free", None)


def test_a_slot_refuses_what_its_state_forbids(arena: Arena) -> None:
    slot = arena.allocate(OWN, 3 * MIB)
    record = fill_and_seal(slot, step=1)
    with pytest.raises(SlotMisuse, match="sealed"):
        slot.fill()
    with pytest.raises(SlotMisuse, match="sealed"):
        slot.seal(record)
    arena.retire(slot)
    with pytest.raises(SlotMisuse, match="gone"):
        slot.free()


def test_a_record_of_another_rank_or_larger_than_the_slot_is_refused(arena: Arena) -> None:
    slot = arena.allocate(OWN, 3 * MIB)
    with pytest.raises(SlotMisuse, match="another's"):
        fill_and_seal(slot, step=1, rank=1)
    small = arena.allocate(OWN, 3 * MIB, 4096)
    with pytest.raises(MetaTooLarge) as error:
        fill_and_seal(small, step=1, layout=_many_fragments())
    assert error.value.needed > 4096
    assert small.state == "filling"


def _many_fragments() -> Layout:
    shape = (3,)
    items = [(f"layer.{i}.bias", "F32", shape, Box.whole(shape), "param", "maybe", 1) for i in range(100)]
    return build_layout(0, 2, items, objects_capacity=4096)


def test_memory_is_sealed_against_resizing_and_against_more_seals(arena: Arena) -> None:
    """A trainer that could shrink it would kill the daemon (SIGBUS); one that could seal it would block re-adoption."""
    fd = arena.allocate(OWN, MIB).segment.fd
    for size in (0, 64 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE


def test_a_reader_descriptor_cannot_write(arena: Arena) -> None:
    slot = arena.allocate(PEER, MIB)
    slot.payload[:5] = b"bytes"
    fd = slot.segment.open_read()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, slot.segment.size)
    with mmap.mmap(fd, slot.segment.size, prot=mmap.PROT_READ) as mapped:
        assert mapped[slot.offset : slot.offset + 5] == b"bytes"
    os.close(fd)


def test_two_tenants_never_share_a_segment(arena: Arena) -> None:
    """P13: neither users, nor jobs, nor two ranks' own slots; only the replicas of one job."""
    tenants = [
        OWN, Tenant(JOB, 1000, "own", 1), Tenant("1000/other", 1000, "own", 0), Tenant("1001/gpt", 1001, "own", 0),
        PEER, Tenant("1001/gpt", 1001, "peer", 7), Tenant(JOB, 1000, "scratch", 0),
    ]  # fmt: skip
    for _ in range(3):  # also over releases: freed extents stay with their tenant
        slots = [arena.allocate(tenant, 1000) for tenant in tenants]
        assert len({slot.segment.name for slot in slots}) == len(tenants)
        for slot in slots:
            arena.release(slot)
    one, two = arena.allocate(PEER, 1000), arena.allocate(Tenant(JOB, 1000, "peer", 8), 1000)
    assert one.segment is two.segment
    assert one.payload.obj is two.payload.obj
    assert one.row.end <= two.offset


def test_budget_refusal_names_what_is_missing_and_counts_idle_memory_as_free(arena: Arena) -> None:
    """P8: what does not fit is refused before anything is touched; unused segments make room by themselves."""
    first = arena.allocate(OWN, 30 * MIB)
    arena.allocate(OWN, 20 * MIB)
    with pytest.raises(NoMemory, match=r"budget of 64\.0 MiB has no room for 2\d\.\d MiB \[\d\.\d MiB missing, .*: 5\d\.\d MiB\]"):
        arena.allocate(OWN, 20 * MIB)
    assert arena.used_bytes < 54 * MIB
    arena.release(first)
    assert arena.allocate(Tenant(JOB, 1000, "own", 1), 25 * MIB).capacity == 25 * MIB
    assert arena.used_bytes <= 64 * MIB


def test_budgets_are_per_user(arena: Arena) -> None:
    """A share binds only while another user lacks memory, which he does when he is refused what lies within his own (D19)."""
    small, refused, other = small_arena(20 * MIB, uid_budget_bytes=9 * MIB), [], Tenant("5/x", 5, "own", 0)
    small.on_short(lambda uid, nbytes: refused.append(uid))
    first, second = small.allocate(OWN, 6 * MIB), small.allocate(OWN, 5 * MIB)
    assert small.used_by(1000) > small.share_bytes, "nobody else asks"
    with pytest.raises(NoMemory, match="memory budget of"):
        small.allocate(other, 7 * MIB)
    with pytest.raises(NoMemory, match="share of uid 1000"):
        small.allocate(OWN, MIB)
    assert refused == [5, 1000]
    small.retire(second)
    assert small.allocate(other, 7 * MIB), "and has it now"
    small.retire(first)
    assert small.allocate(OWN, 5 * MIB)
    with pytest.raises(NoMemory, match="memory budget of"):
        small.allocate(other, 7 * MIB)
    assert small.allocate(OWN, MIB), "he wants more than his share: nobody makes room for that"
    small.close()


def test_simultaneous_allocations_cannot_both_take_the_last_gap() -> None:
    arena = small_arena(20 * MIB)
    start = threading.Barrier(8)

    def ask(rank: int) -> Slot | None:
        start.wait()
        try:
            return arena.allocate(Tenant(JOB, 1000, "own", rank), 4 * MIB)
        except NoMemory:
            return None

    with ThreadPoolExecutor(8) as pool:
        slots = [slot for slot in pool.map(ask, range(8)) if slot]
    assert len(slots) == 3
    assert arena.used_bytes <= 20 * MIB
    arena.close()


def test_simultaneous_replicas_in_new_segments_never_overlap() -> None:
    """A segment must not be seen by others before its first slot lies in it."""
    arena = small_arena(512 * MIB, segment_bytes=4 * MIB)
    start = threading.Barrier(8)

    def ask(number: int) -> list[Slot]:
        start.wait()
        return [arena.allocate(PEER, 100_000 + number, 4096) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        slots = [slot for made in pool.map(ask, range(8)) for slot in made]
    places = sorted((slot.segment.name, slot.offset, slot.row.end) for slot in slots)
    assert len({slot.id for slot in slots}) == len(slots) == 160
    for (name, _, end), (other, at, _) in pairwise(places):
        assert name != other or end <= at
    arena.close()


def test_the_machine_must_have_room_too() -> None:
    arena = small_arena(64 * MIB, reserve_bytes=1 << 60)
    with pytest.raises(NoMemory, match="machine has no room"):
        arena.allocate(OWN, MIB)
    assert arena.used_bytes == 0
    arena.close()


def test_own_memory_is_reused_by_its_rank_and_retired_memory_by_nobody(arena: Arena) -> None:
    slot = arena.allocate(OWN, 4 * MIB)
    segment = slot.segment.name
    arena.release(slot)
    again = arena.allocate(OWN, 4 * MIB)
    assert again.segment.name == segment
    assert again.id != slot.id
    arena.retire(again)
    assert arena.allocate(OWN, 4 * MIB).segment.name != segment


def test_memory_that_a_living_process_maps_goes_to_no_other(
    arena: Arena, sleeper: subprocess.Popen[bytes]
) -> None:
    """D1: a mapping cannot be revoked, so only pidfd proof of death makes the memory usable again."""
    trainer, successor = Process.open(sleeper.pid), Process.open(os.getpid())
    slot = arena.allocate(OWN, 4 * MIB, mapper=trainer)
    segment = slot.segment.name
    assert arena.lend(slot, trainer)
    assert arena.lend(slot, trainer), "the same process again"
    assert arena.foreign_mapper(slot, successor)
    assert not arena.lend(slot, successor)
    arena.release(slot)
    assert arena.allocate(OWN, 4 * MIB, mapper=successor).segment.name != segment
    arena.trim()
    assert trainer.alive, "what the arena does with its memory does not end the watch over the process"
    slot = arena.allocate(OWN, 4 * MIB, mapper=trainer)
    segment = slot.segment.name
    assert arena.lend(slot, trainer)
    arena.release(slot)
    sleeper.kill()
    until(lambda: not trainer.alive, what="the trainer's pidfd")
    assert arena.allocate(OWN, 4 * MIB, mapper=successor).segment.name == segment


def test_retired_memory_returns_even_while_a_stopped_trainer_maps_it(arena: Arena) -> None:
    slot = arena.allocate(OWN, 8 * MIB)
    fd = os.dup(slot.segment.fd)
    with mmap.mmap(fd, slot.segment.size) as mapped:
        mapped[slot.offset : slot.offset + 8 * MIB] = b"x" * (8 * MIB)
        assert os.fstat(fd).st_blocks * 512 >= 8 * MIB
        arena.retire(slot)
        until(lambda: os.fstat(fd).st_blocks == 0, what="pages given back")
        assert mapped[slot.offset] == 0, "and the trainer does not crash when it looks"
    until(lambda: arena.used_bytes == 0)
    os.close(fd)


def test_many_replicas_over_time_do_not_fragment() -> None:
    """Replicas of drifting sizes, two generations alive at a time, in a budget with little to spare."""
    arena = small_arena(120 * MIB, segment_bytes=8 * MIB)
    alive: list[list[Slot]] = []
    for generation in range(60):
        if len(alive) == 2:
            for slot in alive.pop(0):
                arena.release(slot)
        sizes = [MIB // 4 + 4096 * generation, 2 * MIB + 8192 * generation, 20 * MIB + 16384 * generation]
        alive.append([arena.allocate(PEER, size, 64 * 1024) for size in sizes])
    live = sum(slot.capacity for slots in alive for slot in slots)
    assert live > 40 * MIB
    for slots in alive:
        for slot in slots:
            arena.release(slot)
    arena.trim()
    until(lambda: arena.used_bytes == 0)
    arena.close()


def test_trim_returns_what_is_unused_and_keeps_what_is_not(arena: Arena) -> None:
    kept, dropped = arena.allocate(OWN, MIB), arena.allocate(Tenant(JOB, 1000, "own", 1), MIB)
    fill_and_seal(arena.allocate(OWN, 3 * MIB), step=1)
    arena.release(dropped)
    assert arena.trim() == EXTENTS_AT + 2 * MIB
    assert arena.slots.keys() >= {kept.id}
    assert dropped.id not in arena.slots


def test_destroying_a_segment_under_a_reader_is_harmless(arena: Arena) -> None:
    slot = arena.allocate(PEER, 2 * MIB)
    slot.payload[:] = b"\1" * slot.capacity
    view = slot.payload[:MIB]
    arena.retire(slot)
    until(lambda: arena.used_bytes == 0)
    assert set(view[:4096]) <= {0}, "zeros, which no sum matches"


def test_prefault_makes_the_pages_in_a_child_that_is_first_to_die() -> None:
    """The daemon pays for the pages; allocating beyond a limit ends a child only (the OOM test needs root)."""
    arena = small_arena(64 * MIB, prefault=True)
    slot = arena.allocate(OWN, 16 * MIB)
    assert os.fstat(slot.segment.fd).st_blocks * 512 >= 16 * MIB
    arena.close()


def test_the_toucher_works_without_populate_write_and_without_a_parent() -> None:
    from ckptd.arena import toucher

    fd = os.memfd_create("test")
    os.ftruncate(fd, 3 * MIB + 4096)
    command = [sys.executable, "-I", "-S", toucher.__file__, str(fd), str(3 * MIB), "1"]
    assert subprocess.run(command, pass_fds=(fd,), check=False).returncode == toucher.EXIT_ORPHAN
    with mmap.mmap(fd, 3 * MIB + 4096) as mapped:
        toucher.MADV_POPULATE_WRITE, before = 9999, toucher.MADV_POPULATE_WRITE
        try:
            toucher.touch(mapped, 0, 3 * MIB + 4096)
        finally:
            toucher.MADV_POPULATE_WRITE = before
    assert os.fstat(fd).st_blocks * 512 == 3 * MIB + 4096
    os.close(fd)


def test_layouts_that_do_not_fit_are_not_sealed(arena: Arena) -> None:
    slot = arena.allocate(OWN, 4096)
    layout = small_layout()
    with pytest.raises(ValueError, match=r"assignment|slice"):
        fill_and_seal(slot, step=1, layout=layout)
