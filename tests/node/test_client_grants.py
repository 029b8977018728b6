"""Every rank takes its first snapshot() with step >= from_step that no earlier grant took, or gives up (D9)."""

from __future__ import annotations

from ckptd_client.grants import Grant, Grants


def test_the_earliest_grant_is_taken_first_whatever_the_order_of_arrival() -> None:
    grants = Grants()
    assert grants.arrive(Grant(1, 8, 3), -1, -1)
    assert grants.arrive(Grant(2, 7, 2), -1, -1)
    assert grants.take(1) is None
    assert grants.take(3) == Grant(2, 7, 2)
    assert grants.take(3) == Grant(1, 8, 3)
    assert grants.take(9) is None


def test_a_grant_behind_the_rank_is_late() -> None:
    grants = Grants()
    assert not grants.arrive(Grant(1, 1, 4), 5, 4)
    assert not grants.arrive(Grant(1, 1, 5), 5, 5)
    assert len(grants) == 0


def test_a_grant_for_the_step_called_last_serves_that_step_only() -> None:
    """wait() and must=True may take it as long as the state has not moved on; the next step may not."""
    grants = Grants()
    assert grants.arrive(Grant(1, 1, 0), -1, -1)
    assert grants.arrive(Grant(2, 2, 5), 5, 4)
    assert grants.overdue
    assert grants.expire() == [2]
    assert grants.take(6) == Grant(1, 1, 0)
    assert grants.arrive(Grant(2, 3, 5), 5, 4)
    assert grants.take(5) == Grant(2, 3, 5)
    assert grants.arrive(Grant(3, 4, 0), 5, -1)  # nothing was called before 5: it is the first step >= 0
    assert grants.take(5) == Grant(3, 4, 0)
    assert not grants.overdue


def test_a_grant_taken_back_is_gone() -> None:
    grants = Grants()
    grants.arrive(Grant(1, 1, 0), -1, -1)
    assert grants.take_back(1)
    assert not grants.take_back(1)
    grants.arrive(Grant(1, 2, 5), 5, 4)
    grants.clear()
    assert not grants.overdue


def test_a_step_that_an_earlier_grant_took_makes_no_later_one_late() -> None:
    """Had it come in time it would be here now."""
    grants = Grants()
    assert grants.arrive(Grant(1, 1, 5), 4, 4)
    assert grants.take(5) == Grant(1, 1, 5)
    assert grants.took(5)
    assert grants.arrive(Grant(2, 2, 5), 5, 4)
    assert not grants.overdue
    assert grants.take(6) == Grant(2, 2, 5)


def test_what_waits_behind_the_grant_that_is_taken_is_not_overdue() -> None:
    grants = Grants()
    assert grants.arrive(Grant(1, 1, 4), 5, 3)
    assert grants.arrive(Grant(2, 2, 5), 5, 3)
    assert grants.take(5) == Grant(1, 1, 4)
    assert not grants.overdue
    assert grants.take(6) == Grant(2, 2, 5)


def test_one_that_was_to_be_taken_before_the_newest_taken_is_late() -> None:
    """Elsewhere it took that step, and the newer one another."""
    grants = Grants()
    assert grants.arrive(Grant(1, 2, 5), 4, 4)
    assert grants.take(5) == Grant(1, 2, 5)
    assert not grants.arrive(Grant(2, 1, 5), 5, 4)
    assert grants.arrive(Grant(2, 3, 5), 5, 4)


def test_a_step_whose_grant_is_void_was_not_taken() -> None:
    grants = Grants()
    assert grants.arrive(Grant(1, 1, 5), 4, 4)
    assert grants.take(5) == Grant(1, 1, 5)
    grants.void(5)
    assert grants.took(5), "of another grant"
    grants.void(1)
    assert not grants.took(5)
