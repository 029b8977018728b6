"""When restore() may say that there is nothing to restore: a declared fresh start counts only if it is known to have run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord, NodeInfo
from ckptd.core.policy import Policy
from ckptd.core.protocol.events import DurableRead, NodeDown, RankLeft
from ckptd.core.protocol.instructions import Alarm, Bury
from ckptd.core.protocol.life import Tombstone, grave
from ckptd.core.protocol.machine.lifetime import RETURN_S
from ckptd.core.protocol.machine.steward.decide import decide
from ckptd.core.protocol.machine.steward.gather import Gather
from ckptd.core.protocol.messages import Inventory, RestoreAsk
from tests.core.elect import BEFORE, BOTH, OLD, Elect
from tests.core.machines import EPOCH, Node, at, only, record_of

A = NodeInfo("a", "tcp://a", "a", "a", "a#1")
TRAINED = EpochRecord(1, "x", ("b",), (NodeInfo("b", "tcp://b", "b", "b", "b#1"),), before=(-1, ()))


def alone(answer: Inventory, stored: EpochRecord | None = None, *others: EpochRecord) -> Gather:
    """A start of one rank, on node a, which answers that; what storage says; other epochs that are known."""
    gather = Gather("z", ("a",), (A,), 0.0)
    gather.joined, gather.asked, gather.answers = {0: RestoreAsk()}, {"a": A}, {"a": answer}
    gather.durable, gather.records = DurableRead("z", True, stored), [r for r in (stored, *others) if r is not None]
    return gather


def gathered(before: tuple[int, tuple[()]], *, done: bool) -> Gather:
    """A third start asks a, which entered epoch 2 and has not been restarted since; epoch 1's node is gone for good."""
    fresh = EpochRecord(2, "y", ("a",), (A,), before=before)
    return alone(Inventory("z", fresh, (), done=done, incarnation="a#1"), fresh, TRAINED)


def test_nobody_knows_whether_the_declared_fresh_start_ran() -> None:
    refused = decide(gathered((1, ()), done=False), 2, (), {})
    assert refused.record is None
    assert refused.code == "unrecoverable"


def test_it_ran_and_took_no_snapshot() -> None:
    assert decide(gathered((1, ()), done=True), 2, (), {}).record is not None


def test_there_was_nothing_before_it_anyway() -> None:
    assert decide(gathered((-1, ()), done=False), 2, (), {}).record is not None


def test_it_ran_and_a_later_start_that_never_did_came_after_it() -> None:
    """The job was refused for a checkpoint that nobody had ever taken (simulator, seed 180 of that day)."""
    gather = gathered((1, ()), done=False)
    fresh = gather.records[0]
    later = EpochRecord(3, "w", ("a",), (A,), before=(2, ()))
    gather.records.append(later)
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#1")
    assert decide(gather, 3, (), {}).record is None, "nobody knows whether epoch 2 ran"
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#1", ran=fresh)
    assert decide(gather, 3, (), {}).record is not None
    gather.answers["a"] = Inventory("z", later, (), never=True, incarnation="a#2", ran=fresh)
    assert decide(gather, 3, (), {}).record is None, "it may have forgotten a snapshot"


def test_a_start_that_was_claimed_and_never_opened_leaves_nothing_before_the_next() -> None:
    """It was refused at the third start, which asked about the second (simulator, seed 113 of that day)."""
    gather = gathered((-1, ()), done=False)
    gather.records = gather.records[:1]
    gather.answers["a"] = Inventory("z", None, (), incarnation="a#1")
    second = decide(gather, 2, (), {}).record
    assert second is not None and second.before == (-1, ())
    gather.answers["a"] = Inventory("z", None, (), incarnation="a#2")
    assert decide(gather, 2, (), {}).record is None, "it may have forgotten a snapshot"


FIRST = EpochRecord(1, "first", ("c", "c"), (NodeInfo("c", "tcp://c", "c", "c", "c#1"),), before=(-1, ()))


def never_opened() -> Elect:
    """Epoch 1 trains on node c, and has sealed nothing yet. A second start is claimed and never opens, so that epoch 1 goes on;
    a third one asks, and storage and node b have answered it."""
    node = Elect(durable=True).start()
    node.feed(DurableRead("now", True, FIRST))
    node.answer("b", incarnation="b#1")
    node.answer("c", known=FIRST, done=True, incarnation="c#1")
    claimed = node.claim
    assert (claimed.number, claimed.ancestry) == (2, ()), "the first start has not taken a snapshot yet"
    node.feed(RankLeft(0, False))
    node.join("again")
    node.report("again")
    node.feed(DurableRead("again", True, claimed))
    node.answer("b", attempt="again", incarnation="b#1")
    return node


def test_a_start_that_claimed_and_never_opened_hides_nothing_of_the_one_that_trained_on() -> None:
    """P1: the start after it asked only those that the claim names, and called the job fresh (simulator, seed 915715)."""
    node = never_opened()
    node.answer("c", *(replace(one, snapshot=at(5, 1)) for one in BOTH), attempt="again", known=FIRST, done=True)
    node.claimed()
    assert node.opens()[-1].snapshot == at(5, 1)


def test_a_start_that_claimed_and_never_opened_is_no_proof_that_nothing_came_before_it() -> None:
    """The first one trained on and took snapshots, which went with its node: the third, which storage told of the second alone,
    called the job fresh (P1; simulator, seed 3209602319)."""
    node = never_opened()
    node.answer("c", attempt="again", incarnation="c#2")
    assert node.refusals()[1:] == [("again", "unrecoverable")]


@pytest.mark.parametrize(("declared", "waits"), [(False, 0.0), (False, 11.0), (True, 0.0), (True, 11.0)])
def test_a_fresh_start_that_is_proven_by_storage_is_claimed_there(declared: bool, waits: float) -> None:
    """Storage went away between its answer and the claim: epoch 1 opened, its node died, and storage proved to the next start that
    the job had never run (P1; simulator, seed 9257316892 of a world dense in such moments)."""
    node = Elect(ask=RestoreAsk(allow_fresh=declared), durable=True).start()
    node.feed(DurableRead("now", True))
    node.answer("b", incarnation="b#1")
    if waits:
        node.tick(waits)
    else:
        node.claimed(reason="storage is gone")
    assert set(node.refusals()) == (set() if declared else {("now", "unreachable")})
    assert len(node.opens()[:1]) == declared


@pytest.mark.parametrize(("done", "lives"), [(True, True), (True, False), (False, False)])
def test_a_start_after_two_that_sealed_nothing_is_fresh_where_somebody_remembers_the_first(done: bool, lives: bool) -> None:
    """The second never opened. Where the first was not completed either, a job that fails while it starts is not refused for that
    (simulator, seed 2012086963)."""
    second = EpochRecord(2, "second", ("a", "c"), (A, *FIRST.nodes), before=(1, ()) if done else (-1, ()))
    gather = alone(Inventory("z", second, (), never=True, incarnation="a#1"), None, FIRST, second)
    gather.asked["c"] = FIRST.nodes[0]
    incarnation = "c#1" if lives else "c#2"
    gather.answers["c"] = Inventory("z", second, (), never=True, incarnation=incarnation, ran=FIRST if done and lives else None)
    assert (decide(gather, 2, (), {}).record is not None) == (lives or not done)


@pytest.mark.parametrize(("entered", "known"), [(False, True), (True, True), (False, False)])
def test_a_start_between_two_that_were_proven_fresh_and_never_ran_is_no_reason_to_refuse(entered: bool, known: bool) -> None:
    """D11 (simulator, seed 8259412273): the third had been claimed alone, the second had not loaded, the first took nothing."""
    second = EpochRecord(2, "second", ("a",), (A,), before=(1, ()))
    third = EpochRecord(3, "third", ("a",), (A,), before=(-1, ()))
    first = [EpochRecord(1, "first", ("a",), (A,), before=(-1, ()))] if known else []
    answer = Inventory("z", second, (), done=entered, never=not entered, incarnation="a#1")
    fresh = decide(alone(answer, third, second, *first), 3, (), {}).record is not None
    assert fresh == known


def test_a_start_below_one_that_never_ran_is_no_proof_when_its_node_has_been_restarted() -> None:
    """P1: the second may have trained on node a, which forgot what it had taken; the third was claimed alone and never opened."""
    c = FIRST.nodes[0]
    second = EpochRecord(2, "second", ("a",), (A,), before=(1, ()))
    third = EpochRecord(3, "third", ("c",), (c,), before=(-1, ()))
    for incarnation, fresh in [("a#2", False), ("a#1", True)]:
        gather = alone(Inventory("z", second, (), done=True, incarnation=incarnation), third, second, FIRST)
        gather.asked["c"], gather.answers["c"] = c, Inventory("z", None, (), incarnation="c#1")
        assert (decide(gather, 3, (), {}).record is not None) == fresh


def test_a_declared_fresh_start_that_was_still_loading_proves_nothing_of_the_lineage_before_it() -> None:
    """P1: the start before it went on from step 5, which nobody who answers has any more."""
    went_on = EpochRecord(2, "on", ("a",), (A,), (at(5, 1),), before=(1, ()))
    declared = EpochRecord(3, "declared", ("a",), (A,), before=(2, (at(5, 1),)))
    gather = alone(Inventory("z", declared, (), incarnation="a#1", ran=went_on), declared, went_on)
    assert decide(gather, 3, (), {}).record is None


@pytest.mark.parametrize("there", [True, False])
def test_a_start_that_does_not_restore_says_what_it_leaves_behind(there: bool) -> None:
    """A script that forgot restore() lost the run that it was to go on with, without a word (a new user; P15)."""
    node = Elect(ask=None).start()
    node.answer("b", *(BOTH if there else ()), known=BEFORE, done=True)
    node.claimed()
    text = "this start begins anew without restore(), and step 5 of epoch 4 is left behind"
    assert [said.startswith(text) for said in node.opens()[-1].errors] == ([True] if there else [])
    assert [do.kind for do in only(node.done, Alarm)] == (["begins_anew"] if there else [])


def test_a_start_that_asks_for_a_step_that_is_not_there_says_what_it_leaves_behind() -> None:
    """`restore(step=9, allow_fresh=True)` where step 5 was: "nothing was ever sealed" (simulator, seed 9257316830 of then)."""
    node = Elect(ask=RestoreAsk(step=9, allow_fresh=True)).start()
    node.answer("b", *BOTH, known=BEFORE, done=True)
    node.claimed()
    (said,) = node.opens()[-1].errors
    assert said.startswith("this start begins anew by allow_fresh=True, and step 5 of epoch 4 is left behind")
    assert [do.kind for do in only(node.done, Alarm)] == ["begins_anew"]


def two_nodes(sealed_a: int, sealed_b: int, **more: int) -> Gather:
    """Epoch 1 ran on a and b, which live; nobody holds anything or was told of anything."""
    b = NodeInfo("b", "tcp://b", "b", "b", "b#1")
    ran = EpochRecord(1, "x", ("a", "b"), (A, b), before=(-1, ()))
    gather = Gather("z", ("a", "b"), (A, b), 0.0)
    gather.joined, gather.asked = {0: RestoreAsk(), 1: RestoreAsk()}, {"a": A, "b": b}
    gather.answers = {
        "a": Inventory("z", ran, (), done=True, incarnation="a#1", sealed=sealed_a, **more),
        "b": Inventory("z", ran, (), done=True, incarnation="b#1", sealed=sealed_b),
    }
    gather.durable, gather.records = DurableRead("z", True), [ran]
    return gather


def test_nothing_was_ever_sealed_and_that_is_said() -> None:
    """P15"""
    decision = decide(two_nodes(0, 0), 1, (), {})
    assert decision.record is not None
    assert decision.errors == ("nothing was ever sealed: epoch 1 ran on a, b and ended before a first snapshot was complete",)


def test_one_node_whose_ranks_sealed_nothing_proves_that_no_snapshot_was_complete() -> None:
    assert decide(two_nodes(1, 0), 1, (), {}).record is not None


def test_one_that_was_replaced_since_proves_nothing_of_what_was_sealed_there() -> None:
    """P1: the others could still say that they had (simulator, seed 5194561819)."""
    gather = two_nodes(1, 0)
    gather.answers["b"] = replace(gather.answers["b"], incarnation="b#2")
    refused = decide(gather, 1, (), {})
    assert refused.record is None
    assert "its snapshots of epoch 1 are held nowhere any more" in refused.reason


def test_what_was_sealed_by_all_and_is_held_by_nobody_is_no_fresh_start() -> None:
    """P1, P15: and it is said what became of it."""
    refused = decide(two_nodes(1, 1), 1, (), {})
    assert refused.record is None and refused.code == "unrecoverable"
    assert "its snapshots of epoch 1 are held nowhere any more" in refused.reason
    assert refused.reason.endswith("allow_fresh=True begins anew")


HELD_NOWHERE = "its snapshots of epoch 1 are held nowhere any more"
REPLACED = replace(two_nodes(1, 1).answers["b"], incarnation="b#2")
LET_GO = Inventory("z", None, (), incarnation="a#2", buried=3, sealed=2)


@pytest.mark.parametrize(
    ("gather", "became"),
    [
        (two_nodes(1, 1), f"{HELD_NOWHERE}, storage has none"),
        (replace(two_nodes(1, 1), claims=False), f"{HELD_NOWHERE}, there is no storage"),
        (
            replace(two_nodes(1, 1), answers=two_nodes(1, 1).answers | {"b": REPLACED}),
            f"{HELD_NOWHERE}, b started anew since it ran and may have lost some, storage has none",
        ),
        (
            alone(LET_GO),
            "its snapshots of epoch 2 are held nowhere any more, a let go of the job when it was over and nothing of it was left, "
            "storage has none",
        ),
        (gathered((1, ()), done=False), "nobody can say that it has no checkpoint"),
    ],
)
def test_it_is_said_what_became_of_the_snapshots_of_a_job_that_has_run_before(gather: Gather, became: str) -> None:
    """P15"""
    told = decide(gather, 3, (), {}).reason
    assert told == f"this job has run before, and {became}; allow_fresh=True begins anew"


def test_who_begins_anew_where_something_was_sealed_is_told_what_became_of_it() -> None:
    """P15: "nothing was ever sealed" was said of a job whose snapshots were durable once."""
    gather = two_nodes(1, 1)
    gather.joined = dict.fromkeys(gather.joined, RestoreAsk(allow_fresh=True))
    decision = decide(gather, 1, (), {})
    assert decision.record is not None
    assert [error.partition(" held")[0] for error in decision.errors] == [
        "this job has run before, and its snapshots of epoch 1 are"
    ]


def test_a_job_that_was_let_go_after_it_had_sealed_something_is_no_fresh_start() -> None:
    """P15: no record of it is left, but a tombstone."""
    gather = alone(Inventory("z", None, (), incarnation="a#2", buried=3, sealed=2))
    assert "a let go of the job" in decide(gather, 3, (), {}).reason
    gather.answers = {"a": Inventory("z", None, (), incarnation="a#2", buried=3, sealed=0)}
    fresh = decide(gather, 3, (), {})
    assert fresh.record is not None, "it never sealed anything"
    assert fresh.errors == ("nothing was ever sealed: a let go of a start that ended before a first snapshot was complete",)
    gather.said = {"a": Inventory("z", None, (), incarnation="a#2", buried=3, forgotten=3, sealed=2)}
    gather.bury(Tombstone(3, 3))
    assert decide(gather, 3, (), {}).record is not None, "forgotten by order"


def test_who_let_go_of_a_start_that_had_sealed_nothing_proves_it_while_it_lives() -> None:
    """D11: storage has the claim of that start, and the next one was refused (simulator, seed 151884273 of that day)."""
    ran = EpochRecord(1, "x", ("a",), (A,), before=(-1, ()))
    for incarnation, sealed, fresh in [("a#1", 0, True), ("a#1", 1, False), ("a#2", 0, False)]:
        gather = alone(Inventory("z", None, (), incarnation=incarnation, buried=1, sealed=sealed), ran)
        assert (decide(gather, 1, (), {}).record is not None) is fresh


def dug(elect: Elect, *claims: EpochRecord) -> Elect:
    """A job that sealed step 5 on both nodes, which hold it; then its grave was claimed, and whoever did that died."""
    stone = grave(OLD + 1, "forgotten")
    elect.start().answer("b", *BOTH, known=BEFORE, done=True, sealed=OLD, incarnation="b#1")
    elect.feed(DurableRead("now", True, max((stone, *claims), key=lambda record: record.number), (), forgotten=stone.number))
    return elect


def test_what_is_held_and_was_forgotten_by_an_order_that_was_not_heard_is_named() -> None:
    """Ranks lived on a node that was cut off from the operator's: what they took after the order was passed over without a word
    (P15; a reader's history)."""
    node = Elect().start()
    node.answer("b", *BOTH, known=BEFORE, done=True, buried=OLD, forgotten=OLD)
    node.claimed()
    opened = node.opens()[-1]
    text = "this start begins anew: step 5 of epoch 4, which b holds, was forgotten by the operator's order"
    assert (opened.snapshot, opened.errors) == (None, (text,))
    assert [(do.kind, do.text) for do in only(node.done, Alarm)] == [("begins_anew", text)]


@pytest.mark.parametrize("restores", [True, False])
def test_what_was_forgotten_and_is_newer_than_what_is_restored_is_named(restores: bool) -> None:
    """b's ranks trained on to step 5 with the order unheard; storage has step 4 of that epoch (P15; a reader's history)."""
    node = Elect(ask=RestoreAsk() if restores else None, durable=True).start()
    node.feed(DurableRead("now", True, BEFORE, (at(4, OLD),)))
    node.answer("a", known=None, buried=OLD, forgotten=OLD)
    node.answer("b", *BOTH, known=BEFORE, done=True, certified=((at(5, OLD), 0, False),))
    node.claimed()
    opened = node.opens()[-1]
    assert opened.snapshot == (at(4, OLD) if restores else None)
    text = "step 5 of epoch 4, which b holds, was forgotten by the operator's order"
    assert text in opened.errors if restores else f"this start begins anew: {text}" in opened.errors


def test_what_storage_keeps_of_a_forgotten_job_is_told_from_what_that_had_left_behind() -> None:
    """Only storage names its last epoch, which had gone back to step 3 (P1)."""
    went_back = replace(BEFORE, ancestry=(at(3, OLD - 1),))
    node = Elect(durable=True).start()
    node.answer("a", known=None, buried=OLD, forgotten=OLD)
    node.answer("b", incarnation="b#2")
    node.feed(DurableRead("now", True, went_back, (at(3, OLD - 1), at(9, OLD - 1))))
    node.claimed()
    assert node.opens()[-1].snapshot == at(3, OLD - 1)


def test_a_second_declared_fresh_start_is_not_silent() -> None:
    """Epoch 4 sealed step 5, which b holds; epoch 5 was declared, ran and sealed nothing; the next is declared, too (P15)."""
    fifth = EpochRecord(OLD + 1, "fifth", ("a", "b"), BEFORE.nodes, (), (), (OLD, ()))
    node = Elect(ask=RestoreAsk(allow_fresh=True)).start()
    node.answer("b", *BOTH, known=fifth, ran=BEFORE, done=True, sealed=OLD, incarnation="b#1")
    node.claimed()
    (said,) = node.opens()[-1].errors
    assert said.startswith("nothing was ever sealed after step 5 of epoch 4, which an earlier start left behind: epoch 5 ran on")


@pytest.mark.parametrize("away", [True, False])
def test_a_start_without_restore_says_what_it_may_leave_behind(away: bool) -> None:
    """Step 5 was certified, and what has it, storage or node c, does not answer (P15; a reader's history)."""
    with_c = replace(BEFORE, holders=(NodeInfo("c", "tcp://c", "c", "c"),))
    node = Elect(BEFORE, ask=None, durable=away).start()
    node.feed(DurableRead("now", False, reason="EIO") if away else NodeDown("c"))
    told = ((at(5, OLD), 1, away),)
    node.answer("b", known=BEFORE if away else with_c, done=True, sealed=OLD, certified=told, incarnation="b#1")
    node.tick(4.0)
    node.claimed(reason="EIO" if away else "")
    (said,) = node.opens()[-1].errors
    assert said.startswith("this start begins anew without restore(), and step 5 of epoch 4 is left behind; those who answered do")


def test_what_a_start_after_the_order_went_on_from_is_no_longer_forgotten() -> None:
    """Storage had kept step 5, and epoch 6 began with it; b, which had not heard the order, holds it. It was lost to a start whose
    storage was away (P3; simulator, seed 7200004226)."""
    since = EpochRecord(OLD + 2, "since", ("a", "b"), BEFORE.nodes, ancestry=(at(5, OLD),), before=(OLD, ()))
    node = Elect(durable=True).start()
    node.feed(DurableRead("now", False, reason="storage is gone"))
    node.answer("a", known=None, buried=OLD, forgotten=OLD)
    node.answer("b", *BOTH, known=since)
    node.claimed(reason="storage is gone")
    assert node.opens()[-1].snapshot == at(5, OLD)


def test_a_job_whose_grave_is_claimed_is_forgotten_whatever_its_nodes_still_hold() -> None:
    """P15: each start was refused, for what was "held nowhere any more" and for "nothing on storage"."""
    elect = dug(Elect(BEFORE, durable=True))
    assert elect.refusals() == []
    elect.claimed()
    opened = elect.opens()[-1]
    assert (opened.snapshot, opened.record.before) == (None, (-1, ()))
    assert [text.partition(", which")[0] for text in opened.errors] == ["this start begins anew: step 5 of epoch 4"]
    assert opened.record.number == OLD + 2


def test_a_start_that_never_ran_does_not_dig_out_what_lay_in_the_grave_before_it() -> None:
    claimed = EpochRecord(OLD + 2, "second", ("a", "b"), BEFORE.nodes, before=(-1, ()))
    elect = dug(Elect(BEFORE, durable=True), claimed)
    elect.claimed()
    opened = elect.opens()[-1]
    assert (opened.snapshot, opened.record.before, opened.record.number) == (None, (-1, ()), OLD + 3)


def test_a_steward_that_finds_the_grave_on_storage_forgets_the_job() -> None:
    """Whoever claimed it died before this node was told; the others ask it, and are told by its tombstone."""
    node = Node("a", record_of("ab"), Policy(durable=True), running=False)
    done = node.feed(DurableRead("", True, grave(EPOCH + 1, "forgotten"), (), forgotten=EPOCH + 1)) + node.tick(RETURN_S + 1.0)
    assert only(done, Bury) == [Bury(Tombstone(EPOCH + 1, EPOCH + 1))]
    node = Node("a", record_of("ab"), Policy(durable=True))
    done = node.feed(DurableRead("", True, grave(EPOCH + 1, "forgotten"), (), forgotten=EPOCH + 1))
    assert only(done, Bury) == [], "its ranks live"
    node = Node("a", record_of("ab", number=EPOCH + 2), Policy(durable=True), running=False)
    done = node.feed(DurableRead("", True, node.record, (), forgotten=EPOCH + 1))
    assert only(done, Bury) == [], "it has begun anew since"


def test_a_state_directory_that_did_not_work_proves_nothing() -> None:
    """P1: epoch 4 was declared, ran on one node and sealed something there; that node could not write it down and was rebooted, so
    it knew of epoch 3 (simulator, seed 448859060253 of that day)."""
    ran, declared = (EpochRecord(n, str(n), ("a",), (A,), before=(-1, ())) for n in (3, 4))
    gather = alone(Inventory("z", ran, (), incarnation="a#2"), declared, ran)
    assert decide(gather, 5, (), {}).record is None
    gather.answers = {"a": Inventory("z", ran, (), incarnation="a#1")}
    assert decide(gather, 5, (), {}).record is not None, "it lives since before epoch 3, and never entered the next one"


@pytest.mark.parametrize(("done", "known"), [(True, True), (False, True), (False, False)])
def test_a_start_that_never_opened_is_no_proof_while_the_one_before_it_was_still_loading(done: bool, known: bool) -> None:
    """P1: "not yet" was taken for "never": the start before trained on and sealed, and its node was lost (a reader's history)."""
    node = Elect(durable=True).start()
    node.feed(DurableRead("now", True, FIRST))
    node.answer("b", incarnation="b#1")
    node.answer("c", known=FIRST if known else None, done=done, never=known and not done, incarnation="c#1")
    claimed = node.claim
    assert (claimed.number, claimed.ancestry) == (2, ())
    node.feed(RankLeft(0, False))
    node.join("again")
    node.report("again")
    node.feed(DurableRead("again", True, claimed))
    node.answer("b", attempt="again", incarnation="b#1")
    node.answer("c", attempt="again", incarnation="c#2")
    assert node.refusals()[1:] == [("again", "unrecoverable")], claimed.before


def test_a_start_without_restore_says_that_not_everybody_was_heard() -> None:
    """P15: what it left behind went with its checkpoints, and nobody had said that there might be something."""
    node = Elect(ask=None, durable=True).start()
    node.answer("b", incarnation="b#1")
    node.feed(DurableRead("now", False, reason="EIO"))
    node.tick(3.0)
    node.claimed(reason="EIO")
    (said,) = node.opens()[-1].errors
    assert said.startswith("this start begins anew without restore(), and nobody can say") and said.endswith("EIO")
    known = replace(BEFORE, nodes=(*BEFORE.nodes, NodeInfo("c", "tcp://c", "c", "c")), ranks=("a", "b", "c"))
    node = Elect(known, ask=None)
    node.feed(NodeDown("c"))
    node.start().answer("b", known=known, done=True, incarnation="b#2")
    node.tick(3.0)
    node.claimed()
    (said,) = node.opens()[-1].errors
    assert said.endswith("no answer from c")


def test_nothing_is_said_of_what_storage_has_when_it_did_not_answer() -> None:
    node = Elect(ask=RestoreAsk(allow_fresh=True), durable=True).start(ask=RestoreAsk(allow_fresh=True))
    node.feed(DurableRead("now", False, reason="EIO"))
    node.answer("b", known=BEFORE, done=True, sealed=OLD, incarnation="b#2")
    node.tick(3.0)
    node.claimed(reason="EIO")
    said = " ".join(node.opens()[-1].errors)
    assert "storage did not answer: EIO" in said and "storage has none" not in said
