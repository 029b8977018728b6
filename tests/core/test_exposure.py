"""Time to full protection: of each snapshot, and of repairs after a loss (P2, P3)."""

from __future__ import annotations

from ckptd.core.ids import SnapshotId
from ckptd.core.redundancy.exposure import REPAIR, SNAPSHOT, TRACKED_MAX, Exposure


def sid(step: int) -> SnapshotId:
    return SnapshotId(1, step)


def test_from_complete_to_protected() -> None:
    job = Exposure()
    assert job.told(sid(1), 0, 1, 10.0) == []
    assert job.unprotected_s(11.0) == 1.0
    assert job.told(sid(1), 1, 1, 12.5) == [(SNAPSHOT, 2.5)]
    assert job.unprotected_s(99.0) == 0.0
    assert job.told(sid(2), 0, 1, 20.0) == [] and job.unprotected_s(21.0) == 0.0, "the older one still is"
    assert job.told(sid(2), 1, 1, 21.0) == [(SNAPSHOT, 1.0)]
    assert job.told(sid(3), 1, 1, 30.0) == [(SNAPSHOT, 0.0)], "certified when it had its copies already"
    assert job.told(sid(3), 1, 1, 31.0) == [], "once"


def test_of_two_domains_one_is_not_all() -> None:
    job = Exposure()
    for level, now in ((0, 1.0), (1, 2.0)):
        assert job.told(sid(1), level, 2, now) == []
    assert job.told(sid(1), 2, 2, 4.0) == [(SNAPSHOT, 3.0)]


def test_a_repair_lasts_until_anything_is_protected_again() -> None:
    job = Exposure()
    job.told(sid(1), 1, 1, 1.0)
    job.told(sid(1), 0, 1, 10.0)
    assert job.unprotected_s(13.0) == 3.0
    assert job.told(sid(1), 1, 1, 14.0) == [(REPAIR, 4.0)]
    job.told(sid(1), -1, 1, 20.0)  # part of it is nowhere
    job.told(sid(2), 0, 1, 21.0)
    assert job.told(sid(2), 1, 1, 25.0) == [(REPAIR, 5.0)], "a newer one"
    assert job.unprotected_s(26.0) == 0.0


def test_nothing_is_repaired_while_another_one_is_protected() -> None:
    job = Exposure()
    job.told(sid(1), 1, 1, 1.0)
    job.told(sid(2), 1, 1, 2.0)
    job.told(sid(2), 0, 1, 3.0)
    assert job.unprotected_s(9.0) == 0.0
    job.forget(lambda snapshot: snapshot == sid(1), 5.0)  # released
    assert job.unprotected_s(9.0) == 4.0


def test_a_release_for_a_newer_one_is_no_loss() -> None:
    job = Exposure()
    job.told(sid(1), 1, 1, 1.0)
    job.told(sid(2), 1, 1, 2.0)
    job.forget(lambda snapshot: snapshot == sid(1), 2.0)
    assert job.unprotected_s(9.0) == 0.0


def test_a_void_one_is_never_protected() -> None:
    job = Exposure()
    job.told(sid(1), 1, 1, 1.0)
    job.told(sid(2), 0, 1, 2.0)
    assert job.told(sid(2), -1, 0, 3.0, counts=False) == []
    assert job.unprotected_s(5.0) == 0.0
    job.told(sid(1), 0, 1, 6.0)
    job.told(sid(3), -1, 0, 7.0, counts=False)
    assert job.unprotected_s(8.0) == 2.0, "its word, in which nothing is wanted, does not end the wait"


def test_where_no_other_domain_is_left_nothing_is_waited_for() -> None:
    job = Exposure()
    job.told(sid(1), 1, 1, 1.0)
    job.told(sid(1), 0, 1, 2.0)
    assert job.told(sid(1), 0, 0, 3.0) == [] and job.unprotected_s(9.0) == 0.0


def test_what_is_remembered_is_bounded() -> None:
    job = Exposure()
    for step in range(2 * TRACKED_MAX):
        job.told(sid(step), 0, 1, float(step))
    assert len(job._rising) == TRACKED_MAX
    assert job.told(sid(2 * TRACKED_MAX - 1), 1, 1, 200.0) == [(SNAPSHOT, 200.0 - (2 * TRACKED_MAX - 1))]
