"""A job on its daemon: what goes wrong in one place stays there, and nothing is left behind (P5, P6, P13)."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ckptd.core.ids import NodeInfo
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.machine import levels
from ckptd.daemon import durable, job, ranks, reclaim, stragglers, supervisor
from ckptd.daemon.job import JobShell
from ckptd.wire import rank as wire
from ckptd.wire.world import RANKS_MAX, WORLD_BYTES_MAX, pack_world
from tests.node.daemon_rig import layout_here, rig
from tests.node.links import eventually, stays

MIB = 1 << 20


async def test_an_instruction_that_fails_does_not_take_its_batch_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        shell = house.shell()
        done: list[object] = []

        def fail(do: ins.Alarm) -> None:
            raise RuntimeError("nobody expected this")

        monkeypatch.setitem(shell._actions, ins.Alarm, fail)
        monkeypatch.setitem(shell._actions, ins.Supersede, done.append)
        batch = [ins.Alarm("degraded", "x"), ins.Supersede(0, 1)]
        monkeypatch.setattr(shell.machine, "handle", lambda event, now: batch)
        shell.feed(ev.NodeUp("somebody"))
        assert len(done) == 1
        assert "nobody expected this" in house.problems()["internal"]


async def test_a_machine_that_breaks_is_made_anew_and_finds_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P7, of one job: the others and the daemon do not notice, nothing that was sealed is lost."""
    monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.05)
    async with rig() as house:
        rank, other = house.rank(), house.rank("other")
        await rank.begin("a")
        await other.begin("b")
        await rank.sealed(5)
        shell = house.shell()
        broken = shell.machine

        def break_down(event: object) -> None:
            raise AssertionError("an invariant is broken")

        monkeypatch.setitem(broken._events, ev.NodeUp, break_down)
        shell.feed(ev.NodeUp("somebody"))
        await eventually(lambda: shell.machine is not broken and shell.machine.ctx.record is not None)
        assert "an invariant is broken" in house.problems()["internal"]
        again = house.rank()
        again.join("a", grant=rank.captured[5])  # as the client does when its connection broke
        await again.heard(wire.Ready)
        await eventually(lambda: shell.machine.levels.told)
        assert [row["step"] for row in await shell.durable.steps()] == [5]
        assert shell.machine.slots.facts()[0].snapshot.step == 5
        await again.sealed(6)
        await other.sealed(1)
        shell.machine.validate()


async def test_a_rank_is_not_told_that_it_trains_in_an_earlier_try_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the number under which its restore was tried again had not been written down when the daemon came back."""
    monkeypatch.setattr(supervisor, "PAUSE_FIRST_S", 0.05)
    async with rig() as house:
        await house.rank().begin("a")
        rank = house.rank()
        await rank.begin("b")
        await rank.sealed(5)
        shell = house.shell()
        broken, record = shell.machine, shell.record
        assert record is not None
        shell.record = replace(record, number=record.number - 1)
        monkeypatch.setitem(broken._events, ev.NodeUp, lambda event: 1 // 0)
        shell.feed(ev.NodeUp("somebody"))
        await eventually(lambda: shell.machine is not broken and shell.machine.ctx.record is not None)
        again, node = house.rank(), asdict(house.daemon.services.node)
        again.say_join(wire.Join("b", 0, layout_here().payload_bytes, None, trains=True), pack_world([node["node"]], [node]))
        await eventually(lambda: again.read() or any(isinstance(told, wire.GrantSlot) for told, _ in again.seen))
        assert [told.epoch for told, _ in again.seen if isinstance(told, wire.Ready)] == [], "it knows its epoch"
        await again.capture(6)
        assert (await again.heard(wire.Level, step=6))[0].epoch == record.number


async def test_a_rank_behind_the_others_is_named_until_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stragglers, "LOOK_EVERY_S", 0.0)
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.heard(wire.GrantSlot)
        known = house.shell().machine.steward.grants.ranks
        mine = known[0]
        known[1] = type(mine)(mine.epoch, 1, 7, 1, None, "")
        text = str(await eventually(lambda: house.problems().get("behind")))
        assert "rank" in text and "0 (step 0)" in text and "7" in text
        rank.say(wire.AskHealth(3))
        health, _ = await rank.heard(wire.Health, request=3)
        assert not health.ok and text in health.problems
        known[1] = type(mine)(mine.epoch, 1, 1, 1, None, "")
        await eventually(lambda: "behind" not in house.problems())


async def test_the_death_of_a_rank_is_heard_after_its_connection_ended() -> None:
    """P6: the session's descriptor goes with the session; the watch has its own, and none is left."""
    async with rig() as house:
        shell, process = None, await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        rank = house.rank()
        await rank.begin("a")
        shell = house.shell()
        own = shell.local_slots.by_rank[0]
        left: list[object] = []
        assert own.session is not None
        from ckptd.process import Process

        shell.local_slots.watch(
            own, Process.open(process.pid), lambda: left.append(1)
        )  # its Process is nobody's any more
        import gc

        gc.collect()
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        process.kill()
        await eventually(lambda: left)
        assert own.watched == -1
        for fd in taken:
            os.close(fd)
        await process.wait()


async def test_a_rank_that_came_back_is_not_declared_dead_by_its_old_process() -> None:
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        shell = house.shell()
        own = shell.local_slots.by_rank[0]
        rank.close()
        await eventually(lambda: own.watched >= 0)
        again = house.rank()
        again.join("a")
        await again.heard(wire.Ready)
        assert own.watched == -1


RIG = {"node": "rig", "control": "c", "bulk": "b", "domain": "d"}


@pytest.mark.parametrize(
    "world",
    [
        b"", b"\xc1", b"\x91" * 5000, msgpack.packb(7), msgpack.packb({"ranks": ["rig"]}),
        msgpack.packb({"ranks": ["rig"], "nodes": [RIG], "more": 1}),
        msgpack.packb({"ranks": "rig", "nodes": [RIG]}), msgpack.packb({"ranks": [7], "nodes": [RIG]}),
        msgpack.packb({"ranks": ["rig"], "nodes": RIG}), msgpack.packb({"ranks": ["rig"], "nodes": ["rig"]}),
        pack_world(["rig"], [{"node": 5}]), pack_world([], []), pack_world(["rig", "other"], [RIG]),
        pack_world(["rig"] * (RANKS_MAX + 1), [RIG]),
        pack_world(["rig"], [RIG | {"incarnation": [[]] * 9}]),
        msgpack.packb({"ranks": ["rig"], "nodes": [RIG | {"domain": msgpack.ExtType(1, b"x")}]}),
        bytes(WORLD_BYTES_MAX + 1), pack_world(["one\nline"], [RIG | {"node": "one\nline"}]),
    ],
    ids=range(18),
)  # fmt: skip
async def test_garbage_in_a_join_closes_that_connection_only(world: bytes) -> None:
    """P13."""
    async with rig() as house:
        rank, good = house.rank(), house.rank()
        sessions = house.daemon.rank_listener._link.sessions
        await eventually(lambda: len(sessions) == 2)
        rank.say_join(wire.Join("a", 0, 1, None), world)
        await eventually(lambda: len(sessions) == 1)
        await good.begin("a")
        assert len(sessions) == 1, "and it goes on"


async def test_a_join_without_a_sealed_world_closes_that_connection_only() -> None:
    """P13: nothing is read from what can still change, or is no memory at all."""
    async with rig() as house:
        ranks = [house.rank() for _ in range(3)]
        sessions = house.daemon.rank_listener._link.sessions
        await eventually(lambda: len(sessions) == 3)
        ranks[0].say(wire.Join("a", 0, 1, None))
        await eventually(lambda: len(sessions) == 2)
        with tempfile.TemporaryFile() as file:
            ranks[1].say(wire.Join("a", 0, 1, None), (file.fileno(),))
        await eventually(lambda: len(sessions) == 1)
        await ranks[2].begin("a")
        assert len(sessions) == 1, "and it goes on"


@pytest.mark.parametrize("storage", [True, False])
async def test_room_for_one_slot_is_said_to_come_back_with_storage(tmp_path: Path, storage: bool) -> None:
    """What was said was `no memory`, and no more, though snapshots went on, each as soon as storage had the one before."""
    settings = {"storage_root": tmp_path / "root"} if storage else {}
    async with rig(memory_budget="20MiB", **settings) as house:
        rank = house.rank()
        rank.join("a", 12 * MIB)
        await eventually(lambda: "no_memory" in house.problems())
        assert "rank 0 has 1 of 3 slots" in house.problems()["no_memory"]
        assert ("free again once storage has its snapshot" in house.problems()["no_memory"]) == storage


async def test_a_rank_that_trains_as_one_of_another_node_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its daemon had got a new name. "Sent garbage: rank 0 does not live on this node" was all, in the log."""
    told = asdict(NodeInfo("before", "tcp://before:1", "before:2", "before"))
    async with rig() as house:
        rank, again = house.rank(), house.rank()
        await rank.begin("a")
        for _ in range(2):
            stranger = house.rank()
            stranger.say_join(wire.Join("b", 0, 1, None), pack_world(["before"], [told]))
            refused, _ = await stranger.heard(wire.Refused)
        hint = "start the trainer again, or this daemon with --node-id before"
        assert "node before" in refused.what and "node rig" in refused.what and refused.hint == hint
        (problem,) = house.daemon.health.problems()
        assert (problem.kind, problem.count) == ("node_id", 2) and refused.what in problem.text and hint in problem.text
        assert [refused.what in record.message for record in caplog.records if record.levelno >= logging.WARNING] == [True]
        await again.begin("c")
        assert "node_id" not in house.problems()


async def test_a_world_of_4096_ranks_on_512_nodes_is_told_through_the_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame holds a few hundred nodes (D2)."""
    async with rig() as house:
        rank = house.rank()
        fed: list[Any] = []  # and not to the machine: nobody looks for 511 nodes that do not exist
        monkeypatch.setattr(JobShell, "feed", lambda shell, event: fed.append(event))
        nodes = [house.daemon.services.node]
        nodes += [NodeInfo(f"node-{n:04}", f"tcp://n{n}:1", f"n{n}:2", f"rack-{n // 8}") for n in range(1, 512)]
        ranks = tuple(node.node for node in nodes for _ in range(8))
        rank.say_join(wire.Join("a", 3, 1 << 20, None), pack_world(ranks, map(asdict, nodes)))
        await eventually(lambda: any(isinstance(event, ev.RankJoined) for event in fed))
        joined = [event for event in fed if isinstance(event, ev.RankJoined)]
        assert joined == [ev.RankJoined(3, "a", ranks, tuple(nodes), None)]


async def test_a_forgotten_job_begins_anew_for_who_was_connected_before() -> None:
    """The linger of the last run may end between hello and join of the next."""
    async with rig(job_linger_s=0.2) as house:
        rank = house.rank()
        await rank.begin("a")
        late = house.rank()
        await asyncio.sleep(0)
        await eventually(lambda: len(house.daemon.rank_listener._jobs) == 2)
        before = house.shell()
        rank.say(wire.Goodbye(True))
        await eventually(lambda: before is not house.daemon.jobs.get(before.job))
        await late.begin("b")
        await late.sealed(1)
        assert house.shell() is not before
        assert [snapshot.step for snapshot in house.shell().levels] == [1]


async def test_a_finished_job_keeps_its_memory_until_it_is_durable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And gives it back then, not only when the linger ends at the right moment (section 5). Storage is asked (D19)."""
    monkeypatch.setattr(reclaim, "LOOK_S", 0.02)
    monkeypatch.setattr(reclaim, "ASK_AGAIN_S", 0.02)
    monkeypatch.setattr(durable, "write_pieces", lambda *_, **__: b"")  # nothing that could be committed
    async with rig(job_linger_s=0.01, storage_root=tmp_path) as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(3)
        shell = house.shell()
        rank.say(wire.Goodbye(True))
        await eventually(lambda: shell.summary()["phase"] == "finished")
        newest = max(shell.levels)
        told = shell.levels[newest]
        shell.levels[newest] = ins.TellLevel(newest, told.level, told.wanted, True)  # whatever is believed here
        await stays(lambda: house.daemon.arena.used_bytes > 0)
        monkeypatch.undo()
        monkeypatch.setattr(reclaim, "ASK_AGAIN_S", 0.02)
        rank.waits(3, "durable")
        await eventually(lambda: house.daemon.arena.used_bytes == 0)
        await eventually(lambda: shell.job not in house.daemon.jobs)
        assert [row["step"] for row in await shell.durable.steps()] == [3], "nothing but storage has it now"


async def test_names_that_were_only_asked_about_are_forgotten() -> None:
    async with rig() as house:
        for number in range(3):
            rank = house.rank(f"ask-{number}")
            rank.say(wire.ListSteps(1))
            await rank.heard(wire.Steps)
            rank.close()
        await eventually(lambda: not house.daemon.jobs)
        assert house.daemon.rank_listener._jobs == {}, "nor does the door know them"


async def test_a_grant_that_comes_back_unused_is_no_lost_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    """At nearly each end of a job, which was durable by then, and after each restore, of "step -1"."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        grant, _ = await rank.heard(wire.GrantSlot)
        rank.say(wire.GaveUp(grant.grant, -1, "taken back"))
        rank.say(wire.GaveUp(grant.grant, 12, "the rank joins anew"))
        rank.say(wire.GaveUp(grant.grant, 13, "taken back: a newer epoch opened"))
        rank.say(wire.GaveUp(grant.grant, -1, "no memory"))
        await eventually(lambda: "no memory" in caplog.text)
        counted = house.daemon.services.metrics.render().decode()
    reasons = re.findall(r'ckptd_skips_total{job="[^"]*",reason="([^"]*)"} (\S+)', counted)
    assert sorted(reasons) == [("no memory", "1.0"), ("taken back", "1.0")], "not what was never begun"
    said = [record.getMessage().partition("given up, ")[2] for record in caplog.records if "given up" in record.getMessage()]
    assert said == [
        "taken back: snapshot of step 13: taken back: a newer epoch opened", "no memory: a grant before the first step: no memory",
    ], said  # fmt: skip


async def test_a_slot_whose_sums_are_being_made_is_not_granted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: sums over two captures would match the mixture."""
    import threading

    go = threading.Event()
    real = ranks.live_sums

    def slow(payload: memoryview, layout: Any, *rest: Any) -> bytes:
        assert go.wait(10)
        return real(payload, layout, *rest)

    monkeypatch.setattr(ranks, "live_sums", slow)
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        grant = await rank.capture(1)
        shell = house.shell()
        await eventually(lambda: shell.ranks.sealing)
        shell.feed(ev.RankMissed(0, grant.grant, "taken back"))  # the machine has given it up, and it is FREE
        assert shell.local_slots.slots[grant.slot].state == "free"
        taken: list[ev.Event] = []
        monkeypatch.setattr(shell, "feed", taken.append)
        shell.ranks.give_slot(ins.GiveSlot(0, grant.slot, 99, 2))
        assert isinstance(taken[0], ev.RankMissed) and shell.local_slots.slots[grant.slot].state == "free"
        monkeypatch.undo()
        monkeypatch.setattr(ranks, "live_sums", real)
        go.set()
        await eventually(lambda: not shell.ranks.sealing)
        await eventually(
            lambda: shell.local_slots.slots[grant.slot].record is None
        )  # and what came late counts for nothing


async def test_memory_of_a_rank_that_moved_away_comes_back_when_its_old_trainer_leaves() -> None:
    """P8: its FREE slots were kept while somebody of the old epoch still mapped them."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        shell = house.shell()
        await eventually(lambda: len(shell.local_slots.by_rank[0].slots) == 3)
        shell.local_slots.release_unused(frozenset())
        for slot in list(shell.local_slots.slots):
            shell._free_slot(ins.FreeSlot(slot))
        free = set(shell.local_slots.by_rank[0].free)
        await stays(lambda: len(free & shell.local_slots.slots.keys()) == 3)
        rank.close()
        await eventually(lambda: not free & shell.local_slots.slots.keys())
        assert len(free) == 3 and not free & house.daemon.arena.slots.keys(), "the arena has it back"


async def test_what_a_rank_found_written_past_its_fence_is_told_to_the_ranks() -> None:
    """And what is no such list closes that connection only."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        grant, _ = await rank.heard(wire.GrantSlot)
        rank.say(wire.GaveUp(grant.grant, 1, "written before the fence: model.w", {"model": ["model.w"]}))
        told, _ = await rank.heard(wire.WrittenThere)
        assert told == wire.WrittenThere(grant.grant, {"model": ["model.w"]})
        rank.say(wire.GaveUp(grant.grant, 1, "written", {"model": "model.w"}))  # type: ignore[dict-item]
        await eventually(lambda: house.shell().local_slots.by_rank[0].session is None)


async def test_faults_of_ours_that_a_rank_brings_about_are_one_trace_and_a_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P13: whoever may connect must not be able to fill the log."""
    handled = []

    def broken(*arguments: Any) -> None:
        handled.append(arguments)
        raise KeyError("nobody expected this")

    monkeypatch.setattr(ranks.Ranks, "on_message", broken)
    with caplog.at_level("WARNING"):
        async with rig() as house:
            for count in range(1, 9):
                house.rank().say(wire.ListSteps(1))
                await eventually(lambda: len(handled) == count)  # noqa: B023 - awaited here
            assert "KeyError" in house.problems()["internal"]
            traces = [record for record in caplog.records if record.exc_info]
            assert len(traces) == 1
    assert sum("7 more" in record.getMessage() for record in caplog.records if "could not" not in record.getMessage()) == 1


async def test_a_rank_hears_of_its_own_jobs_problems_and_the_nodes() -> None:
    """Another job of the same user was named without its name."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        for job in ("", house.shell().job, f"{os.getuid()}/other"):
            house.daemon.health.report("flush", f"told of {job!r}", job=job)
        rank.say(wire.AskHealth(3))
        health, _ = await rank.heard(wire.Health, request=3)
        assert sorted(health.problems) == ["told of ''", f"told of {house.shell().job!r}"]


async def test_a_job_that_trains_with_nothing_in_memory_is_degraded() -> None:
    """Also where no copies are wanted: all its snapshots are void, say."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        assert not house.shell().summary()["degraded"]
        house.shell().ranks.progress[0] = 1
        assert house.shell().summary()["degraded"]
        await rank.sealed(3)
        await eventually(lambda: not house.shell().summary()["degraded"])


async def test_a_node_that_an_epoch_does_not_concern_shows_no_level_of_an_older_one() -> None:
    """The job had moved to other nodes: this one went on to show as protected what had long been given up (P2)."""
    async with rig() as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(3)
        await eventually(lambda: house.shell().summary()["newest"]["sealed"] == 3)
        record = house.shell().record
        assert record is not None
        other = replace(record.nodes[0], node="elsewhere")
        moved = replace(record, number=record.number + 1, nonce="b", ranks=("elsewhere",), nodes=(other,))
        house.shell().record = replace(moved, ancestry=(max(house.shell().levels),))
        assert house.shell().summary()["newest"]["sealed"] == -1


async def test_the_newest_durable_step_is_shown_however_many_come_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(job, "LEVELS_KEPT_MAX", 2)
    monkeypatch.setattr(levels, "CERTIFICATES_KEPT_MAX", 2)
    async with rig(storage_root=tmp_path, flush_every_s=0.0) as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        rank.waits(1, "durable")
        await eventually(lambda: house.shell().summary()["newest"]["durable"] == 1)
        for step in range(2, 8):
            await rank.sealed(step)
        found = house.shell().summary()
        assert (found["newest"]["sealed"], found["newest"]["durable"], found["lag"]["durable"]) == (7, 1, 6)


@pytest.mark.parametrize("stored", [False, True])
async def test_before_the_first_durable_step_all_steps_are_behind(tmp_path: Path, stored: bool) -> None:
    """An alarm on the series could not go off for a job that never came so far."""
    async with rig(storage_root=tmp_path if stored else None, flush_every_s=600.0) as house:
        rank = house.rank()
        await rank.begin("a")
        assert house.shell().summary()["lag"] == {}, "nothing was trained"
        await rank.sealed(7)
        assert house.shell().summary()["lag"] == {"sealed": 0, **({"durable": 7} if stored else {})}


async def test_a_rank_whose_connection_broke_gets_what_it_waits_for() -> None:
    """P14: the grant that was in it stood, and no other one was made for this step: it waited until its own patience was over (a
    reader's history)."""
    async with rig(own_slots=2) as house:
        rank = house.rank()
        await rank.begin("a")
        await rank.sealed(1)
        rank.say(wire.Called(2, True))
        await eventually(lambda: any(slot.state == "filling" for slot in house.shell().machine.slots.by_id.values()))
        rank.close()  # and lives on
        again = house.rank()
        again.join("a")
        await again.heard(wire.Ready)
        again.say(wire.Called(2, True))
        await again.sealed(2)
        assert house.shell().summary()["newest"]["sealed"] == 2
