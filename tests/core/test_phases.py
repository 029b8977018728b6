"""The phases of a snapshot at its steward: each transition of the table, no other, and the document's table (D9)."""

from __future__ import annotations

from itertools import product

import pytest

from ckptd.core.protocol.machine.steward.snapshot import TRANSITIONS, Phase, SnapshotState
from ckptd.core.protocol.messages import Certificate
from tests.core.certificates import steward
from tests.core.machines import EPOCH, at, fact
from tests.states import table, written

WANTED = 2


def of(phase: Phase) -> SnapshotState:
    return SnapshotState(at(7), phase)


def become(state: SnapshotState, to: Phase, by: str) -> None:
    """By the method that is named after where it leads."""
    reason = ("why",) if to is Phase.VOID else ()
    getattr(state, f"become_{to.name.lower()}")(by, *reason)


def said(level: int) -> Certificate:
    return Certificate(EPOCH, 1, at(7), level, WANTED, False)


def test_the_document_has_the_table_that_the_code_makes() -> None:
    assert written() == table(), "python -m tests.states --write"


@pytest.mark.parametrize(("before", "to"), list(TRANSITIONS))
def test_each_transition_leads_where_it_is_named_after(before: Phase, to: Phase) -> None:
    for guard in TRANSITIONS[before, to]:
        state = of(before)
        become(state, to, guard)
        assert state.phase is to


@pytest.mark.parametrize(("before", "to"), list(product(Phase, list(Phase)[1:])))
def test_there_is_no_other_one(before: Phase, to: Phase) -> None:
    every = {guard for guards in TRANSITIONS.values() for guard in guards}
    for guard in every - set(TRANSITIONS.get((before, to), ())):
        state = of(before)
        if before is not to:
            with pytest.raises(AssertionError, match=f"{before.name} does not become {to.name}"):
                become(state, to, guard)
        assert state.phase is before


@pytest.mark.parametrize("before", [Phase.GATHERING, Phase.WHOLE, Phase.PROTECTED, Phase.FALLEN])
@pytest.mark.parametrize(
    ("level", "to"), [(-1, Phase.FALLEN), (0, Phase.WHOLE), (WANTED - 1, Phase.WHOLE), (WANTED, Phase.PROTECTED)]
)
def test_a_certificates_level_says_the_phase(before: Phase, level: int, to: Phase) -> None:
    state = of(before)
    state.certify(said(level))
    assert (state.phase, state.certificate, state.certified) == (to, said(level), level >= 0)


def test_what_is_void_stays_so_with_its_reason_and_without_a_level() -> None:
    state = of(Phase.WHOLE)
    state.become_void("nowhere", "why")
    state.certify(said(-1))
    assert (state.phase, state.void, state.certified) == (Phase.VOID, "why", False)
    with pytest.raises(AssertionError, match="no level"):
        state.certify(said(0))


def test_without_a_certificate_nothing_is_said() -> None:
    state = of(Phase.GATHERING)
    assert not (state.survives() or state.survives_as_wanted() or state.lacks_a_part() or state.known_to_have_fallen())


def test_what_leaves_the_table_has_come_to_its_end() -> None:
    node = steward(replicas=0).train().capture(7)
    table = node.machine.steward.table
    seven = table.states[at(7)]
    node.capture(8)
    assert (seven.phase, at(7) in table.states) == (Phase.RELEASED, False)
    node.others["b"].held(fact(3, 1, epoch=EPOCH - 1, world=3))
    three = table.states[at(3, EPOCH - 1)]
    node.others["b"].held(fact(3, 1, epoch=EPOCH - 1, world=3), lost=True)
    assert (three.phase, at(3, EPOCH - 1) in table.states) == (Phase.GONE, False)
