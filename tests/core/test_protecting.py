"""Which snapshot is not evicted because its copies are under way, and for how long (D9, P14)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptd.core.policy import Policy
from ckptd.core.protocol.machine.context import Context
from ckptd.core.protocol.machine.steward.protecting import PATIENCE_MAX_S, PATIENCE_S, SLACK, Protecting
from ckptd.core.protocol.machine.steward.snapshot import SnapshotState
from ckptd.core.redundancy.policies import Replicas
from tests.core.machines import EPOCH, at, member, record_of

WANTED = 2


@dataclass
class Under:
    """Three nodes, two copies wanted. ``levels``: step -> level, of what is whole."""

    levels: dict[int, int] = field(default_factory=dict)
    epoch: int = EPOCH

    def __post_init__(self) -> None:
        self.ctx = Context("1/job", member("a"), Policy(replicas=WANTED), now=100.0)
        self.ctx.record = record_of("abc")
        self.protecting = Protecting(self.ctx)

    def choose(self, after: float = 0.0, **levels: int) -> int | None:
        """The step, when so much time has passed; ``s7=1``: step 7 is at level 1 from now on."""
        self.ctx.now += after
        self.levels.update((int(step[1:]), level) for step, level in levels.items())
        found = self.protecting.choose(
            [SnapshotState(at(s, self.epoch), level=v) for s, v in self.levels.items()], WANTED
        )
        return found.step if found is not None else None


def test_the_oldest_that_lacks_copies_and_is_newer_than_the_newest_safe_one() -> None:
    assert Under({5: 0, 6: 2, 8: 1, 9: 0}).choose() == 8
    assert Under({5: 0, 6: 2}).choose() is None
    assert Under().choose() is None


def test_what_an_epoch_has_left_behind_is_not_protected() -> None:
    assert Under({7: 0}, epoch=EPOCH - 1).choose() is None


def test_no_more_is_waited_for_than_living_nodes_can_give() -> None:
    under = Under({7: 1, 8: 0})
    assert under.choose() == 7
    under.ctx.down["c"] = 100.0
    assert under.choose() == 8
    under.ctx.down["b"] = 100.0
    assert under.choose() is None


def test_no_more_is_waited_for_than_the_level_in_force_gives() -> None:
    under = Under({7: 1, 8: 0})
    under.ctx.in_force = Replicas(1)
    assert under.choose() == 8
    under.ctx.in_force = Replicas(0)
    assert under.choose() is None


def test_one_of_which_nothing_comes_gives_way_to_the_next_which_is_given_twice_as_long() -> None:
    under = Under({7: 0, 8: 0, 9: 0})
    assert under.choose() == 7
    assert under.choose(PATIENCE_S) == 7
    assert not under.protecting.overdue()
    under.ctx.now += 0.5
    assert under.protecting.overdue()
    assert under.choose() == 8
    assert not under.protecting.overdue()
    assert under.choose(2 * PATIENCE_S) == 8
    assert under.choose(0.5) == 9
    assert under.choose(4 * PATIENCE_S) == 9
    assert under.choose(0.5) is None, "all were given up"
    assert under.choose(100 * PATIENCE_S, s10=0) == 10


def test_patience_has_an_end() -> None:
    under, now = Under(), 0.0
    for step in range(7, 20):
        assert under.choose(now, **{f"s{step}": 0}) == step
        now = PATIENCE_MAX_S + 1.0


def test_each_level_more_is_waited_for_anew_and_says_how_long_the_next_may_take() -> None:
    under = Under({7: 0})
    under.choose()
    assert under.choose(PATIENCE_S - 1.0, s7=1) == 7
    assert under.choose(SLACK * (PATIENCE_S - 1.0)) == 7
    assert under.choose(0.5) is None


def test_what_is_quick_may_hang_as_long_as_ever() -> None:
    under = Under({7: 0})
    under.choose()
    under.choose(0.5, s7=1)
    assert under.choose(PATIENCE_S) == 7
    assert under.choose(0.5) is None


def test_the_longest_that_anything_took_is_not_waited_for_beyond_the_end_of_patience() -> None:
    under = Under({7: 0})
    under.choose()
    under.choose(PATIENCE_MAX_S, s7=1)
    assert under.choose(PATIENCE_MAX_S) == 7
    assert under.choose(0.5) is None


def test_time_is_not_counted_while_nothing_lacks_copies() -> None:
    under = Under({7: 0})
    under.choose()
    assert under.choose(1.0, s7=2) is None
    under.ctx.now += 100 * PATIENCE_S
    assert not under.protecting.overdue()
    assert under.choose(s7=0) == 7, "a loss: from now on"


def test_one_that_was_given_up_and_went_counts_again_when_it_is_back() -> None:
    under = Under({7: 0})
    under.choose()
    assert under.choose(PATIENCE_S + 0.5) is None
    under.levels.clear()
    under.choose()
    assert under.choose(s7=0) == 7


def test_a_new_term_knows_nothing_of_what_was_waited_for() -> None:
    under = Under({7: 0, 8: 0})
    under.choose()
    under.choose(PATIENCE_S + 0.5)
    under.protecting.clear()
    assert not under.protecting.overdue()
    assert under.choose(100 * PATIENCE_S) == 7, "nor that it was given up"
    assert under.choose(PATIENCE_S + 0.5) == 8, "nor how long that took"


def test_a_new_term_counts_the_time_of_what_is_under_way_from_its_beginning() -> None:
    under = Under({7: 0})
    under.choose()
    under.ctx.now += PATIENCE_S
    under.protecting.clear()
    assert under.choose(1.0) == 7
