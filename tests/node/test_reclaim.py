"""Whose memory goes when somebody lacks it (D19, P8): the order, whose share, what storage says at that moment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ckptd.daemon import reclaim
from ckptd.daemon.job import JobShell
from ckptd.observe.sight import ALL
from ckptd.persist.names import DAMAGED, step_dir
from ckptd.wire import rank as wire
from tests.node.daemon_rig import Rig, rig
from tests.node.links import eventually, stays
from tests.node.rank_child import rank_child
from tests.node.test_job_life import BIG, MIB, SMALL, phase, until_durable

ANOTHER = os.getuid() + 7  # a user


async def killed(house: Rig, job: str, nbytes: int, *, durable: bool = True) -> JobShell:
    async with rank_child(house, job, nbytes) as child:
        await child.order("seal 5")
        await eventually(lambda: len(house.shell(job).local_slots.slots) == house.daemon.services.policy.own_slots)
        await child.kill()
    await eventually(lambda: phase(house, job) == "orphaned")
    if durable:
        await until_durable(house, job, 5)
    return house.shell(job)


def released(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "released" in record.getMessage()]


async def test_storage_that_does_not_answer_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is known of it: durable is asked at that moment."""
    caplog.set_level(logging.INFO)
    root = tmp_path / "ckpt"
    async with rig(storage_root=root, breakpoint_grace_s=0.2) as house:
        dead = await killed(house, "dead", BIG)
        root.rename(tmp_path / "away")
        rank = house.rank("next")
        rank.join("b", BIG)
        await eventually(lambda: "no_memory" in house.problems())
        await eventually(lambda: "storage" in house.problems())
        await stays(lambda: bool(dead.machine.slots.sealed), 0.3)
        assert all("durable" not in line for line in released(caplog))
        (tmp_path / "away").rename(root)
        house.daemon.reclaim.short(os.getuid(), BIG)  # as the next try says
        await eventually(lambda: not dead.machine.slots.sealed)
        await eventually(lambda: len(house.shell("next").local_slots.slots) == house.daemon.services.policy.own_slots)
        assert [line for line in released(caplog) if "orphaned and durable" in line]
        assert 'ckptd_reclaimed_bytes_total{why="orphaned and durable"}' in house.daemon.metrics.render(ALL).decode()


async def test_what_is_not_durable_stays_but_for_slots_with_nothing_in_them(caplog: pytest.LogCaptureFixture) -> None:
    """One newest complete snapshot waits for the operator."""
    caplog.set_level(logging.INFO)
    async with rig(orphan_linger_s=0.1) as house:
        dead = await killed(house, "dead", BIG, durable=False)
        held = dict(dead.machine.slots.sealed)
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await eventually(lambda: len(dead.local_slots.slots) == 1)
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await stays(lambda: dead.machine.slots.sealed == held, 0.3)
        assert all("ranks that are gone" in line for line in released(caplog)) and released(caplog)


async def test_the_operator_may_let_go_of_the_last_snapshot_of_an_orphan() -> None:
    async with rig(orphan_linger_s=0.1, orphan_drop=True) as house:
        dead = await killed(house, "dead", BIG, durable=False)
        await stays(lambda: bool(dead.machine.slots.sealed), 0.3)  # nobody lacks memory
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await eventually(lambda: house.daemon.arena.used_bytes == 0)
        assert not dead.machine.slots.sealed and not dead.local_slots.slots


@pytest.mark.parametrize("nbytes", [BIG, pytest.param(BIG // 2, marks=pytest.mark.chaos)])
async def test_another_users_need_takes_no_snapshot_within_the_owners_share(nbytes: int, tmp_path: Path) -> None:
    """Of 64 MiB half are the owner's, and the dead job's snapshot takes less. Empty slots go for anybody, whatever the share."""
    async with rig(storage_root=tmp_path, breakpoint_grace_s=0.2) as house:
        arena = house.daemon.arena
        dead = await killed(house, "dead", nbytes)
        one = max(slot.size for slot in dead.local_slots.slots.values())
        assert one < arena.share_bytes == 32 * MIB and arena.used_bytes - 2 * one < arena.share_bytes
        house.daemon.reclaim.short(ANOTHER, 60 * MIB)
        await eventually(lambda: len(dead.local_slots.slots) == 1, what=f"of {len(dead.local_slots.slots)} slots one is not empty")
        house.daemon.reclaim.short(ANOTHER, 60 * MIB)
        await stays(lambda: bool(dead.machine.slots.sealed), 0.3)
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await eventually(lambda: not dead.local_slots.slots)


async def test_a_running_job_gives_nothing_however_little_there_is(tmp_path: Path) -> None:
    async with rig(storage_root=tmp_path) as house, rank_child(house, "lives", SMALL) as child:
        await child.order("seal 5")
        shell = house.shell("lives")
        await eventually(lambda: len(shell.local_slots.slots) == house.daemon.services.policy.own_slots)
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        house.daemon.reclaim.short(ANOTHER, 60 * MIB)
        await stays(lambda: len(shell.local_slots.slots) == house.daemon.services.policy.own_slots, 0.3)
        assert shell.machine.slots.sealed and phase(house, "lives") == "running"


async def test_a_durable_orphan_goes_after_its_linger_although_nobody_lacks_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is known no more."""
    monkeypatch.setattr(reclaim, "ASK_AGAIN_S", 0.1)
    async with rig(storage_root=tmp_path, breakpoint_grace_s=0.2, orphan_linger_s=2.0, job_linger_s=0.1) as house:
        await killed(house, "dead", SMALL)
        await eventually(lambda: phase(house, "dead") == "forgotten")
        await eventually(lambda: house.daemon.arena.used_bytes == 0)
        rank = house.rank("dead")
        rank.join("again", SMALL)
        opened, _ = await rank.heard(wire.Opened)
        assert opened.snapshot is not None and opened.snapshot[1] == 5, "what is on storage comes back"


async def test_memory_does_not_go_for_what_is_known_to_be_damaged_on_storage(tmp_path: Path) -> None:
    """A job's last step had been read back, and `ckptd ls` called it damaged: the good copy in memory went all the same."""
    async with rig(storage_root=tmp_path, breakpoint_grace_s=0.2) as house:
        async with rank_child(house, "first", BIG) as child:
            await child.order("seal 5")
            await child.kill()
        await until_durable(house, "first", 5)
        shell = house.shell("first")
        (snapshot,) = shell.machine.slots.sealed
        storage = house.daemon.services.storage
        assert storage is not None
        directory = Path(storage.locate(step_dir(shell.job, snapshot)))
        await eventually(lambda: list(directory.glob("read-*")))
        (directory / DAMAGED).write_text("block 0 is not what was written")
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await stays(lambda: bool(shell.machine.slots.sealed), 1.0)
        (directory / DAMAGED).unlink()
        house.daemon.reclaim.short(os.getuid(), 60 * MIB)
        await eventually(lambda: not shell.machine.slots.sealed)
