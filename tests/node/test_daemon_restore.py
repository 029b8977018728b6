"""The restore phases of a daemon when something is late, hangs, fails or comes twice (P1, P5, P8, P9, P10)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from ckptd.arena.arena import NoMemory
from ckptd.core.protocol import instructions as ins
from ckptd.core.state_map.box import Box, runs
from ckptd.daemon import restore as module
from ckptd.daemon.local_slots import LocalSlots
from ckptd.daemon.restore import Round
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import StorageError
from ckptd.persist.sums import FileDamage
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import memfd_object, read_memfd_object
from tests.node.daemon_rig import Rank, Rig, everything, layout_here, rig
from tests.node.links import eventually, stays
from tests.node.pieces import rows_in
from tests.node.slots import write_payload


class Stall:
    """A thread that stands still where the test says, as one that reads from storage that hangs."""

    def __init__(self) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.arrived.set()
        assert self.go.wait(20), "the test let it hang"

    async def reached(self) -> None:
        await eventually(self.arrived.is_set)


async def durable_step(rank: Rank, step: int) -> None:
    await rank.sealed(step)
    await rank.durable(step)


async def in_another_life(house: Rig, rank: Rank, attempt: str) -> Rank:
    """Everything that memory held is gone, a new start stands at restore()."""
    rank.say(wire.Goodbye(False))
    rank.close()
    shell = house.shell()
    await eventually(lambda: not shell.local_slots.sizing())
    house.daemon._forget_job(shell.job)
    again = house.rank()
    again.join(attempt)
    return again


async def test_room_is_lent_again_only_when_the_last_reader_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P10: a round that was called off may still have a thread in the middle of a read. The slot it reads into is
    neither granted nor lent to the next round, until that thread is out of it."""
    stall = Stall()
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        again = await in_another_life(house, rank, "b")
        real, reads = Checkpoint.read, []

        def slow(self: Checkpoint, key: str, box: Any, dest: memoryview, of: int | None = None) -> None:
            reads.append(key)
            if len(reads) == 1:
                stall.wait()
            real(self, key, box, dest, of)

        monkeypatch.setattr(Checkpoint, "read", slow)
        opened, _ = await again.opened()
        again.want(opened.round, everything(layout_here()))
        await stall.reached()
        shell = house.shell()
        (lent,) = shell.local_slots.lent
        shell.restore.fail(ins.FailRestore(opened.round, "timeout", "the test"))
        await again.heard(wire.Failed)
        await stays(lambda: lent in shell.local_slots.lent and lent not in shell.local_slots.by_rank[0].free)
        assert lent not in shell.machine.slots.by_id  # so no steward counts on it
        stall.go.set()
        await eventually(lambda: lent in shell.local_slots.by_rank[0].free and lent in shell.machine.slots.by_id)
        assert not shell.local_slots.lent


async def test_a_resize_leaves_a_lent_slot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: its memory was given back to the machine under the thread that fetched into it."""
    stall = Stall()
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        again = await in_another_life(house, rank, "b")
        real = Checkpoint.read

        def slow(self: Checkpoint, *rest: Any) -> int:
            stall.wait()
            return real(self, *rest)

        monkeypatch.setattr(Checkpoint, "read", slow)
        opened, _ = await again.opened()
        again.want(opened.round, everything(layout_here()))
        await stall.reached()
        shell = house.shell()
        (lent,) = shell.local_slots.lent
        again.say(wire.Resize(6 << 20))
        await eventually(lambda: shell.local_slots.by_rank[0].state_bytes == 6 << 20 and not shell.local_slots.sizing())
        assert len(shell.local_slots.slots[lent].payload) > 0
        stall.go.set()
        await again.heard(wire.LoadPlan)
        again.say(wire.Loaded(opened.round, True))
        await again.heard(wire.Ready)
        await eventually(lambda: lent not in shell.local_slots.slots)  # and it goes when it is of no more use


async def test_memory_is_restored_while_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: what memory holds is not asked of storage, and threads that hang there hold up nothing else."""
    stall = Stall()
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        rank.close()
        again = house.rank()
        again.join("b")
        opened, catalogue = await again.opened()
        monkeypatch.setattr(
            house.shell().restore._round.host, "open_checkpoint", lambda snapshot: stall.wait()
        )
        again.want(opened.round, everything(layout_here()), tuple(catalogue["objects"]))
        await again.heard(wire.LoadPlan)
        again.say(wire.Loaded(opened.round, True))
        await again.heard(wire.Ready)
        await again.sealed(4)
        assert not stall.arrived.is_set()


async def test_a_restore_that_hangs_in_storage_leaves_the_work_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: sums, replicas and allocations of every job go on."""
    stall = Stall()
    async with rig(storage_root=tmp_path) as house:
        rank, other = house.rank(), house.rank("other")
        await other.begin("o")
        await rank.begin("a")
        await durable_step(rank, 3)
        again = await in_another_life(house, rank, "b")
        monkeypatch.setattr(Checkpoint, "read", lambda self, *rest: stall.wait())
        opened, _ = await again.opened()
        again.want(opened.round, everything(layout_here()))
        await stall.reached()
        await other.sealed(1)
        assert [snapshot.step for snapshot in house.shell("other").levels] == [1]
        assert house.shell().restore._round is not None and not stall.go.is_set(), "the restore hangs all the while"
        stall.go.set()


@pytest.mark.parametrize("names", [("scheduler", "nobody")])
async def test_wants_that_nobody_has_are_refused_at_once(
    names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Not after restore_timeout_s: the task that looked for them used to die without a word. The daemon's log has one as well."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(3)
        rank.close()
        again = house.rank()
        again.join("b")
        opened, _ = await again.opened()
        again.want(opened.round, everything(layout_here()), names)
        failed, _ = await again.heard(wire.Failed)
        assert failed.code == "mismatch" and "nobody" in failed.reason
        shell = house.shell()
        await eventually(lambda: shell.restore._round is None and not shell.restore._joined_at)
        said = [line for line in caplog.messages if "restore refused" in line]
        assert said == [f"job={shell.job}: restore refused: {failed.reason} [mismatch]"]
        again.join("c")  # as its program does that catches the error; what it hears now it takes for an answer to this
        await again.opened()
        assert not [message for message, _ in again.seen if isinstance(message, wire.Failed)]


async def test_wants_that_come_twice_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answer took the place of the first, whose descriptors stayed open for ever."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(3)
        rank.close()
        again = house.rank()
        again.join("b")
        opened, _ = await again.opened()
        for _ in range(3):
            again.want(opened.round, everything(layout_here()))
        await again.heard(wire.LoadPlan)
        current = house.shell().restore._round
        assert isinstance(current, Round) and len(current.tasks) == 2  # the offer and one answer


MANY = 40  # times the largest tensor, 1.2 MB, is wanted: more than what the budget below has left
TIGHT = "40MiB"


async def without_room(house: Rig, rank: Rank) -> tuple[Rank, int]:
    """A start that wants more from storage than fits. Returns it and its round."""
    await rank.begin("a")
    await durable_step(rank, 3)
    again = await in_another_life(house, rank, "b")
    opened, _ = await again.opened()
    shell = house.shell()
    await eventually(lambda: not shell.local_slots.sizing())
    again.want(opened.round, [["w", "F32", [600, 512], [0, 0], [600, 512]]] * MANY, ("scheduler",))
    return again, opened.round


def copied(note: wire.LoadPlan, fds: list[int], into: dict[int, bytearray]) -> dict[str, Any]:
    """What a rank does with one part: each piece into its tensor. Returns the plan."""
    plan: dict[str, Any] = msgpack.unpackb(
        read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), strict_map_key=False
    )
    assert len(fds) == 1 + len(note.segment_bytes) <= wire.FDS_PER_FRAME_MAX
    for want, box, segment, at, source in rows_in(plan):
        places = runs(Box.whole((600, 512)), box, 4)
        stored = runs(source, box, 4)
        data = b"".join(os.pread(fds[1 + segment], length, at + offset) for offset, length in stored)
        for offset, length in places:
            into[want][offset : offset + length] = data[:length]
            data = data[length:]
    for fd in fds:
        os.close(fd)
    return plan


async def test_what_does_not_fit_comes_in_parts(tmp_path: Path) -> None:
    """P1, P8: direct mode. Every byte, the next part only when the one before was copied, and never more memory than the
    budget."""
    async with rig(storage_root=tmp_path, memory_budget=TIGHT) as house:
        again, number = await without_room(house, house.rank())
        arena, peak = house.daemon.arena, 0
        tensors = {want: bytearray(600 * 512 * 4) for want in range(MANY)}
        seen: list[int] = []
        while True:
            note, fds = await again.heard(wire.LoadPlan)
            plan = copied(note, fds, tensors)
            peak = max(peak, arena.used_bytes)
            seen.append(plan["part"])
            assert plan["mode"] == "direct" and list(plan["objects"]) == ["scheduler"]
            if plan["last"]:
                break
            again.say(wire.LoadedPart(number, plan["part"] + 1))  # is not there yet: no answer
            again.say(wire.LoadedPart(number, plan["part"]))
            again.say(wire.LoadedPart(number, plan["part"]))  # once is enough
        assert seen == list(range(len(seen))) and len(seen) > 1
        layout = layout_here()
        expected = bytearray(layout.payload_bytes)
        write_payload(memoryview(expected), layout, seed=3)
        at = next(f.offset for f in layout.fragments if f.key == "w")
        assert all(bytes(tensor) == expected[at : at + len(tensor)] for tensor in tensors.values())
        assert peak <= arena.budget_bytes
        again.say(wire.Loaded(number, True))
        await again.heard(wire.Ready)


async def test_a_rank_that_says_it_loaded_before_the_last_part_is_not_believed(tmp_path: Path) -> None:
    """P1."""
    async with rig(storage_root=tmp_path, memory_budget=TIGHT) as house:
        again, number = await without_room(house, house.rank())
        await again.heard(wire.LoadPlan)
        again.say(wire.Loaded(number, True))
        failed, _ = await again.heard(wire.Failed)
        assert failed.code == "load" and "before it was" in failed.reason


async def test_damage_before_the_first_write_is_no_dirty_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: all parts are looked at before the vote; damage in the last of them is met before anything was handed over."""
    real, reads = Checkpoint.read, []

    def damaged(self: Checkpoint, *rest: Any) -> None:
        reads.append(1)
        if len(reads) == MANY // 2:
            raise FileDamage("block 0 does not match its sum")
        real(self, *rest)

    async with rig(storage_root=tmp_path, memory_budget=TIGHT) as house:
        monkeypatch.setattr(Checkpoint, "read", damaged)
        again, _ = await without_room(house, house.rank())
        failed, _ = await again.heard(wire.Failed)
        assert "dirty" not in failed.reason
        assert not [note for note, _ in again.seen if isinstance(note, wire.LoadPlan)]


async def test_damage_after_the_first_write_says_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D11: it cannot be undone, so it is said, with the remedy."""

    def gone(self: Checkpoint, *rest: Any) -> None:
        raise FileDamage("block 0 does not match its sum")

    async with rig(storage_root=tmp_path, memory_budget=TIGHT) as house:
        again, number = await without_room(house, house.rank())
        _, fds = await again.heard(wire.LoadPlan)
        for fd in fds:
            os.close(fd)
        monkeypatch.setattr(Checkpoint, "read", gone)
        again.say(wire.LoadedPart(number, 0))
        failed, _ = await again.heard(wire.Failed)
        assert failed.code == "load" and "its objects are dirty" in failed.reason, failed
        assert failed.hint == "", "a rank whose objects are dirty knows, and says what to do; others are in no need of it"
        shell = house.shell()
        await eventually(lambda: shell.restore._round is None and not shell.local_slots.lent)
        await eventually(lambda: not [s for s in house.daemon.arena.slots.values() if s.tenant.kind == "scratch"])


async def test_a_full_budget_leaves_one_megabyte_to_restore_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: a job is not lost because the arena is full; and when the machine itself is, the error names the remedy."""
    async with rig(storage_root=tmp_path) as house:
        arena = house.daemon.arena
        real = arena.allocate
        asked: list[tuple[int, bool]] = []
        machine_is_full = False

        def full(tenant: Any, nbytes: int, *rest: Any, beyond_budget: bool = False, **more: Any) -> Any:
            if tenant.kind != "scratch":
                return real(tenant, nbytes, *rest, **more)
            asked.append((nbytes, beyond_budget))
            if machine_is_full or not beyond_budget:
                raise NoMemory("no room")
            return real(tenant, nbytes, *rest, beyond_budget=True, **more)

        monkeypatch.setattr(arena, "allocate", full)
        monkeypatch.setattr(LocalSlots, "lend", lambda self, rank, nbytes: None)
        again, number = await without_room(house, house.rank())
        await again.heard(wire.LoadPlan)
        assert asked[-1] == (1 << 20, True) and [beyond for _, beyond in asked].count(True) == 1
        machine_is_full = True
        again.say(wire.Loaded(number, False, "the test has seen enough"))
        await again.heard(wire.Failed)
        again.join("c")
        opened, _ = await again.opened()
        again.want(opened.round, everything(layout_here()))
        failed, _ = await again.heard(wire.Failed, code="memory")
        assert "memory_budget" in failed.hint and "no room" in failed.reason


@pytest.mark.parametrize("which", ["catalogue", "wants", "plan"])
async def test_a_restore_that_lacks_a_descriptor_says_so_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """D11: nobody voted, so the ranks of all nodes waited until the restore's time was over."""
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        again = await in_another_life(house, rank, "b")
        failed: list[str] = []

        def lacks(real: Any) -> Any:
            def once(*args: Any) -> Any:
                if not failed:
                    failed.append(which)
                    raise OSError(errno.EMFILE, "Too many open files")
                return real(*args)

            return once

        def arm() -> None:
            name = "os" if which == "wants" else "memfd_object"
            lacking = SimpleNamespace(dup=lacks(os.dup), close=os.close) if which == "wants" else lacks(memfd_object)
            monkeypatch.setattr(module, name, lacking)

        if which == "catalogue":
            arm()
        opened, _ = await again.opened()
        if which != "catalogue":
            arm()
            again.want(opened.round, everything(layout_here()))
            await eventually(lambda: failed)
            second, _ = await again.heard(wire.Opened)
            assert second.round != opened.round and second.snapshot == opened.snapshot
            opened = second
        assert failed
        again.want(opened.round, everything(layout_here()))
        await again.heard(wire.LoadPlan)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENODEV])
async def test_a_moment_in_which_storage_does_not_answer_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """P1, D11: what is durable and cannot be reached is no damage. It is asked for again instead of the step before it."""
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3, 6)
        real, failed = house.daemon.services.storage.open_file, []

        def once(path: str) -> object:
            if path.endswith("step-0000000006/manifest.json") and not failed:
                failed.append(path)
                raise StorageError("open the file", where=path, errno=number)
            return real(path)

        again = await in_another_life(house, rank, "b")
        monkeypatch.setattr(house.daemon.services.storage, "open_file", once)
        opened, _ = await again.opened()
        assert failed and opened.snapshot is not None and opened.snapshot[1] == 6
        assert "damage" not in house.problems()


async def test_one_failed_source_does_not_cost_a_second_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P8: each plan anew took new room for the same bytes."""
    async with rig(storage_root=tmp_path) as house:
        rank = await house.durable(3)
        again = await in_another_life(house, rank, "b")
        opened, _ = await again.opened()
        shell = house.shell()
        await eventually(lambda: len(shell.local_slots.by_rank[0].free) == 3)

        def unreadable(self: Checkpoint, *rest: Any) -> None:
            raise FileDamage("block 0 does not match its sum")

        monkeypatch.setattr(Checkpoint, "read", unreadable)
        lent: list[int] = []
        real = shell.local_slots.lend
        monkeypatch.setattr(shell.local_slots, "lend", lambda *a: lent.append(1) or real(*a))
        again.want(opened.round, everything(layout_here()))
        await again.heard(wire.Failed)
        await eventually(lambda: not shell.local_slots.lent and len(shell.local_slots.by_rank[0].free) == 3)
        assert len(lent) == 1


async def test_a_restore_that_was_given_up_is_not_told_to_who_came_after() -> None:
    """D11: the round of a dead start ends when the next one opens its epoch. That end is not the next one's."""
    async with rig() as here:
        first = here.rank()
        await first.begin("a")
        await first.sealed(1)
        second = here.rank()
        second.join("b")
        await second.opened()  # and it never answers
        third = here.rank()
        third.join("c")
        await third.opened()
        assert not [message for message, _ in third.seen if isinstance(message, wire.Failed)]
