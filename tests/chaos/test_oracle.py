"""The oracle itself: what it must not let pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.oracle import NO_DAEMON, Broken, Oracle
from tests.chaos.state import EVERYTHING

WORLD = 2


def digests(generation: int, step: int, rank: int) -> dict[str, str]:
    return {part: f"{generation}/{step}/{part}" for part in sorted(EVERYTHING)[rank::WORLD]}


def trained(steps: int = 4, levels: dict[int, int] | None = None) -> Oracle:
    """Generation 1 has started anew and made so many steps; ``levels``: step -> the level that a rank was told."""
    oracle = Oracle(tolerates=1)
    oracle.started(1, WORLD)
    for rank in range(WORLD):
        restored(oracle, 1, rank, None, (-1, -1))
        for step in range(1, steps + 1):
            oracle.heard(1, rank, {"k": "made", "step": step, "digests": digests(1, step, rank)})
            oracle.heard(1, rank, {"k": "called", "step": step, "status": "captured"})
    for step, level in (levels or {}).items():
        told(oracle, step, level)
    return oracle


def told(oracle: Oracle, step: int, level: int, *, rank: int = 0, **how: Any) -> None:
    oracle.heard(1, rank, {"k": "level", "step": step, "level": level, "durable": False, "void": "", **how})


def waited(oracle: Oracle, step: int, status: str, *, rank: int = 0, lost: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """A rank had been refused the step and has waited for it."""
    oracle.heard(1, rank, {"k": "called", "step": step, "status": "skipped: busy: slots hold step 3"})
    oracle.heard(1, rank, {"k": "waiting", "step": step})
    oracle.heard(1, rank, {"k": "waited", "step": step, "status": status}, lost)


def restored(
    oracle: Oracle,
    generation: int,
    rank: int,
    step: int | None,
    made: tuple[int, int],
    but: dict[str, Any] | None = None,
) -> None:
    """``but``: what is otherwise."""
    fact = {"k": "restored", "step": step, "made": list(made), "digests": digests(*made, rank), "took": 0.1}
    oracle.heard(generation, rank, fact | (but or {}))


def both(oracle: Oracle, step: int) -> Oracle:
    oracle.started(2, WORLD)
    for rank in range(WORLD):
        restored(oracle, 2, rank, step, (1, step))
    return oracle


def test_the_newest_acknowledged_or_a_newer_one() -> None:
    for step in (3, 4):
        assert not both(trained(levels={2: 1, 3: 0}), step).judge(2).error
    verdict = both(trained(levels={2: 1, 3: 0}), 2).judge(2)
    assert verdict.owed == (1, 3) and "was restored" in verdict.error


def test_a_start_that_no_daemon_was_told_of_leaves_nothing_behind_before_its_first_snapshot() -> None:
    """restore(allow_fresh=True) found its daemon restarting (make chaos): it trains on, and joins in the background."""
    oracle = trained(levels={2: 1})
    oracle.started(2, WORLD)
    for rank in range(WORLD):
        restored(oracle, 2, rank, None, (-1, -1), {"mode": NO_DAEMON})
        oracle.heard(2, rank, {"k": "made", "step": 1, "digests": digests(2, 1, rank)})
    assert oracle.may_begin_anew(3) and not oracle.may_begin_anew(2)
    for step, error in ((2, ""), (1, "(1, 1) was restored"), (None, "")):  # older than what is owed it may not be
        oracle.started(3, WORLD)
        for rank in range(WORLD):
            restored(oracle, 3, rank, step, (1, step) if step else (-1, -1))
        assert oracle.judge(3).error == error
    oracle.started(3, WORLD)
    for rank in range(WORLD):
        restored(oracle, 3, rank, 2, (1, 2))
    oracle.parents.pop(3)
    oracle.heard(2, 0, {"k": "level", "step": 1, "level": 0, "durable": False, "void": ""})
    with pytest.raises(Broken, match="not of its lineage"):
        oracle.judge(3)


def test_what_was_told_a_rank_is_not_taken_back_without_a_loss() -> None:
    """But the end of a first try may be written down after another rank has that of the second."""
    oracle = trained(levels={2: 1})
    told(oracle, 2, -1, rank=1, void="rank 0 missed it: late")
    with pytest.raises(Broken, match="P2"):
        told(oracle, 2, -1, rank=0, void="rank 0 missed it: late")
    oracle.lost({"d0"})
    told(oracle, 2, -1, rank=0, void="nowhere any more")


def test_what_a_loss_takes_is_not_owed() -> None:
    oracle = trained(levels={2: 1, 3: 0})
    oracle.lost({"d0"})
    assert oracle.owed(2) == (1, 2)
    oracle.lost({"d0"})  # the same domain once more takes nothing else
    assert oracle.owed(2) == (1, 2)
    oracle.lost({"d1"})
    assert oracle.owed(2) is None
    told(oracle, 4, -1, durable=True)
    oracle.lost({"d2"})
    assert oracle.owed(2) == (1, 4)


@pytest.mark.parametrize(
    ("status", "survived"),
    [("durable", 3), ("protected", 1), ("protected 0/1, degraded", 0), ("sealed", 0)],
)
def test_what_a_wait_promised_is_owed(status: str, survived: int) -> None:
    """Though no handle of the rank says a word of it. ``survived``: so many losses, and no more where there are more."""
    for losses in range(4):
        oracle = trained(levels={2: 1})
        told(oracle, 2, -1, durable=True)
        waited(oracle, 3, status)
        oracle.lost({f"d{number}" for number in range(losses)})
        verdict = both(oracle, 2).judge(2)
        assert (verdict.owed, bool(verdict.error)) == (((1, 3), True) if losses <= survived else ((1, 2), False)), losses


@pytest.mark.parametrize("status", ["captured", "skipped: busy: slots hold step 3", "void: late",
                                    "unreachable", "nothing to wait for"])
def test_a_wait_that_promised_nothing(status: str) -> None:
    oracle = trained(levels={2: 1})
    waited(oracle, 3, status)
    assert oracle.owed(2) == (1, 2) and not both(oracle, 2).judge(2).error


def test_what_was_lost_before_a_wait_answered_is_not_promised_anew() -> None:
    oracle = trained(levels={2: 1})
    oracle.lost({"d0"})
    waited(oracle, 3, "protected", lost={"d0"})
    assert oracle.owed(2) == (1, 3)
    oracle.lost({"d1"})
    assert oracle.owed(2) is None


def test_a_wait_that_must_not_answer_so() -> None:
    for status in ("sealed", "protected", "durable"):
        with pytest.raises(Broken, match="not every rank"):
            waited(trained(steps=4), 5, status)
        oracle = trained()
        oracle.heard(1, 1, {"k": "called", "step": 4, "status": "skipped: busy: slots hold step 3"})
        with pytest.raises(Broken, match="a rank skipped it"):
            oracle.heard(1, 0, {"k": "waited", "step": 4, "status": status})


def test_a_wait_promises_what_the_domains_of_its_start_can_give() -> None:
    oracle = trained()
    oracle.tolerates = 2  # but two ranks are in two domains
    waited(oracle, 3, "protected")
    assert oracle.told[1, 3].level == 1


def test_the_first_try_of_a_step_may_be_void_after_a_wait() -> None:
    oracle = trained()
    waited(oracle, 3, "protected")
    told(oracle, 3, -1, void="rank 1 missed it: late")
    assert oracle.owed(2) == (1, 3)


def test_nothing_only_if_nothing_is_owed() -> None:
    for levels, error in (({3: 0}, True), ({}, False)):
        oracle = trained(levels=levels)
        oracle.started(2, WORLD)
        for rank in range(WORLD):
            oracle.heard(2, rank, {"k": "refused", "error": "gone", "took": 0.1})
        assert bool(oracle.judge(2).error) == error


@pytest.mark.parametrize(
    ("ranks", "how", "match"),
    [
        ([1], {"digests": {"p0": "other"}}, "other bytes"),
        ([1], {"digests": {}}, "restored no"),
        ([0, 1], {"made": [1, 2]}, "its state is of"),
        ([1], {"step": 2, "made": [1, 2]}, "different snapshots"),
        ([0, 1], {"step": 9, "made": [1, 9]}, "not captured"),
    ],
)
def test_a_mixture_is_found(ranks: list[int], how: dict[str, Any], match: str) -> None:
    oracle = both(trained(levels={3: 0}), 3)
    for rank in ranks:
        restored(oracle, 2, rank, 3, (1, 3), how)
    with pytest.raises(Broken, match=match):
        oracle.judge(2)


def test_a_step_that_nobody_or_not_everybody_captured() -> None:
    oracle = trained()
    oracle.heard(1, 1, {"k": "called", "step": 4, "status": "skipped: busy: slots hold step 3"})
    with pytest.raises(Broken, match="not captured"):
        both(oracle, 4).judge(2)
    with pytest.raises(Broken, match="a rank skipped it"):
        told(oracle, 4, 0)
    with pytest.raises(Broken, match="not every rank"):
        told(oracle, 5, 0)


def test_a_step_of_a_lineage_that_was_left() -> None:
    oracle = both(trained(levels={2: 1}), 2)
    assert not oracle.judge(2).error
    oracle.started(3, WORLD)
    for rank in range(WORLD):
        restored(oracle, 3, rank, 4, (1, 4))
    with pytest.raises(Broken, match="not of its lineage"):
        oracle.judge(3)


def test_some_ranks_but_not_others() -> None:
    oracle = both(trained(levels={2: 1}), 2)
    oracle.heard(2, 1, {"k": "refused", "error": "no", "took": 0.1})
    with pytest.raises(Broken, match="D11"):
        oracle.judge(2)
