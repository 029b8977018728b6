"""The wait before an epoch opens, at one steward-elect: bounded, and shorter once everybody had been there (D11). One that lost
what it knew does not wait for an epoch that runs already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.life import Tombstone
from ckptd.core.protocol.machine.context import RESEND_S
from ckptd.core.protocol.machine.machine import JobMachine
from ckptd.core.protocol.machine.steward.gather import FRESH_S
from ckptd.core.protocol.machine.steward.restore import LEFT_PATIENCE_S, WHOLE_AT_ONCE_MAX
from tests.core.machines import EPOCH, Node, Thread, at, layout, record_of, sent

A, B = (NodeInfo(name, f"tcp://{name}", name, name, f"{name}#1") for name in "ab")
RANKS, NODES, ASK = ("a", "b"), (A, B), msg.RestoreAsk()
TICK_S = 0.25
SLACK_S = 5.0


class Machine:
    """Node a, which is the steward-elect; what it says to itself arrives at once."""

    def __init__(self, *first: ev.Event, here: bool = True, trains: bool = False) -> None:
        self.machine, self.now = JobMachine("1/job", A, Policy(replicas=1)), 0.0
        self.done: list[ins.Instruction] = []
        self.thread = Thread()
        for event in first:
            self.feed(event)
        if here:
            self.feed(ev.RankJoined(0, "x", RANKS, NODES, ASK, trains=trains))

    def feed(self, event: ev.Event) -> None:
        asked = [do.turn for do in self.done if isinstance(do, ins.ReadDurable)]
        events = [replace(event, turn=asked[-1]) if isinstance(event, ev.DurableRead) and asked else event]
        while events:
            for do in self.machine.handle(events.pop(0), self.now):
                self.done.append(do)
                events += self.thread.take(do)
                if isinstance(do, ins.Send) and do.to == "a":
                    events.append(ev.Received("a", do.message))

    def other_reports(self, *, trains: bool = False) -> None:
        self.feed(ev.Received("b", msg.JoinReport("x", RANKS, NODES, (1,), ASK, None, trains=trains)))

    def nobody_knows(self) -> None:
        """Ranks of both nodes train, and neither knows an epoch."""
        self.other_reports(trains=True)
        for node in "ab":
            self.feed(ev.Received(node, msg.Inventory("x", None, (), turn=1)))

    def ticks(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            self.feed(ev.Tick())

    def sent_to(self, node: str, kind: type) -> list[msg.Message]:
        sent = [do for do in self.done if isinstance(do, ins.Send) and do.to == node]
        return [do.message for do in sent if isinstance(do.message, kind)]

    def until_failed(self, limit_s: float) -> float:
        """Seconds until the local rank's restore() is told to raise."""
        began = self.now
        while not any(isinstance(do, ins.FailJoin) for do in self.done):
            assert self.now - began < limit_s, "it still waits"
            self.now += TICK_S
            self.feed(ev.Tick())
        return self.now - began


def shortly(**more: Any) -> ev.Received:
    """As node b goes on to say that its rank stands there."""
    return ev.Received("b", msg.JoinReport("x", (), (), (1,), ASK, None, **more))


def test_who_has_not_said_the_world_is_asked_for_it() -> None:
    """Its first report was lost, or we were restarted since."""
    machine = Machine()
    machine.feed(shortly())
    assert machine.sent_to("b", msg.ReportAgain) == [msg.ReportAgain("x")]
    assert not machine.sent_to("b", msg.InventoryRequest), "it may be another world"
    machine.other_reports()
    assert machine.sent_to("b", msg.InventoryRequest)
    machine.feed(ev.Received("b", msg.JoinReport("older", (), (), (1,), ASK, None)))
    assert machine.sent_to("b", msg.ReportAgain)[1:] == [msg.ReportAgain("older")]


def test_what_one_node_has_said_another_need_not_say() -> None:
    """P16: of hundreds of nodes each has the same to say."""
    machine = Machine()
    machine.feed(shortly(digest=b"the world"))
    assert len(machine.sent_to("b", msg.ReportAgain)) == 1
    machine.feed(ev.Received("c", msg.JoinReport("x", RANKS, NODES, (), ASK, None, digest=b"the world")))
    machine.feed(shortly(digest=b"the world"))
    assert len(machine.sent_to("b", msg.ReportAgain)) == 1
    assert machine.sent_to("b", msg.InventoryRequest), "its rank is here"
    machine.feed(shortly(digest=b"another world"))
    assert len(machine.sent_to("b", msg.ReportAgain)) == 2
    other = msg.JoinReport("x", RANKS[::-1], NODES[::-1], (1,), ASK, None, digest=b"another world")
    machine.feed(ev.Received("b", replace(other, ranks=("a", "a"))))
    (refused,) = machine.sent_to("b", msg.JoinRefused)
    assert isinstance(refused, msg.JoinRefused) and refused.code == "mismatch"


def test_few_are_asked_at_once_for_what_most_of_them_have_in_common() -> None:
    """P16: the first reports of all of them come before the first answer."""
    machine = Machine(here=False)
    report = msg.JoinReport("x", (), (), (), ASK, None, digest=b"the world")

    def asked() -> int:
        return sum(len(machine.sent_to(f"n{number}", msg.ReportAgain)) for number in range(100))

    for number in range(100):
        machine.feed(ev.Received(f"n{number}", report))
    assert asked() == WHOLE_AT_ONCE_MAX
    machine.ticks(TICK_S)
    for number in range(100):
        machine.feed(ev.Received(f"n{number}", report))
    assert asked() == 2 * WHOLE_AT_ONCE_MAX


def test_ranks_stand_there_as_long_as_they_say_so_however_shortly() -> None:
    machine = Machine()
    machine.other_reports()
    assert FRESH_S < 4 < Policy().inventory_timeout_s
    for _ in range(4):
        machine.ticks(1.0)
        machine.feed(shortly())
        assert machine.machine.steward.restoring.gathering.complete()
    assert not machine.sent_to("b", msg.ReportAgain)


def test_a_rank_that_never_came_is_waited_for_as_long_as_the_policy_says() -> None:
    policy = Policy()
    waited = Machine().until_failed(policy.join_timeout_s + SLACK_S)
    assert waited >= policy.join_timeout_s


def test_a_rank_that_left_again_is_not_waited_for_so_long() -> None:
    """Its daemon died in mid-restore, so its restore() raised; the others must not wait join_timeout_s for it."""
    machine = Machine()
    machine.other_reports()
    assert any(isinstance(do, ins.Send) and isinstance(do.message, msg.InventoryRequest) for do in machine.done)
    machine.until_failed(LEFT_PATIENCE_S + SLACK_S)


OPENED = EpochRecord(1, "x", RANKS, NODES)


@pytest.mark.parametrize(
    ("known", "trains", "in_time"),
    [(OPENED, False, True), (None, False, False), (replace(OPENED, nonce="older"), False, False), (OPENED, True, False)],
)
def test_a_steward_that_was_restarted_in_mid_restore_does_not_wait_long_for_its_own_ranks(
    known: EpochRecord | None, trains: bool, in_time: bool
) -> None:
    """Their restore() raised with its death; the others hung in theirs for minutes (an operator). Ranks that train wait for
    nothing, and of one that never came nobody knows whether it is about to."""
    machine = Machine(here=False)
    for _ in range(int((LEFT_PATIENCE_S + SLACK_S) / RESEND_S)):
        machine.feed(ev.Received("b", msg.JoinReport("x", RANKS, NODES, (1,), ASK, known, trains=trains)))
        machine.ticks(RESEND_S)
    refused = machine.sent_to("b", msg.JoinRefused)
    assert [message.reason for message in refused[:1]] == (["ranks 0 did not join, or left again"] if in_time else [])


def test_a_rank_that_trains_makes_a_daemon_that_knows_nothing_ask_the_others() -> None:
    assert not Machine().sent_to("b", msg.Inventory)
    assert Machine(trains=True).sent_to("b", msg.Inventory) == [msg.Inventory("", None, ())]


def test_the_epoch_of_ranks_that_train_is_not_opened_again() -> None:
    """P14: it ran all the time; waiting for the others to join would keep the steward silent for join_timeout_s."""
    machine = Machine(trains=True)
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(1, "x", RANKS, NODES))))
    machine.feed(ev.Received("b", msg.JoinReport("x", RANKS, NODES, (1,), None, None, trains=True)))  # on its way
    machine.ticks(SLACK_S)
    (hello, *_) = machine.sent_to("b", msg.OpenSession)
    assert isinstance(hello, msg.OpenSession)
    known = machine.machine.ctx.record
    machine.feed(ev.Received("b", msg.Inventory("", known, (), session=hello.nonce, serial=0, done=True)))
    machine.ticks(1.0)
    assert [do.round for do in machine.done if isinstance(do, ins.FinishRestore)] == [1]
    assert not any(isinstance(do, ins.FailJoin) for do in machine.done)
    assert machine.machine.view()["phase"] == "running"


def test_ranks_that_train_are_proof_enough_that_their_epoch_runs() -> None:
    """P14: the only other one that knows the epoch had not heard yet that it is done, and nobody was left to say so."""
    machine = Machine(trains=True)
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(1, "x", RANKS, NODES))))
    assert [do.round for do in machine.done if isinstance(do, ins.FinishRestore)] == [1]
    assert (machine.machine.view()["phase"], set(machine.machine.ranks.here)) == ("running", {0})


def test_ranks_that_wait_prove_nothing_about_an_epoch_that_one_hears_of() -> None:
    machine = Machine()
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(1, "x", RANKS, NODES))))
    assert not machine.machine.ctx.done


def test_ranks_that_train_are_not_sent_back_by_a_daemon_that_forgot_their_epoch() -> None:
    """P14: only storage, or a holder without ranks, knew of it. Another epoch was opened over ranks that trained; one of them could
    not load, and the job took no snapshot any more (simulator, seed 427503266431 of that day)."""
    machine = Machine(trains=True)
    machine.nobody_knows()
    machine.feed(ev.DurableRead("x", True, EpochRecord(7, "x", RANKS, NODES), ()))
    machine.ticks(SLACK_S)
    assert machine.machine.view()["phase"] == "running"
    assert not [do for do in machine.done if isinstance(do, ins.ClaimEpoch | ins.PrepareRestore)]


def test_ranks_that_train_are_waited_with_until_somebody_knows_their_epoch() -> None:
    """P14: neither storage nor the only peer that knew it answered for a while, the join was refused for that, and the ranks
    trained on without a snapshot (simulator, seed 1589730227 of that day)."""
    machine = Machine(trains=True)
    machine.other_reports(trains=True)
    for _ in range(3):
        machine.ticks(Policy().join_timeout_s)
    assert not [do for do in machine.done if isinstance(do, ins.FailJoin | ins.ClaimEpoch)]
    machine.done.clear()
    machine.ticks(SLACK_S)
    assert machine.sent_to("b", msg.Inventory), "it goes on asking"
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(7, "x", RANKS, NODES))))
    assert (machine.machine.view()["phase"], set(machine.machine.ranks.here)) == ("running", {0})


@pytest.mark.parametrize("own", [False, True])
def test_who_has_trained_in_a_later_epoch_does_not_go_back_to_one_of_which_a_peer_has_heard(own: bool) -> None:
    """P14: a start was opened twice, the record of the second was lost where it ran, and a peer knew only the first. In that one
    nothing could ever be released of what was sealed in the other, and no snapshot found a slot any more (seed 6773878523)."""
    sealed = ev.HoldingFound(1, SnapshotId(7, 2, 1), 0, 0 if own else 1, own, layout(0), ())
    machine = Machine(sealed, trains=True)
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(6, "x", RANKS, NODES))))
    assert (machine.machine.ctx.number == 6) == (not own), "what others trained in later may have been left behind"
    machine.feed(ev.Received("b", msg.Stale(EpochRecord(7, "x", RANKS, NODES))))
    assert machine.machine.ctx.number == 7


@pytest.mark.parametrize("read", [False, True])
def test_ranks_that_train_are_asked_for_again_after_storage_did_not_answer(read: bool) -> None:
    """P14: storage was away when it was read, or when a number was claimed there. It is asked anew, and its answer counts."""
    machine = Machine(trains=True)
    machine.nobody_knows()
    machine.feed(ev.DurableRead("x", read, reason="" if read else "EIO"))
    if read:
        (claim,) = [do.record for do in machine.done if isinstance(do, ins.ClaimEpoch)]
        machine.feed(ev.EpochClaimed("x", claim.number, False, 0, "EIO"))
    machine.done.clear()
    machine.ticks(SLACK_S)
    machine.nobody_knows()
    assert [do for do in machine.done if isinstance(do, ins.ReadDurable)]
    machine.feed(ev.DurableRead("x", True, EpochRecord(7, "x", RANKS, NODES), ()))
    assert machine.machine.view()["phase"] == "running"


def test_ranks_that_train_in_an_epoch_that_nobody_knows_get_another_one() -> None:
    machine = Machine(trains=True)
    machine.nobody_knows()
    machine.feed(ev.DurableRead("x", True, EpochRecord(7, "before", (), ()), (SnapshotId(7, 5),)))
    assert [do for do in machine.done if isinstance(do, ins.ClaimEpoch | ins.Send) and "number=8" in repr(do)]


@pytest.mark.parametrize("stone", [Tombstone(7, 7, 7), Tombstone(8)])
def test_ranks_that_train_in_an_epoch_to_which_there_is_no_way_back_get_another_one(stone: Tombstone) -> None:
    """P14: the job was forgotten by order, storage left out, while this daemon was down; it was told before its ranks came back.
    Storage names their epoch, which it does not enter again: it told itself so for ever (a reader's history)."""
    machine = Machine(ev.Restarted(None, tombstone=stone), trains=True)
    for turn in (1, 2):
        machine.other_reports(trains=True)
        for name in "ab":
            machine.feed(ev.Received(name, msg.Inventory("x", None, (), turn=turn, buried=stone.epoch, forgotten=stone.ordered)))
        machine.feed(ev.DurableRead("x", True, EpochRecord(7, "x", RANKS, NODES), (SnapshotId(7, 5),)))
        machine.ticks(SLACK_S)
    claims = [do.record.number for do in machine.done if isinstance(do, ins.ClaimEpoch)]
    assert claims and set(claims) == {stone.epoch + 1}


@pytest.mark.parametrize("storage", ["names it", "is away"])
def test_ranks_that_train_are_not_taken_for_those_of_an_earlier_try_of_their_start(storage: str) -> None:
    """P3: its restore was tried again under another number, which could not be written down. The daemon that came back went on with
    the first one, where what the ranks had sealed in the second was newer for ever than all that followed (seed 4147)."""
    first, second = (EpochRecord(number, "x", RANKS, NODES, (SnapshotId(1, 6),)) for number in (4, 5))
    sealed = ev.HoldingFound(1, SnapshotId(5, 10), 0, 0, True, layout(0), ())
    machine = Machine(ev.Restarted(first), sealed, trains=True)
    assert not [do for do in machine.done if isinstance(do, ins.FinishRestore)]
    newest = second if storage == "names it" else None
    for turn in (1, 2):
        machine.other_reports(trains=True)
        machine.feed(ev.Received("b", msg.Inventory("x", None, (), turn=turn)))
        machine.feed(ev.DurableRead("x", newest is not None, newest, ()))
        machine.ticks(SLACK_S)
    assert (machine.machine.ctx.record, machine.machine.view()["phase"]) == (second, "running")
    assert not [do for do in machine.done if isinstance(do, ins.ClaimEpoch | ins.PrepareRestore | ins.FailJoin)]


def test_a_node_leaves_a_restore_whose_attempt_was_refused() -> None:
    """The steward had found damage and refused before it decided anew: no RestoreAbort went out, and the node held what it had
    prepared, and told `ckptd forget` of ranks that were gone, for minutes (P14; a reader's history)."""
    record = record_of("ab", number=EPOCH + 1, nonce="now", ancestry=(at(5),))
    node = Node("b", record_of("ab"), Policy(replicas=1, durable=False, restore_timeout_s=600.0), running=False)
    node.feed(ev.RankJoined(1, "now", record.ranks, record.nodes, msg.RestoreAsk()))
    node.hear("a", msg.EpochOpen("now", record, record.number, at(5), False))
    node.feed(ev.RankFetched(1, record.number, False, "damage", "bad"))
    node.hear("a", msg.JoinRefused("now", "unrecoverable", "every snapshot found is damaged"))
    node.feed(ev.RankLeft(1, False))
    node.tick(60.0)
    assert node.machine.lifetime.refusal()[0] != "ranks of it are here"


def test_an_attempt_that_was_refused_before_anybody_loaded_never_ran() -> None:
    """Its daemon was restarted in mid-restore, and does not know that by itself. If it may have run, what it was opened without, as
    it could not be reached then, is left behind by the next start (P1)."""
    record = record_of("ab", nonce="now", ancestry=(at(5, EPOCH - 1),))
    node = Node("b", record, Policy(replicas=1, durable=False), running=False)
    node.feed(ev.RankJoined(1, "now", record.ranks, record.nodes, msg.RestoreAsk(), running=False))
    node.hear("a", msg.EpochOpen("now", record, EPOCH, at(5, EPOCH - 1), False))
    told = []
    for _ in range(2):
        node.hear("a", msg.InventoryRequest("next", ()))
        told.append(node.said(msg.Inventory, "a")[-1].never)
        node.hear("a", msg.JoinRefused("now", "unreachable", "c does not answer"))
    assert told == [False, True]


def test_a_rank_of_another_world_that_names_the_attempt_that_trains_is_not_taken_for_one_of_it() -> None:
    """Somebody started rank 0 once more by hand, with another world: it was given slots, and waited in restore() for ever (P14;
    simulator, seed 6958554716)."""
    node = Node("a", record_of("ab"), Policy(durable=False))
    record, world = node.record, ("a", "b", "a")
    done = node.feed(ev.RankJoined(0, record.nonce, world, record.nodes, msg.RestoreAsk(), running=False))
    assert [report.ranks for report in sent(done, msg.JoinReport)] == [world], "it asks as any other start"



def test_who_has_heard_of_another_epoch_says_another_digest() -> None:
    """P16: by an old one the steward-elect would believe to know what it has not heard of."""
    record = record_of("ab")
    node = Node("b", record, running=False)
    node.feed(ev.RankJoined(1, "next", record.ranks, record.nodes, ASK))
    node.tick(RESEND_S)
    mark = len(node.done)
    node.hear("a", msg.Stale(replace(record, number=record.number + 1, nonce="other")))
    node.tick(RESEND_S)
    before, after = ({report.digest for report in sent(some, msg.JoinReport, "a")} for some in (node.done[:mark], node.done[mark:]))
    assert len(before) == len(after) == 1 and before != after
