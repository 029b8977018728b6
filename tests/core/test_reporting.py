"""Local ranks stand at restore(): what the steward-elect is told of it, and how long (D10, D11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.joining import ATTEMPTS_KEPT_MAX, PATIENCE_S, RESTORE_PATIENCE
from tests.core.machines import EPOCH, Node, only, sent
from tests.core.restoring import (
    BEFORE,
    POLICY,
    RECORD,
    join,
    member,
    opened,
    restoring,
)


@pytest.fixture
def node() -> Node:
    return member()


def reports(done: list[ins.Instruction]) -> list[msg.JoinReport]:
    return sent(done, msg.JoinReport, "a")


def test_local_ranks_are_reported_to_rank_0s_node_until_it_answers(node: Node) -> None:
    assert [r.here for r in reports(join(node, 1))] == [(1,)]
    (report,) = reports(join(node, 2))
    assert (report.here, report.opened, report.trains) == ((1, 2), False, False)
    assert reports(node.tick(0.25)) == []
    assert len(reports(node.tick(0.25))) == 1
    opened(node)
    assert reports(node.tick(0.5))[0].opened, "reports go on until the restore is done"
    node.hear("a", msg.OpenSession(EPOCH, "s1"))
    assert not reports(node.tick(0.5))[0].opened, "it may have forgotten"
    node.hear("a", msg.RestoreDone(EPOCH, EPOCH))
    assert reports(node.tick(2.0)) == []


def test_the_world_is_said_when_it_is_asked_for(node: Node) -> None:
    """4,096 ranks on 512 nodes: the world and the epoch before are 0.7 MB, and each node said them (P16)."""
    (first,) = reports(join(node, 1))
    (short,) = reports(join(node, 2))
    assert (short.ranks, short.nodes, short.known) == ((), (), None)
    assert short.digest == first.digest != b""
    assert reports(node.tick(0.5)) == [short]
    assert reports(node.hear("b", msg.ReportAgain(short.attempt))) == [], "it does not open this"
    assert reports(node.hear("a", msg.ReportAgain("another"))) == []
    (whole,) = reports(node.hear("a", msg.ReportAgain(short.attempt)))
    assert whole.ranks and whole.nodes and whole.known == BEFORE
    assert replace(whole, ranks=(), nodes=(), known=None) == short
    assert reports(node.tick(0.5)) == [short]


def test_the_digest_names_the_world_and_the_epoch_before() -> None:
    assert reports(join(member(), 1))[0].digest == reports(join(member(), 2))[0].digest, "not who stands here"
    worlds = [(RECORD.ranks, RECORD.nodes), (RECORD.ranks, RECORD.nodes[::-1]), (RECORD.ranks[:2], RECORD.nodes)]
    found = set()
    for known in (BEFORE, replace(BEFORE, nonce="another")):
        for ranks, nodes in worlds:
            node = Node("b", known, POLICY)
            found.add(reports(node.feed(ev.RankJoined(1, "now", ranks, nodes, msg.RestoreAsk(), running=False)))[0].digest)
    assert len(found) == 6


def test_different_wishes_are_reported_apart(node: Node) -> None:
    join(node, 1)
    done = join(node, 2, ask=msg.RestoreAsk(step=3))
    assert [(r.here, r.ask) for r in reports(done)] == [
        ((1,), msg.RestoreAsk()),
        ((2,), msg.RestoreAsk(step=3)),
    ]


def failed(done: list[ins.Instruction]) -> list[tuple[str, str]]:
    return [(do.attempt, do.code) for do in only(done, ins.FailJoin)]


def test_local_ranks_that_name_different_worlds_fail(node: Node) -> None:
    join(node, 1)
    done = node.feed(ev.RankJoined(2, "now", ("a", "b"), RECORD.nodes[:2], msg.RestoreAsk(), running=False))
    assert failed(done) == [("now", "mismatch")]
    assert failed(join(node, 1)) == [("now", "superseded")], "this start is over"


def test_a_newer_start_of_the_job_ends_the_older_one(node: Node) -> None:
    join(node, 1)
    done = join(node, 1, attempt="later")
    assert failed(done) == [("now", "superseded")]
    assert failed(join(node, 2)) == [("now", "superseded")]
    assert failed(node.tick(1.0)) == []
    assert {r.attempt for r in reports(node.tick(1.0))} == {"later"}


def test_a_refusal_fails_the_start_it_is_about(node: Node) -> None:
    join(node, 1)
    assert failed(node.hear("a", msg.JoinRefused("another", "unreachable", "x"))) == []
    assert failed(node.hear("a", msg.JoinRefused("now", "unreachable", "x"))) == [("now", "unreachable")]
    assert failed(node.hear("a", msg.JoinRefused("now", "unreachable", "x"))) == []


def test_a_steward_elect_that_never_answers_is_given_up(node: Node) -> None:
    join(node, 1)
    limit = POLICY.join_timeout_s + POLICY.inventory_timeout_s + PATIENCE_S
    assert failed(node.tick(limit)) == []
    assert failed(node.tick(0.5)) == [("now", "timeout")]


def test_a_restore_may_take_longer_than_the_ranks_were_waited_for() -> None:
    """It was refused at all ranks of a node 310 s after the first of them had come, however well it went."""
    node = Node("b", BEFORE, replace(POLICY, restore_timeout_s=100.0))
    limit = POLICY.join_timeout_s + POLICY.inventory_timeout_s + PATIENCE_S
    join(node, 1, 2)
    node.tick(limit)
    opened(node)
    assert failed(node.tick(RESTORE_PATIENCE * 100.0)) == []
    assert node.machine.view()["phase"] == "restoring"


def test_a_steward_that_begins_anew_in_mid_restore_has_the_time_of_a_join() -> None:
    limit = POLICY.join_timeout_s + POLICY.inventory_timeout_s + PATIENCE_S
    node = restoring(Node("b", BEFORE, replace(POLICY, restore_timeout_s=100.0)))
    node.tick(limit)
    node.hear("a", msg.OpenSession(EPOCH, "again"))
    node.tick(1.0)
    node.hear("a", msg.OpenSession(EPOCH, "again"))
    assert failed(node.tick(limit - 1.0)) == []
    assert failed(node.tick(0.5)) == [("now", "timeout")]


def test_a_start_whose_epoch_was_opened_and_forgotten_is_given_up(node: Node) -> None:
    restoring(node)
    other = replace(RECORD, number=EPOCH + 1, nonce="other")
    opened(node, other)
    assert node.machine.joining.join is not None
    limit = RESTORE_PATIENCE * POLICY.restore_timeout_s + PATIENCE_S
    assert failed(node.tick(limit)) == []
    assert failed(node.tick(0.5)) == [("now", "timeout")]


def test_a_start_whose_local_ranks_are_all_gone_is_over(node: Node) -> None:
    join(node, 1, 2)
    node.feed(ev.RankLeft(1, clean=False))
    assert [r.here for r in reports(node.tick(0.5))] == [(2,)]
    node.feed(ev.RankLeft(2, clean=False))
    assert reports(node.tick(1.0)) == []
    node.feed(ev.RankLeft(2, clean=False))
    assert failed(join(node, 1)) == [("now", "superseded")]


def test_the_last_one_who_leaves_ends_it_at_once(node: Node) -> None:
    join(node, 1)
    node.feed(ev.RankLeft(1, clean=False))
    assert failed(join(node, 1)) == [("now", "superseded")]


def test_a_rank_of_another_node_that_leaves_ends_nothing(node: Node) -> None:
    join(node, 1)
    node.feed(ev.RankLeft(7, clean=False))
    assert len(reports(node.tick(0.5))) == 1


def test_past_starts_are_remembered_and_bounded(node: Node) -> None:
    for number in range(ATTEMPTS_KEPT_MAX + 2):
        join(node, 1, attempt=f"t{number}")
    assert failed(join(node, 1, attempt="t1")) == [("t1", "superseded")]
    past = node.machine.joining._past
    assert len(past) <= ATTEMPTS_KEPT_MAX
    assert "t0" not in past


def test_a_rank_of_a_start_that_was_replaced_is_told_so(node: Node) -> None:
    opened(node, replace(RECORD, nonce="later"))
    done = join(node, 1, attempt="before")
    assert [(do.rank, do.epoch) for do in only(done, ins.Supersede)] == [(1, EPOCH)]
    assert failed(done) == [("before", "superseded")]


def test_a_rank_that_trains_in_an_epoch_we_do_not_know_makes_us_ask_the_others(node: Node) -> None:
    done = join(node, 1, trains=True)
    assert sent(done, msg.Inventory, "a") == [msg.Inventory("", BEFORE, ())]
    assert sent(done, msg.Inventory, "b") == []
    other = Node("b", RECORD, POLICY, running=False)
    assert sent(join(other, 1, trains=True), msg.Inventory, "a") == [], "we know it"
