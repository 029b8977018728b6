"""What a simulated process hears, and in which order, as the real one does (wire/control.py, daemon/job.py)."""

from __future__ import annotations

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol.life import Tombstone
from ckptd.core.protocol.messages import FlushAsk, RestoreAsk
from tests.sim import forgetting
from tests.sim.breaks import break_down
from tests.sim.host import Host
from tests.sim.trainer import Run
from tests.sim.world import World


@pytest.fixture
def world() -> World:
    made = World(3)
    made.net.loss = made.net.repeat = made.net.straggle = 0.0
    for host in made.hosts.values():
        host.start()
    return made


def heard(world: World, host: Host, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the requests that come to it from now on."""
    steps: list[int] = []

    def feed(event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, FlushAsk):
            steps.append(event.message.step)

    monkeypatch.setattr(host, "feed", feed)
    return steps


def test_what_was_said_to_a_process_its_successor_does_not_hear(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = list(world.hosts.values())[:2]
    steps = heard(world, other, monkeypatch)
    world.net.send(one.name, other.name, FlushAsk(1, 1))
    other.stop()
    world.net.send(one.name, other.name, FlushAsk(1, 2))
    other.start()
    world.net.send(one.name, other.name, FlushAsk(1, 3))
    world.clock.run(world.clock.now + 5.0)
    assert steps == [3]


def test_once_its_successor_was_heard_nobody_hears_a_dead_process(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = list(world.hosts.values())[:2]
    steps = heard(world, other, monkeypatch)
    world.net.send(one.name, other.name, FlushAsk(1, 1))
    world.net.links.clogged[one.name, other.name] = world.clock.now + 2.0
    world.net.send(one.name, other.name, FlushAsk(1, 2))
    one.stop()
    world.clock.run(world.clock.now + 1.0)
    assert steps == [1], "words of the dead that nobody contradicts are words"
    one.start()
    world.net.links.clogged.clear()
    world.net.send(one.name, other.name, FlushAsk(1, 3))
    world.clock.run(world.clock.now + 5.0)
    assert steps == [1, 3]


def test_a_machine_made_anew_hears_what_its_links_have_told_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that a node was gone which nobody had missed, it was never told that it is back, and sent it no copies (P14)."""
    one, other = list(world.hosts.values())[:2]
    other.stop()
    one.stop()
    monkeypatch.setattr(world.net.rng, "random", lambda: 0.0)  # it learns of the dead by their silence
    one.start()
    break_down(one)
    world.clock.run(world.clock.now + 2.0)
    other.start()
    world.net.send(other.name, one.name, FlushAsk(1, 1))
    world.clock.run(world.clock.now + 5.0)
    assert not one.machine.view()["down"]


def test_what_comes_of_an_instruction_is_handled_before_what_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lent slot was given back, taken away by a resize that had waited, and then told as there again."""
    host = next(iter(world.hosts.values()))
    order: list[ev.Event] = []
    monkeypatch.setattr(host.machine, "handle", lambda event, now: order.append(event) or [])
    ready, gone, waited = ev.SlotsReady(0, (5,)), ev.SlotsGone(0, (5,)), ev.SlotsShort(0, "")
    monkeypatch.setattr(host, "_Alarm", lambda do: host.feed(ready), raising=False)
    host._batch.append(ins.Alarm("degraded", ""))
    host._queue.append(waited)
    host._free_at = world.clock.now
    host.at_leisure(host.feed, gone)
    world.clock.run(world.clock.now + 1.0)
    assert [event for event in order if event in (ready, gone, waited)] == [ready, waited, gone]


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_slot_that_comes_while_a_resize_waits_is_told_before_it_goes(
    world: World, monkeypatch: pytest.MonkeyPatch, squeezed: bool
) -> None:
    """The next of several, or what a squeeze that is over gives back: the machine granted one that was gone (seed 9326725289)."""
    host = next(iter(world.hosts.values()))
    proc = host.procs[0] = Run(world, "a1", [host], None).procs[0]
    there: set[int] = set()

    def handle(event: ev.Event, now: float) -> list[ins.Instruction]:
        if isinstance(event, ev.SlotsReady):
            there.update(event.slots)
        elif isinstance(event, ev.SlotsGone):
            there.difference_update(event.slots)
        return []

    monkeypatch.setattr(host.machine, "handle", handle)
    world.slot_s = 0.3
    host._room[0] = 100
    if squeezed:
        host.squeeze(True)
    else:
        host.grow(0)
    world.clock.run(world.clock.now + 0.2)
    host._free_at = world.clock.now + 0.2  # its event loop is at work
    host.at_leisure(host._size, host.life, proc)
    if squeezed:
        host.squeeze(False)
    world.clock.run(world.clock.now + 0.15)
    host._room[0] = 200
    world.clock.run(world.clock.now + 3.0)
    assert there == set(host.memory) and len(there) == world.policy.own_slots


def test_a_rank_whose_daemon_dies_before_it_has_read_the_join_connects_again(world: World) -> None:
    host = next(iter(world.hosts.values()))
    run = Run(world, "a1", [host], None)
    host._free_at = world.clock.now + 0.1  # its event loop is at work
    run.procs[0].connect()
    host.stop()
    host.start()
    world.clock.run(world.clock.now + 1.0)
    assert host.procs[0] is run.procs[0]


def test_a_rank_that_comes_while_a_node_forgets_the_job_is_let_in_by_the_next_machine(world: World) -> None:
    host = next(iter(world.hosts.values()))
    run = Run(world, "a1", [host], None)
    host._free_at = world.clock.now + 0.1
    run.procs[0].connect()
    forgetting.bury(host, ins.Bury(Tombstone(1, 1, 0)))
    world.clock.run(world.clock.now + 0.2)
    assert host.procs[0] is run.procs[0] and not host.buried


def test_who_was_gone_when_a_daemon_started_and_was_heard_is_told_to_be_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link says so of every peer that falls silent; here it did not of one that had been silent at the beginning, for ever
    (seed 8349000289)."""
    one, other = list(world.hosts.values())[:2]
    monkeypatch.setattr(world.net.rng, "random", lambda: 0.0)  # blind
    other.stop()
    one.stop()
    one.start()
    told: list[ev.Event] = []
    monkeypatch.setattr(one, "feed", told.append)
    other.start()
    world.net.send(other.name, one.name, FlushAsk(1, 1))
    world.clock.run(world.clock.now + 0.1)
    assert any(isinstance(event, ev.Received) for event in told)
    other.stop()
    world.clock.run(world.clock.now + 5.0)
    assert [event for event in told if isinstance(event, ev.NodeUp | ev.NodeDown)] == [ev.NodeDown(other.name)]


def test_a_peer_that_was_told_to_be_up_and_then_down_is_told_to_be_up_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first word, which came before the simulator looked again, took that away for ever (seed 9257316860 of another world)."""
    one, other = list(world.hosts.values())[:2]
    monkeypatch.setattr(world.net.rng, "random", lambda: 0.0)  # blind
    other.stop()
    one.stop()
    one.start()
    world.net.loss = 1.0
    told: list[ev.Event] = []
    monkeypatch.setattr(one, "feed", told.append)
    other.start()
    world.clock.run(world.clock.now + 5.0)
    world.net.split({other.name})
    world.clock.run(world.clock.now + 5.0)
    world.net.loss = 0.0
    world.net.heal()
    world.net.send(other.name, one.name, FlushAsk(1, 1))
    world.clock.run(world.clock.now + 5.0)
    seen = [event for event in told if isinstance(event, ev.NodeUp | ev.NodeDown)]
    assert seen == [ev.NodeUp(other.name), ev.NodeDown(other.name), ev.NodeUp(other.name)]


def test_a_rank_that_trains_asks_for_no_restore_when_it_joins_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the client does: it would be restored amid its training where nobody knows its epoch any more (seed 9326758575)."""
    host = next(iter(world.hosts.values()))
    run = Run(world, "a1", [host], RestoreAsk())
    asks: list[RestoreAsk | None] = []
    monkeypatch.setattr(host, "feed", lambda event: asks.append(event.ask) if isinstance(event, ev.RankJoined) else None)
    for running in (False, True):
        host.attach(run.procs[0], running=running)
        world.clock.run(world.clock.now + 1.0)
    assert asks == [RestoreAsk(), None]


def test_a_run_that_trains_and_is_told_that_nothing_protects_it_ends(world: World) -> None:
    """As its user would: it trained on without a snapshot for ever, which was taken for a P14 (seed 6773875539)."""
    host = next(iter(world.hosts.values()))
    run = Run(world, "a1", [host], RestoreAsk())
    proc = host.procs[0] = run.procs[0]
    proc.ready = True
    host._FailJoin(ins.FailJoin("another", "superseded", ""))
    assert proc.alive
    host._FailJoin(ins.FailJoin("a1", "superseded", ""))
    assert not proc.alive
