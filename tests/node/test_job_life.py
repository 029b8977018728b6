"""A job's life on its daemon (D19): who died, who said goodbye, and whose memory the next job gets (P8, P15)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine.ranks import DIED
from ckptd.daemon import losses
from ckptd.wire import rank as wire
from ckptd.wire.world import pack_world
from tests.node.daemon_rig import Rig, everything, layout_here, rig
from tests.node.links import eventually, stays
from tests.node.rank_child import rank_child
from tests.node.slots import write_payload

MIB = 1 << 20
SMALL = 4 * MIB
BIG = 20 * MIB  # three own slots of it are all of the rig's 64 MiB
DEAD_JOBS = 300


def phase(house: Rig, job: str) -> str:
    shell = house.daemon.jobs.get(f"{os.getuid()}/{job}")
    return shell.summary()["phase"] if shell is not None else "forgotten"


async def durable_steps(house: Rig, job: str) -> list[int]:
    rows = await house.shell(job).durable.steps()
    return [row["step"] for row in rows if row["durable"]]


async def until_durable(house: Rig, job: str, step: int) -> None:
    for _ in range(3000):
        if step in await durable_steps(house, job):
            return
        await stays(lambda: True, 0.01)
    raise AssertionError(f"step {step} never became durable")


async def test_the_next_job_gets_the_memory_of_one_that_was_killed_and_is_durable(tmp_path: Path) -> None:
    """The first row: it got no memory, ever."""
    async with rig(storage_root=tmp_path / "ckpt", breakpoint_grace_s=0.2) as house:
        async with rank_child(house, "first", BIG) as child:
            await child.order("seal 5")
            await child.kill()
        await until_durable(house, "first", 5)
        rank = house.rank("second")
        rank.join("b", BIG)
        await rank.heard(wire.Ready)
        await eventually(
            lambda: len(house.shell("second").local_slots.slots) == house.daemon.services.policy.own_slots,
            what=f"slots for the next job; problems: {house.problems()}",
        )
        assert house.shell("first").local_slots.slots == {}


async def test_a_killed_job_is_not_running(tmp_path: Path) -> None:
    async with rig() as house, rank_child(house, "first", SMALL) as child:
        await child.order("seal 5")
        await eventually(lambda: phase(house, "first") == "running")
        await child.kill()
        await eventually(lambda: phase(house, "first") != "running", what="it is not running")
        assert phase(house, "first") == "orphaned"


@pytest.mark.parametrize("end", ["killed", "goodbye"])
async def test_nothing_is_waited_for_where_a_job_is_over_or_begins_anew(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/healthz stayed 503: "waiting for a rank: rank 0 on rig ended" """
    monkeypatch.setattr(losses, "LASTING_S", 0.0)
    async with rig() as house:
        async with rank_child(house, "first", SMALL) as child:
            await child.order("seal 5")
            await (child.kill() if end == "killed" else child.order("goodbye"))
        await eventually(lambda: phase(house, "first") == ("orphaned" if end == "killed" else "finished"))
        await eventually(lambda: "waiting" not in house.problems(), what="a job that is over waits for nobody")
        await stays(lambda: "waiting" not in house.problems(), 0.3)
        rank = house.rank("first")
        rank.join("again", SMALL)
        await rank.heard(wire.Opened)
        await stays(lambda: "waiting" not in house.problems(), 0.3)  # it reads what it wants back
        assert phase(house, "first") == "restoring"


async def test_degradation_of_a_job_that_is_over_alarms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It tries a higher level once a minute: an alarm each time, of a job that had long ended."""
    async with rig() as house:
        async with rank_child(house, "first", SMALL) as child:
            await child.order("seal 5")
            house.shell("first")._alarm(ins.Alarm("degradation", "protection goes down while it trains"))
            assert house.problems()["degradation"] == "protection goes down while it trains"
            await child.order("goodbye")
        await eventually(lambda: phase(house, "first") == "finished")
        house.shell("first")._alarm(ins.Alarm("degradation", "protection goes up once it is over"))
        house.shell("first")._alarm(ins.Alarm("breakpoint", "this is said all the same"))
        assert "degradation" not in house.problems()
        assert "once it is over" not in caplog.text and "all the same" in caplog.text


async def test_the_degradation_alarm_goes_with_a_protected_snapshot_on_the_uppermost_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """"protection goes up to replicas=1" kept /healthz at 503 for ten minutes."""
    async with rig() as house:
        rank = house.rank("job")
        await rank.begin("a")
        shell = house.shell("job")
        lower = {**shell.machine.view(), "degradation": 1}
        monkeypatch.setattr(shell.machine, "view", lambda: lower)
        shell._alarm(ins.Alarm("degradation", "protection goes down to xor(4): n1: no memory"))
        await rank.sealed(5)
        assert "degradation" in house.problems(), "though the lower level survives as many losses"
        monkeypatch.undo()
        shell._alarm(ins.Alarm("degradation", "protection goes up to replicas=1: there has been memory for a while"))
        await rank.sealed(9)
        await eventually(lambda: "degradation" not in house.problems(), 10, "all is as the policy wants it")


async def test_who_takes_a_seat_ends_what_the_process_before_was_doing() -> None:
    """It lives, superseded, and the slots that it was filling stayed its own: nobody hears any more that it gave them up."""
    async with rig() as house, rank_child(house, "job", SMALL) as child:
        machine = house.shell("job").machine
        await eventually(lambda: machine.slots.filling(), what="slots granted to the first")
        rank = house.rank("job")
        two = asdict(house.daemon.services.node), {**asdict(house.daemon.services.node), "node": "away"}
        rank.say_join(wire.Join("b", 0, SMALL, {}), pack_world(["rig", "away"], list(two)))
        await eventually(lambda: machine.joining.join is not None, what="the newer start")
        assert machine.ranks.here[0].left == DIED and not machine.slots.filling()
        assert child.process.returncode is None
        await child.kill()
        await stays(lambda: machine.joining.join is not None, 0.3)  # its end says nothing of its successor


async def test_a_slot_is_told_before_it_is_given_where_the_process_before_had_it_mapped() -> None:
    """While that one lived its sealed slot was nobody else's. It ended, the slot came free, and was given to each grant, which
    the new process gave back, "no memory", for ever (P14)."""
    async with rig() as house, rank_child(house, "job", SMALL) as child:
        await child.order("seal 5")
        rank = house.rank("job")
        rank.join("b", SMALL)
        opened, catalogue = await rank.opened()
        await child.kill()
        rank.want(opened.round, everything(layout_here()), tuple(catalogue["objects"]))
        await rank.heard(wire.LoadPlan)
        rank.say(wire.Loaded(opened.round, True))
        await rank.heard(wire.Ready)
        slots = house.shell("job").local_slots.slots
        given = set()
        for step in range(6, 12):
            grant, _ = await rank.heard(wire.GrantSlot)
            assert grant.slot in rank.views, "the trainer has never heard of it"
            given.add(grant.slot)
            rank.say(wire.Called(max(step, grant.from_step)))
            objects = write_payload(rank.views[grant.slot], layout_here(), seed=step)
            rank.seal(grant, max(step, grant.from_step), layout_here(), objects)
        assert given == set(slots)


async def test_a_finished_job_without_storage_is_freed_after_its_linger() -> None:
    async with rig(job_linger_s=0.3) as house:
        async with rank_child(house, "first", SMALL) as child:
            await child.order("seal 5")
            assert house.daemon.arena.used_bytes > 0
            await child.order("goodbye")
        await eventually(lambda: house.daemon.arena.used_bytes == 0, what="the finished job's memory is free")
        await eventually(lambda: phase(house, "first") == "forgotten", what="the finished job is forgotten")


def plant_dead_jobs(state: Path, count: int, node: str = "rig") -> None:
    """What starts of so many jobs left in the state directory: their ranks are gone, and the memory with the machine."""
    (state / "epochs").mkdir(parents=True, mode=0o700)
    member = NodeInfo(node, "tcp://127.0.0.1:1", "127.0.0.1:2", node)
    for number in range(count):
        record = EpochRecord(3, f"n{number}", (node,), (member,))
        life = {"state": "orphaned", "since": 0.0}
        facts = {"job": f"{os.getuid()}/dead-{number}", "record": asdict(record), "ran": None, "life": life}
        (state / "epochs" / f"{os.getuid()}.dead-{number}.json").write_text(json.dumps(facts))


async def test_dead_jobs_cost_nothing_once_they_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_dead_jobs(tmp_path / "state", DEAD_JOBS)
    async with rig(state_dir=tmp_path / "state", job_linger_s=0.2) as house:
        from ckptd.observe.sight import ALL

        before = len(house.daemon.metrics.render().splitlines())
        await eventually(lambda: not house.daemon.jobs, what=f"{len(house.daemon.jobs)} jobs are still known")
        lines = len(house.daemon.status.routes().metrics(ALL).splitlines())
        assert lines <= before + 20, f"{lines} lines of /metrics"
        assert list((tmp_path / "state" / "epochs").iterdir()) == []


@pytest.mark.parametrize("starts", [1, 2])
async def test_a_job_that_crashed_before_its_first_snapshot_and_was_let_go_starts_again(tmp_path: Path, starts: int) -> None:
    """D11: a second crash within job_linger_s, and the next start was refused (a reader's history)."""
    async with rig(storage_root=tmp_path / "ckpt", job_linger_s=0.3) as house:
        for number in range(starts):
            rank = house.rank("job")
            await rank.begin(f"try-{number}")
            rank.say(wire.Goodbye(False))  # an exception before its first snapshot
            rank.close()
            house.ranks.remove(rank)
        await eventually(lambda: phase(house, "job") == "forgotten", what="it is let go")
        await house.rank("job").begin("at-last")
        assert phase(house, "job") == "running"
