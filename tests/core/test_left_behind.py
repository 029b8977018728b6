"""What a start passes by or refuses although it lies on storage: said by name, and with what can be done (P15)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.ids import EpochRecord
from ckptd.core.protocol.events import DurableRead
from ckptd.core.protocol.machine.steward.decide import decide
from ckptd.core.protocol.machine.steward.gather import Gather
from ckptd.core.protocol.messages import Inventory, RestoreAsk
from tests.core.elect import A
from tests.core.machines import at

STORED = (at(20, 1), at(40, 1))
RAN = EpochRecord(1, "x", ("a",), (A,), before=(-1, ()))
ANEW = EpochRecord(2, "y", ("a",), (A,), before=(1, ()))  # by allow_fresh=True
BACK = EpochRecord(2, "y", ("a",), (A,), (at(20, 1),), before=(1, ()))  # by restore(step=20)
COPIED = "copied below another job's name, with those that hold files of it (`ckptd ls`), it can be continued there"


def start(last: EpochRecord, ask: RestoreAsk, *, sealed: int = 1) -> Gather:
    """Of one rank on node a, whose memory holds nothing; storage has steps 20 and 40 of epoch 1."""
    gather = Gather("z", ("a",), (A,), 0.0)
    gather.joined, gather.asked = {0: ask}, {"a": A}
    told = ((at(33, 1), 0, False),)
    gather.answers = {"a": Inventory("z", last, (), done=True, incarnation="a#1", sealed=sealed, certified=told)}
    gather.records = [RAN, last] if last != RAN else [RAN]
    gather.durable = DurableRead("z", True, last, STORED)
    return gather


def test_what_storage_has_of_a_line_that_was_left_behind_is_not_called_gone() -> None:
    """A new user: "its snapshots are held nowhere any more, storage has none", with both checkpoints there."""
    told = decide(start(ANEW, RestoreAsk()), 2, (), {})
    assert (told.record, told.code) == (None, "unrecoverable")
    left = f"step 40 of epoch 1 was left behind when the job started anew; {COPIED}"
    assert told.reason == f"{left}; allow_fresh=True begins anew"


def test_what_became_of_the_line_since_is_said_as_well() -> None:
    told = decide(start(ANEW, RestoreAsk(), sealed=2), 2, (), {})
    became = "its snapshots of epoch 2 are held nowhere any more, storage has none of that line"
    assert told.reason.startswith(f"this job has run before, and {became}; step 40 of epoch 1 was left behind")


@pytest.mark.parametrize("step", [33, 34])
def test_who_mistook_a_step_is_told_what_there_is_and_not_how_to_lose_it(step: int) -> None:
    """The hint said allow_fresh=True, and the next start had left everything behind. Of step 33 somebody was told a level."""
    told = decide(start(RAN, RestoreAsk(step=step)), 2, (), {})
    why = {33: "step 33 of epoch 1: memory holds nothing of it, nor does storage", 34: "there is no checkpoint of step 34"}[step]
    assert (told.record, told.reason) == (None, f"{why}; restore() takes step 40 of epoch 1")


@pytest.mark.parametrize("lacks", ["no storage", "storage was not asked"])
def test_storage_is_not_spoken_for_where_nobody_looked_there(lacks: str) -> None:
    gather = start(RAN, RestoreAsk(step=33, source="memory" if lacks != "no storage" else None))
    told = decide(replace(gather, claims=lacks != "no storage"), 2, (), {})
    assert told.reason.startswith("step 33 of epoch 1: memory holds nothing of it; ")


@pytest.mark.parametrize("ask", [RestoreAsk(step=20), RestoreAsk(step=20, source="durable")])
def test_who_goes_back_is_told_what_is_left_behind(ask: RestoreAsk) -> None:
    """A program that was only to look at step 20 took the run back to it, and nobody said so."""
    told = decide(start(RAN, ask), 2, (), {})
    assert told.candidate is not None and told.candidate.snapshot == at(20, 1)
    deleted = "is left behind by this start, and is deleted, unless kept, when it has a checkpoint of its own"
    assert told.errors == (f"step 40 of epoch 1 {deleted}; {COPIED}",)


def test_so_is_the_next_start_where_that_one_took_nothing() -> None:
    told = decide(start(BACK, RestoreAsk()), 3, (), {})
    assert told.candidate is not None and told.candidate.snapshot == at(20, 1)
    assert told.errors == (f"step 40 of epoch 1 was left behind when the job went back to step 20 of epoch 1; {COPIED}",)


@pytest.mark.parametrize(("last", "ask"), [(RAN, RestoreAsk()), (RAN, RestoreAsk(step=40)), (RAN, RestoreAsk(source="durable"))])
def test_who_takes_the_newest_is_told_nothing(last: EpochRecord, ask: RestoreAsk) -> None:
    told = decide(replace(start(last, ask), answers={"a": Inventory("z", last, (), done=True, incarnation="a#1")}), 2, (), {})
    assert told.candidate is not None and told.candidate.snapshot == at(40, 1)
    assert told.errors == ()


def test_what_was_left_behind_long_ago_is_not_said_at_each_start() -> None:
    gather = start(BACK, RestoreAsk())
    gather.durable = DurableRead("z", True, BACK, (*STORED, at(30, 2)))
    told = decide(gather, 3, (), {})
    assert told.candidate is not None and (told.candidate.snapshot, told.errors) == (at(30, 2), ())
