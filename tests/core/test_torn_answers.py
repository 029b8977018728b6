"""Who answers early and who answers late tell of different moments: then everyone is asked once more (P3, D11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.restore import STRAGGLERS_S
from tests.core.elect import BEFORE, LAYOUTS, OLD, A, B, C, Elect
from tests.core.machines import at, layout, sent

OLDER, NEWER = at(5, OLD), at(6, OLD)


def held(snapshot: SnapshotId, rank: int) -> msg.HoldingFact:
    return msg.HoldingFact(snapshot, rank, 0, layout(rank).layout_id)


def says(node: Elect, turn: int, *facts: msg.HoldingFact, told: tuple[SnapshotId, ...] = ()) -> None:
    certified = tuple((snapshot, 0, False) for snapshot in told)
    node.hear("b", msg.Inventory("now", BEFORE, facts, LAYOUTS, certified, done=True, turn=turn))


def turns(node: Elect) -> list[int]:
    return [request.turn for request in sent(node.done, msg.InventoryRequest, "b")]


@pytest.fixture
def torn() -> Elect:
    """Node b answered when it held rank 1 of the older one. Then the newer one came, its certificate released the older one
    everywhere, and node a, which holds rank 0, was asked after that. (What node a holds is told by b here.)"""
    node = Elect().start()
    says(node, 1, held(NEWER, 0), held(OLDER, 1), told=(OLDER, NEWER))
    return node


def test_answers_that_do_not_add_up_to_what_was_certified_are_asked_for_again(torn: Elect) -> None:
    assert (turns(torn), torn.refusals()) == ([1, 2], [])
    says(torn, 2, held(NEWER, 0), held(NEWER, 1), told=(OLDER, NEWER))
    torn.claimed()
    assert torn.opens()[-1].snapshot == NEWER


def test_what_is_lost_is_lost_after_the_second_look(torn: Elect) -> None:
    says(torn, 2, held(NEWER, 0), held(OLDER, 1), told=(OLDER, NEWER))
    assert (turns(torn), torn.refusals()) == ([1, 2], [("now", "unrecoverable")])


def test_an_answer_to_the_first_question_is_none_to_the_second(torn: Elect) -> None:
    says(torn, 1, held(NEWER, 0), held(OLDER, 1), told=(OLDER, NEWER))
    assert torn.refusals() == []


def test_answers_that_add_up_to_nothing_are_asked_for_again() -> None:
    """Nobody was told of it yet: an older start of the job is still there, and its last rank sealed after its node had answered
    (simulator, seed 1325)."""
    node = Elect().start()
    says(node, 1, held(NEWER, 1))
    assert (turns(node), node.refusals()) == ([1, 2], [])
    says(node, 2, held(NEWER, 0), held(NEWER, 1))
    assert node.claim.ancestry == (NEWER,)


def test_what_adds_up_to_nothing_twice_is_refused() -> None:
    node = Elect().start()
    says(node, 1, held(NEWER, 1))
    says(node, 2, held(NEWER, 1))
    assert (turns(node), node.refusals()) == ([1, 2], [("now", "unrecoverable")])


def test_where_there_is_nothing_at_all_nobody_is_asked_again() -> None:
    node = Elect().start()
    says(node, 1)
    assert turns(node) == [1]


def test_answers_that_add_up_are_asked_for_once() -> None:
    node = Elect().start()
    says(node, 1, held(NEWER, 0), held(NEWER, 1), told=(OLDER, NEWER))
    assert (turns(node), node.claim.ancestry) == ([1], (NEWER,))
    node = Elect(ask=None).start()
    says(node, 1, held(NEWER, 0), told=(NEWER,))
    assert (turns(node), node.claim.ancestry) == ([1], ()), "nothing is to be restored"
    node = Elect().start()
    says(node, 1, held(NEWER, 0), held(OLDER, 0), held(OLDER, 1), told=(OLDER,))
    assert (turns(node), node.claim.ancestry) == ([1], (OLDER,)), "the newer one was told to nobody"


def test_the_second_look_does_not_wait_for_who_was_silent_at_the_first() -> None:
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))).start()
    says(node, 1, held(NEWER, 0), held(OLDER, 0), held(OLDER, 1), told=(NEWER,))
    assert turns(node) == [1], "c may still answer"
    node.tick(2.5)
    assert turns(node)[-1] == 2
    says(node, 2, held(NEWER, 0), held(OLDER, 0), held(OLDER, 1), told=(NEWER,))
    assert node.claim.ancestry == (OLDER,)


def test_after_damage_everything_is_looked_at_as_for_the_first_time() -> None:
    """Who was silent is waited for once more, and answers that do not add up are asked for again."""
    node = Elect(replace(BEFORE, nodes=(A, B, C), ranks=("a", "b", "c"))).start()
    lacking = held(NEWER, 0), held(OLDER, 0), held(OLDER, 1)
    for turn in (1, 2):
        says(node, turn, *lacking, told=(NEWER,))
        node.tick(2.5)
    node.claimed()
    node.vote(1, "fetched", ok=False, code="damage", reason="block 3")
    node.tick(STRAGGLERS_S)
    again = turns(node)[-1]
    assert again == 3
    says(node, again, *lacking, told=(NEWER,))
    assert turns(node)[-1] == again, "c may answer now"
    node.tick(2.5)
    assert turns(node)[-1] == again + 1

