"""Retention keeps the last ones, the n-th ones and the marked ones, and never deletes the last restorable (P12)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.retention import CommitInfo, Standing, keep, lasting
from tests.core.worlds import epoch, quick


def commit(step: int, epoch_number: int = 1, *, kept: bool = False, verified: bool = True) -> CommitInfo:
    return CommitInfo(SnapshotId(epoch_number, step), kept, verified)


def steps(commits: list[CommitInfo]) -> list[int]:
    return [found.snapshot.step for found in commits]


def test_last_every_and_marked() -> None:
    commits = [commit(step, kept=step == 30) for step in range(10, 110, 10)]
    kept, doomed = keep(commits[::-1], Policy(keep_last=2, keep_every_steps=40), epoch(1))
    assert steps(kept) == [30, 40, 80, 90, 100]
    assert steps(doomed) == [10, 20, 50, 60, 70]


def test_only_what_was_read_back_counts() -> None:
    commits = [commit(1), commit(2), commit(3, verified=False), commit(4, verified=False)]
    kept, doomed = keep(commits, Policy(keep_last=1), epoch(1))
    assert (steps(kept), steps(doomed)) == ([2, 3, 4], [1])
    commits = [commit(1, verified=False), commit(2)]
    assert steps(keep(commits, Policy(keep_last=1), epoch(1))[1]) == [1]
    commits = [commit(1, verified=False), commit(2, verified=False)]
    assert keep(commits, Policy(keep_last=1), epoch(1)) == (commits, [])


def test_an_abandoned_branch_goes_but_never_instead_of_the_fork() -> None:
    """Epoch 2 went on from step 50; step 100 of epoch 1 is newer by number and restores nothing."""
    record = epoch(2, ancestry=[SnapshotId(1, 50)])
    kept, doomed = keep([commit(40), commit(50), commit(100)], Policy(keep_last=1), record)
    assert (steps(kept), steps(doomed)) == ([50, 100], [40]), "until the new line has one: its user may want it back"
    kept, doomed = keep([commit(50), commit(100), commit(60, 2, verified=False)], Policy(keep_last=1), record)
    assert (steps(kept), steps(doomed)) == ([50, 100, 60], [])
    kept, doomed = keep([commit(50), commit(90), commit(100, kept=True), commit(60, 2)], Policy(keep_last=1), record)
    assert (steps(kept), steps(doomed)) == ([100, 60], [50, 90])


def test_a_line_that_was_left_stays_until_the_next_one_has_as_many_of_its_own() -> None:
    """A script that forgot restore() lost the run that it was to go on with by its first checkpoint (a new user)."""
    before = [commit(30), commit(40), commit(50)]
    for count, gone in ((1, []), (2, []), (3, [30, 40, 50])):
        commits = [*before, *(commit(step, 2) for step in range(1, count + 1))]
        assert steps(keep(commits, Policy(keep_last=3), epoch(2))[1]) == gone


def test_what_holds_files_of_one_that_stays_or_is_read_stays() -> None:
    """Also where that one stays for the same reason only."""
    chain = [replace(commit(step), of=frozenset({SnapshotId(1, step - 10)})) for step in (20, 30)]
    commits = [commit(10), *chain, commit(40), commit(50), commit(60)]
    assert steps(keep(commits, Policy(keep_last=1), epoch(1))[1]) == [10, 20, 30, 40, 50]
    commits[4] = replace(commits[4], of=frozenset({SnapshotId(1, 30)}))
    assert steps(keep(commits, Policy(keep_last=1), epoch(1))[1]) == [10, 20, 30, 40, 50]
    assert steps(keep(commits, Policy(keep_last=2), epoch(1))[1]) == [40]
    leased = Standing(epoch(1), commits, frozenset({SnapshotId(1, 50)}))
    assert {found.step for found in leased.may_go(Policy(keep_last=1))} == {10, 20, 40}


def test_what_holds_files_of_an_older_one_that_came_later_stays() -> None:
    """P12: its flush had failed a few times, so it named files of a newer one, as checkpoints on storage may."""
    late = CommitInfo(SnapshotId(1, 10), True, True, of=frozenset({SnapshotId(1, 20)}))
    commits = [late, commit(20), commit(30), commit(40)]
    assert steps(keep(commits, Policy(keep_last=1), epoch(1))[1]) == [30]


def test_a_stale_daemon_deletes_nothing() -> None:
    commits = [commit(1), commit(2), commit(3, 2)]
    assert keep(commits, Policy(keep_last=1), epoch(1)) == (commits, [])
    assert steps(keep(commits, Policy(keep_last=1), None)[1]) == [1, 2]


@quick
@given(
    st.lists(
        st.builds(
            CommitInfo,
            st.builds(SnapshotId, st.integers(1, 3), st.integers(1, 9)),
            st.booleans(),
            st.booleans(),
        ),
        unique_by=lambda found: found.snapshot,
    ),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_the_newest_restorable_ones_always_stay(
    commits: list[CommitInfo], last: int, every: int, fork_2: int, fork_1: int
) -> None:
    record = epoch(3, ancestry=[SnapshotId(2, fork_2), SnapshotId(1, fork_1)])
    kept, doomed = keep(commits, Policy(keep_last=last, keep_every_steps=every), record)
    assert sorted(kept + doomed, key=lambda c: c.snapshot) == sorted(commits, key=lambda c: c.snapshot)
    good = sorted(c.snapshot for c in commits if c.verified and record.is_candidate(c.snapshot))
    left = {c.snapshot for c in kept}
    assert set(good[-max(last, 1) :]) <= left
    assert not any(c.keep for c in doomed)
    assert good or not doomed
    newer = {
        c.snapshot for c in commits if good and record.is_candidate(c.snapshot) and c.snapshot > good[-1]
    }
    assert newer <= left


def test_what_lasts_is_of_the_line_that_the_newest_claim_goes_on() -> None:
    """Of what was left behind nothing is written whole; where nobody has claimed anything yet, all of it is the job's."""
    policy = Policy(keep_last=1, keep_every_steps=40)
    commits = [commit(40), commit(80), commit(90, kept=True), commit(100)]
    assert lasting(Standing(None, commits, frozenset()), policy) == [at.snapshot for at in commits[:3]]
    record = epoch(2, ancestry=[SnapshotId(1, 50)])
    assert lasting(Standing(record, commits, frozenset()), policy) == [SnapshotId(1, 40)]
    odd = [replace(commits[0], whole=True), replace(commits[1], hidden=True), replace(commits[2], damaged=True)]
    assert lasting(Standing(None, odd, frozenset()), policy) == []
