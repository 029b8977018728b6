"""Grants on the client's side (D9): late, taken back, waited for, no longer waited for, and those of calls that are interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptd_client import Box, Client, handles
from ckptd_client.capture import INTERRUPTED, Engine
from ckptd_client.copying import Copy
from ckptd_client.gradients import Accumulation
from ckptd_client.handles import Handle
from ckptd_client.job import Job
from ckptd_client.session import NO_GRANT_YET
from ckptd_client.snapshots import Snapshots

from ckptd.core.protocol.machine.steward import grants
from ckptd.wire import rank as wire
from tests.node.client_training import stepped
from tests.node.rank_daemon_double import RankDaemonDouble
from tests.waiting import until

NOT_YET = f"skipped: {NO_GRANT_YET}"


def test_a_step_that_was_granted_behind_one_that_a_rank_gave_up_is_tried_again() -> None:
    """It carried that one's reason, and a save that nobody had given up ended with it (make chaos on a busy machine)."""
    assert handles.BEHIND == grants.BEHIND
    own = f"rank 1 missed it: {handles.NOT_SAVED}: CkptdError: no such key"
    assert handles.given_up(f"void: {own}")
    assert not handles.given_up(f"void: {grants.BEHIND}: {own}")
    assert not handles.given_up("void: fence timeout")


def test_who_refuses_a_grant_of_the_step_it_gave_up_asks_again_for_the_one_it_waits_for(tmp_path: Path) -> None:
    """Whoever granted it had heard of the later step, and took that for answered: the save hung until its time was over."""
    with RankDaemonDouble(tmp_path / "d.sock", granting="never") as daemon, stepped(daemon) as (client, training):
        client.snapshot(1)
        session, daemon.on_asked = client._session, False
        session.call(3, 3, asks=True)
        with session.changed:
            assert session.grants.refuse(3, f"{handles.NOT_SAVED}: no such key") is None
        found: list[Handle] = []
        saving = threading.Thread(target=lambda: found.append(client.snapshot(4, must=True)))
        saving.start()
        asked = lambda: sum(said.step == 4 and said.asks for said in daemon.messages(wire.Called))  # noqa: E731
        daemon.wait_for(lambda: asked() == 1)
        late = until(lambda: daemon.grant(3), what="a free slot")
        daemon.wait_for(lambda: daemon.voided.get(late) == f"{handles.NOT_SAVED}: no such key")
        daemon.wait_for(lambda: asked() >= 2)
        until(lambda: daemon.grant(4), what="a free slot")
        saving.join(30)
        assert found and found[0].taken and training is not None


def test_ungranted_late_and_taken_back_grants(tmp_path: Path) -> None:
    with RankDaemonDouble(tmp_path / "d.sock", granting="never") as daemon, stepped(daemon) as (client, training):
        assert client.snapshot(1).status == NOT_YET
        late = until(lambda: daemon.grant(1), what="a free slot")  # could still be taken: the state is step 1's
        until(lambda: len(client._session.grants), what="the grant's arrival")
        training.step()
        daemon.wait_for(lambda: daemon.voided.get(late) == "late")
        late = until(lambda: daemon.grant(1), what="a free slot")
        daemon.wait_for(lambda: daemon.voided.get(late) == "late")
        back = until(lambda: daemon.grant(2), what="a free slot")
        daemon.take_back(back)
        daemon.wait_for(lambda: daemon.voided.get(back) == "taken back")
        assert client.snapshot(2).status == NOT_YET
        until(lambda: daemon.grant(5), what="a free slot")
        until(lambda: len(client._session.grants), what="the grant's arrival")
        training.step()
        assert client.snapshot(3).status == "skipped: granted ahead: the next snapshot is the first from step 5 on"
        training.step()
        assert client.snapshot(7).taken  # the first step >= 5 that this rank calls
        assert client.wait("sealed", 30) == "durable"


@pytest.mark.parametrize("passed", [False, True], ids=["the step is open", "the optimizer has stepped"])
def test_a_grant_for_a_step_that_an_earlier_one_took_is_the_next_steps(tmp_path: Path, passed: bool) -> None:
    """It was given up as late, and with it was void whatever was granted after it: snapshots with must=True in a loop."""
    with RankDaemonDouble(tmp_path / "d.sock", granting="never") as daemon, stepped(daemon) as (client, training):
        until(lambda: daemon.grant(1), what="a free slot")
        until(lambda: len(client._session.grants), what="the grant's arrival")
        assert client.snapshot(1).taken
        if passed:
            training.step()
        assert until(lambda: daemon.grant(1), what="a free slot") == 2
        until(lambda: len(client._session.grants) or daemon.voided, what="the second grant's arrival")
        if not passed:
            training.step()
        assert client.snapshot(2).taken, daemon.voided
        assert client.wait("sealed", 30) == "durable"
        assert not daemon.voided


def taken_back(daemon: RankDaemonDouble, client: Client, monkeypatch: pytest.MonkeyPatch) -> Handle:
    """The snapshot of step 1, whose grant is taken back in mid-copy. It is void soon: no byte is copied before it knows."""
    run, jobs = Copy.run, client._engine._jobs

    def held_up(copy: Copy, begin: int, length: int) -> None:
        until(lambda: any(job.stop for job in list(jobs)), what="the grant is taken back")
        run(copy, begin, length)

    until(lambda: client._session.grants, what="a grant")
    with monkeypatch.context() as held:
        held.setattr(Copy, "run", held_up)
        handle = client.snapshot(1)
        assert handle.taken, handle.status
        until(lambda: jobs[0].in_flight, what="a copy in progress")
    daemon.take_back(jobs[0].grant)
    return handle


def test_a_grant_taken_back_in_mid_copy_leaves_its_slot_alone(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: the slot is free only when nobody writes into it any more, so GaveUp comes after the last byte."""
    with stepped(daemon) as (client, _):
        handle = taken_back(daemon, client, monkeypatch)
        until(lambda: handle.status == "void: taken back: test", what="the snapshot is void")
        daemon.wait_for(lambda: list(daemon.voided.values()) == ["taken back: test"])
    assert (1, 1) not in daemon.held


def test_must_asks_for_another_capture_when_the_first_one_of_the_step_is_void(
    daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank missed it, asks, and waits for this one to ask as well: it waited its whole bound."""
    with stepped(daemon) as (client, _):
        first = taken_back(daemon, client, monkeypatch)
        second = client.snapshot(1, must=True)
        assert (first.status, second.taken) == ("void: taken back: test", True)
        assert second.wait("sealed", 30) == "durable"
        assert client.snapshot(1, must=True) is second, "all ranks have it"
        assert client.snapshot(1) is second
    assert (1, 1) in daemon.held


def test_who_waits_no_longer_says_so(daemon: RankDaemonDouble) -> None:
    """The steward granted that step each second, and took back what it had granted beyond it, until the next snapshot()."""
    daemon.granting, daemon.on_asked = "never", False
    with stepped(daemon, must_timeout_s=0.05) as (client, _):
        assert client.snapshot(1, must=True).status.startswith("skipped")
        daemon.wait_for(lambda: len(daemon.messages(wire.Called)) == 2)
    assert [(told.step, told.asks) for told in daemon.messages(wire.Called)] == [(1, True), (1, False)]


def interrupting(call: Callable[..., Any], struck: threading.Event) -> Callable[..., Any]:
    """The same call, with a Ctrl-C at its end where this thread makes it; another thread waits for that."""
    me = threading.current_thread()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not me:
            assert struck.wait(30)
        found = call(*args, **kwargs)
        if threading.current_thread() is me and not struck.is_set():
            struck.set()
            raise KeyboardInterrupt
        return found

    return interrupted


@pytest.mark.parametrize(("kind", "name"), [(Copy, "run"), (Job, "next_chunk")], ids=["in a copy", "with a chunk in hand"])
def test_a_step_that_is_interrupted_in_the_fence_leaves_no_capture_that_never_ends(
    kind: type, name: str, daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: every later step waited for fence_timeout_s. P1: what the interrupted thread was to copy is missing."""
    struck = threading.Event()
    with stepped(daemon) as (client, training):
        with monkeypatch.context() as struck_once, client._engine._changed:  # the engine's thread waits, this one goes first
            handle = client.snapshot(1, must=True)
            struck_once.setattr(kind, name, interrupting(getattr(kind, name), struck))
            with pytest.raises(KeyboardInterrupt):
                training.step()
        until(lambda: client._engine.idle, what="the end of the capture")
        assert handle.status == f"void: {INTERRUPTED}"
        daemon.wait_for(lambda: list(daemon.voided.values()) == [INTERRUPTED])
        began = time.monotonic()
        training.step()
        assert client.snapshot(2, must=True).wait("sealed", 30) == "durable"
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("where", ["take", "_capture", "submit"])
def test_a_snapshot_that_is_interrupted_answers_its_grant(
    where: str, daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: its slot was never free again, and after three of them nothing was granted any more."""
    owner = {"take": "_session", "_capture": "_snapshots", "submit": "_engine"}[where]
    with stepped(daemon) as (client, training):
        for step in range(1, 5):
            until(lambda: client._session.grants, what="a grant")
            training.step()
            with monkeypatch.context() as interrupted:
                call = interrupting(getattr(getattr(client, owner), where), threading.Event())
                interrupted.setattr(getattr(client, owner), where, call)
                with pytest.raises(KeyboardInterrupt):
                    client.snapshot(step)
            daemon.wait_for(lambda step=step: list(daemon.voided.values()).count(INTERRUPTED) == step)
        training.step()
        assert client.snapshot(5, must=True).wait("sealed", 30) == "durable"


class Alarm(RuntimeError):
    """A watchdog's."""


def named(number: int, frame: object) -> None:
    raise Alarm(number)


def starred(*of_a_signal: object) -> None:
    raise Alarm(*of_a_signal)


@pytest.mark.parametrize("handler", [named, starred])
@pytest.mark.parametrize("where", ["snapshot", "fence", "copy", "end of a step"])
def test_what_a_signal_handler_raises_reaches_the_program(
    where: str, handler: Callable[..., None], daemon: RankDaemonDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for an error of ours, logged and swallowed (P5)."""
    owner, name = {
        "snapshot": (Snapshots, "_capture"),
        "fence": (Engine, "fence"),
        "copy": (Copy, "run"),
        "end of a step": (Accumulation, "used"),
    }[where]
    call = getattr(owner, name)

    def signalled(*args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGALRM)
        call(*args)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with stepped(daemon) as (client, training), client._engine._changed, monkeypatch.context() as watched:
            until(lambda: client._session.grants, what="a grant")
            watched.setattr(owner, name, signalled)
            with pytest.raises(Alarm):
                (client.snapshot(1), training.step())
            watched.undo()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("told_s", [0.0, 60.0])
def test_a_daemon_that_was_told_nothing_is_not_silent(tmp_path: Path, told_s: float) -> None:
    """The first snapshot after a long evaluation was skipped with "the daemon is silent: nothing was heard of it for 600 s"."""
    with RankDaemonDouble(tmp_path / "d.sock", granting="never") as daemon, stepped(daemon) as (client, _):
        link = client._session.link
        link.heard_at = time.monotonic() - 600
        link._said_at = time.monotonic() - told_s if told_s else link.heard_at
        status = client.snapshot(1).status
        assert status == ("skipped: the daemon is silent: nothing was heard of it for 60 s" if told_s else NOT_YET)


def test_a_handle_of_what_became_void_tells_of_what_a_wait_captures_instead(tmp_path: Path) -> None:
    """P2: also where the call after it was answered with the same handle."""
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, stepped(daemon) as (client, _):
        daemon.durable, daemon.level = False, 0
        handle = client.snapshot(1, {"best": 1}, keep=True, must=True)
        assert handle.wait("sealed") == "sealed"
        assert client.snapshot(1) is handle
        daemon._tell(wire.Level(1, 1, handle.grant, -1, 0, False, "rank 1 missed it"))
        until(lambda: handle.status == "void: rank 1 missed it")
        assert client.wait("sealed", 30) == handle.status == "sealed"
        assert client.snapshot(1, {"best": 1}, keep=True).taken
        assert [seal.keep for seal in daemon.messages(wire.SealedSlot)] == [True, True]


def test_the_handle_of_a_snapshot_whose_memory_another_one_has_says_so(tmp_path: Path) -> None:
    """P2: all that were ever sealed said "sealed" for ever. What is durable is so wherever its memory went."""
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, stepped(daemon) as (client, training):
        made = []
        for step in range(1, 8):
            daemon.durable = step == 1
            daemon.level = 0
            made.append(client.snapshot(step, must=True))
            assert made[-1].wait("durable" if step == 1 else "sealed", 30) in ("sealed", "durable")
            training.step()
        newest = {handle.slot: handle for handle in made}
        gone = [handle for handle in made[1:] if newest[handle.slot] is not handle]
        until(lambda: all(handle.status == handles.RELEASED for handle in gone), what="the slots' next grants")
        assert len(gone) == 3 and all(handle.taken for handle in made)
        assert [handle.status for handle in made if handle not in gone] == ["durable", "sealed", "sealed", "sealed"]
        began = time.monotonic()
        assert gone[0].wait("durable", 60) == handles.RELEASED, "nothing else is going to be said"
        assert time.monotonic() - began < 30
    assert gone[0].wait("durable", 60) == handles.RELEASED == gone[0].status, "nor after close()"


def test_a_handle_of_which_there_is_more_to_say_is_told_however_many_come_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: 256 captures later a step that was to be kept became durable, and its handle said "sealed" for good."""
    monkeypatch.setattr(handles, "HANDLES_KEPT_MAX", 4)
    books, made = handles.Handles(), {step: Handle(step, "captured", lambda *_: "", grant=step) for step in range(1, 10)}
    for step, handle in made.items():
        books.follow(handle)
        assert books.hear(handle, wire.Level(1, step, step, 0, 0, step > 2, ""))
    assert [step for step in made if books.of(step) is not None] == [1, 2, 8, 9]
    assert books.hear(made[1], wire.Level(1, 1, 1, 0, 0, True, "")) and made[1].status == "durable"


def test_a_level_is_not_called_a_fact_while_the_daemon_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: of a node whose daemon had been dead for 21 s a handle said "protected"."""
    daemon = RankDaemonDouble(tmp_path / "d.sock").start()
    with stepped(daemon) as (client, training):
        durable = client.snapshot(1, must=True)
        assert durable.wait("durable", 30) == "durable"
        training.step()
        daemon.durable, daemon.level = False, 0
        sealed = client.snapshot(2, must=True)
        assert sealed.wait("sealed", 30) == "sealed"
        daemon.stop()
        until(lambda: not client._session.link.up)
        assert sealed.status == "sealed", "it may be starting again"
        monkeypatch.setattr(handles, "SILENT_AFTER_S", 0.0)
        assert sealed.status == sealed.wait("sealed", 1) == "unreachable: sealed, as far as the daemon had said"
        assert durable.status == "durable"


def test_who_has_forgotten_what_was_released_does_not_make_it_void(tmp_path: Path) -> None:
    """P2: a steward that began anew answered a question from before: no memory holds any of it. None does, and nothing was lost."""
    with RankDaemonDouble(tmp_path / "d.sock") as daemon, stepped(daemon) as (client, training):
        daemon.durable, daemon.level = False, 0
        made = []
        for step in (1, 2):
            made.append(client.snapshot(step, must=True))
            assert made[-1].wait("sealed", 30) == "sealed"
            training.step()
        for handle in made:
            daemon._tell(wire.Level(1, handle.step, handle.grant, -1, 1, False, "no memory holds any of it"))
        until(lambda: made[1].status == "void: no memory holds any of it")
        assert made[0].status == handles.RELEASED
        assert list(client.health().facts["lost"]) == ["void: no memory holds any of it"]
        assert client.health().facts["lost"]["void: no memory holds any of it"]["count"] == 1


@pytest.mark.parametrize("newer_is_sealed", [True, False])
def test_who_may_have_been_released_for_one_that_was_not_heard_of_is_not_void(newer_is_sealed: bool) -> None:
    """P2: the daemon died before it could say that the newer one is sealed; asked for the older one its steward held none of it."""
    books, made = handles.Handles(), {step: Handle(step, "captured", lambda *_: "", grant=step) for step in (1, 2)}
    for handle in made.values():
        books.follow(handle)

    def hear(step: int, level: int, void: str = "") -> bool:
        return books.hear(made[step], wire.Level(1, step, step, level, 1, False, void))

    assert hear(1, 0)
    books.doubt()
    assert not hear(1, -1, "nobody holds it") and made[1].status == "sealed"
    assert hear(1, -1)  # a steward that has not seen all of it yet
    assert hear(2, *((0,) if newer_is_sealed else (-1, "it was not sealed")))
    assert hear(1, -1, "nobody holds it") is not newer_is_sealed
    assert made[1].status == (handles.RELEASED if newer_is_sealed else "void: nobody holds it")


def test_ranks_that_missed_each_other_save_the_step_all_the_same(tmp_path: Path) -> None:
    """One took the first grant, which another one could not, as its slot was being made larger: what was granted then is for a
    later step, until both ask again (make test on a busy machine)."""
    with RankDaemonDouble(tmp_path / "d.sock", granting="never") as daemon:
        daemon.on_asked = False
        with Client.connect(job="own", socket=str(daemon.path), required=True, must_timeout_s=0.3) as client:
            ended: list[str] = []

            def save() -> None:
                with client.saving(1, level="sealed", timeout=60.0) as saving:
                    saving.add(Box("numbers", torch.arange(4.0), (4,), (0,)))
                ended.append(client._last.status if client._last is not None else "")

            saves = threading.Thread(target=save)
            saves.start()
            asked = lambda: sum(said.step == 1 and said.asks for said in daemon.messages(wire.Called))  # noqa: E731
            daemon.wait_for(lambda: asked() == 1)
            ahead = until(lambda: daemon.grant(2), what="a free slot")
            daemon.wait_for(lambda: asked() >= 4)
            daemon.take_back(ahead)
            until(lambda: daemon.grant(1), what="a free slot")
            saves.join(30)
            assert ended == ["durable"]
