"""Which durable checkpoints stay: the last few, every n-th step, the marked ones, and never fewer than one (P12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """A committed checkpoint. verified: it was read back whole; only then does it count as restorable. hidden: retention took
    it out of sight and may still reveal it. without: optimizer state is left out on purpose. There is one of each step: the first
    that was committed, whatever grant it was captured under, which ``grant`` says (0: not known) and ``snapshot`` does not.
    damaged: so said who read it back. of: older checkpoints that hold files of this one. whole: its parameters lie beside
    it as whole tensors."""

    snapshot: SnapshotId
    keep: bool = False
    verified: bool = False
    hidden: bool = False
    without: bool = False
    grant: int = 0
    damaged: bool = False
    of: frozenset[SnapshotId] = frozenset()
    whole: bool = False

    @property
    def captured(self) -> SnapshotId:
        """As memory knows it."""
        return replace(self.snapshot, grant=self.grant)


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands on storage at one moment. record: the newest claim; leased: what somebody reads or is about to restore."""

    record: EpochRecord | None
    commits: Sequence[CommitInfo]
    leased: frozenset[SnapshotId]

    def may_go(self, policy: Policy) -> set[SnapshotId]:
        """The checkpoints that nobody needs as things stand. Whatever else is hidden was hidden in error, and comes back."""
        read = (info.of for info in self.commits if info.snapshot in self.leased)
        return {info.snapshot for info in keep(self.commits, policy, self.record)[1]} - self.leased.union(*read)


def lasting(standing: Standing, policy: Policy) -> list[SnapshotId]:
    """Those that stay whatever comes, and are not whole yet."""
    found = [info for info in standing.commits if not (info.whole or info.hidden or info.damaged)]
    found = [info for info in found if info.keep or _nth(info, policy)]
    return [info.snapshot for info in found if standing.record is None or standing.record.is_candidate(info.snapshot)]


def doubted(commits: Sequence[CommitInfo]) -> set[SnapshotId]:
    """The damaged ones, and those that hold files of one: nobody has said whose file it was."""
    return set().union(*({info.snapshot, *info.of} for info in commits if info.damaged))


def keep(
    commits: Sequence[CommitInfo], policy: Policy, record: EpochRecord | None
) -> tuple[list[CommitInfo], list[CommitInfo]]:
    """(kept, doomed), both oldest first.

    record: the newest epoch. Only what may be restored after it (its own steps, ancestors up to each fork) counts as one of
    the last; a commit of an abandoned branch goes once the job has a verified one after it, and one of a line that a start left
    as a whole once there are ``keep_last`` verified ones. None: every commit counts. What holds files of one that stays, stays.
    Nothing goes while no restorable commit is verified, nor when there is a commit of a later epoch than ``record``: then we are
    the stale ones.
    """
    ordered = sorted(commits, key=lambda commit: commit.snapshot)
    restorable = [commit for commit in ordered if record is None or record.is_candidate(commit.snapshot)]
    good = [commit.snapshot for commit in restorable if commit.verified]
    stale = record is not None and any(commit.snapshot.epoch > record.number for commit in commits)
    if not good or stale:
        return ordered, []
    last = set(good[-max(policy.keep_last, 1) :])
    branch = {commit.snapshot for commit in restorable}
    first = min((fork.epoch for fork in record.ancestry), default=record.number) if record is not None else 0
    few = len(good) < policy.keep_last
    stays: set[SnapshotId] = set()
    for commit in ordered:
        nth = commit.snapshot in branch and _nth(commit, policy)
        left = few and commit.snapshot.epoch < first
        if commit.keep or commit.snapshot in last or commit.snapshot > good[-1] or nth or left:
            stays.add(commit.snapshot)
    needs = {commit.snapshot: commit.of for commit in ordered}
    open_ = [*stays]
    while open_:  # also of a newer one: an older step may have come later, and named it
        new = (needs[open_.pop()] & needs.keys()) - stays
        stays |= new
        open_ += new
    return [c for c in ordered if c.snapshot in stays], [c for c in ordered if c.snapshot not in stays]


def _nth(commit: CommitInfo, policy: Policy) -> bool:
    return policy.keep_every_steps > 0 and commit.snapshot.step % policy.keep_every_steps == 0
