"""Node losses at random instants in a cluster of six: what is owed is always restored (P1, P2, P3, P7, P9, P14).

``CHAOS_TRIALS`` is the number for each policy of `make chaos`, ``CHAOS_SEED`` their seed, ``CHAOS_POLICIES`` the policies
("replicas=1;rs(4,2)").
One by hand: `python -m tests.chaos.trials --help`.
"""

from __future__ import annotations

import os

import pytest

from tests.chaos.trials import Trials
from tests.short import short_folder

TRIALS = int(os.environ.get("CHAOS_TRIALS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))
POLICIES = os.environ.get("CHAOS_POLICIES", "replicas=1;replicas=2;xor(3);rs(4,2)").split(";")


def losses(policy: str, first: int, count: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Of so many trials, in which something was owed."""
    with short_folder() as root:
        trials = Trials(root, policy, SEED)
        try:
            tally = trials.run(range(first, first + count))
        finally:
            oracle = trials.job.oracle
            with capsys.disabled():
                print("\n" + trials.tally.report(policy, oracle.acknowledged, oracle.slowest_s), flush=True)
            trials.job.close()
    assert tally.trials == count and tally.owed > 0
    return tally.losses


def test_some_losses(capsys: pytest.CaptureFixture[str]) -> None:
    assert losses("replicas=1", 0, 1, capsys) == []


@pytest.mark.chaos
@pytest.mark.parametrize("policy", POLICIES)
def test_many_losses(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert losses(policy, 1, TRIALS, capsys) == []
