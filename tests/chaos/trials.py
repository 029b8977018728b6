"""Kill trials: node losses with memory at random instants, and whether the right state comes back.

    python -m tests.chaos.trials --policy replicas=2 --trials 200 --seed 1

Each trial kills f failure domains at once (daemon, keeper, rank: SIGKILL), starts the job again on the survivors or with fresh
nodes in their place, judges the restore (tests/chaos/oracle.py), and goes on in the same cluster. Everything a trial chooses comes
from (seed, number of the trial); ``--first 17`` begins there. The status is 1 when something was lost that was owed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.demo.cluster import short_temp
from tests.chaos.job import Job, shuffled
from tests.chaos.oracle import Verdict

NODES = 6
EARLY = 0.2  # of the trials do not wait until a snapshot of this start is protected
EARLY_S = 0.8  # after the start: joins, restores, first snapshots
LATER_S = 0.4  # after the first one was protected
LAUNCHER_S = 0.3  # until the launcher has noticed and ends the other ranks


@dataclass(frozen=True)
class Choice:
    """What a trial does."""

    victims: list[int]
    early: bool
    delay_s: float  # of the loss
    notice_s: float
    survivors_first: bool  # the job runs without the lost nodes before they are replaced
    replaced: str
    order: list[int]  # where the ranks are next
    short_order: list[int]

    @classmethod
    def of(cls, seed: int, trial: int, f: int) -> Choice:
        rng = random.Random(f"{seed}/{trial}")
        victims = rng.sample(range(NODES), f)
        early = rng.random() < EARLY
        return cls(
            victims, early, rng.uniform(0, EARLY_S if early else LATER_S), rng.uniform(0, LAUNCHER_S),
            rng.random() < 0.5, rng.choice(("new", "wiped", "reboot")), shuffled(rng, range(NODES)),
            shuffled(rng, [place for place in range(NODES) if place not in victims]),
        )  # fmt: skip


@dataclass
class Tally:
    trials: int = 0
    restores: int = 0
    owed: int = 0
    losses: list[str] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    trial_s: list[float] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.restores += 1
        self.owed += verdict.owed is not None
        if verdict.restored is not None:
            self.gaps.append(verdict.gap)
            self.times_s.append(verdict.took_s)

    def report(self, policy: str, acknowledged: int, slowest_s: float) -> str:
        lines = [
            f"policy {policy}: {self.trials} trials, {self.restores} restores, {self.owed} of them owed, {len(self.losses)} losses",
            f"  {acknowledged} snapshots were acknowledged; longest wait of training {slowest_s:.2f} s",
        ]
        if self.gaps:
            lines.append(f"  steps lost: {_spread(self.gaps)}; seconds to restore: {_spread(self.times_s)}")
        if self.trial_s:
            lines.append(f"  seconds per trial: {_spread(self.trial_s)}")
        return "\n".join([*lines, *(f"  LOSS {text}" for text in self.losses)])


def _spread(values: list[Any]) -> str:
    return f"median {statistics.median(values):.3g}, most {max(values):.3g}"


class Trials:
    def __init__(self, root: Path, policy: str, seed: int, *, talk: bool = False) -> None:
        self.policy, self.seed, self.talk = policy, seed, talk
        self.tally = Tally()
        self.job = Job(root, policy, NODES)
        self.f = self.job.tolerates

    def run(self, trials: range) -> Tally:
        """Raises Broken for what must never be; what was owed and not restored is counted."""
        self._again(list(range(NODES)), "first start")
        for number in trials:
            began = time.monotonic()
            self.trial(number)
            self.tally.trials += 1
            self.tally.trial_s.append(time.monotonic() - began)
        return self.tally

    def trial(self, number: int) -> None:
        job, choice = self.job, Choice.of(self.seed, number, self.f)
        name = f"--policy '{self.policy}' --seed {self.seed} --first {number} --trials 1"
        if choice.early:
            job.end()
            job.start(choice.order)
        else:
            job.until_level(self.f)
        job.train_for(choice.delay_s)
        job.lose(choice.victims)
        job.train_for_blind(choice.notice_s)
        job.end()
        job.replace(choice.victims, choice.replaced)
        if choice.survivors_first:
            self._again(choice.short_order, name)
            job.until_level(0)
            job.end()
        job.until_up()
        self._again(choice.order, name)

    def _again(self, places: list[int], name: str) -> None:
        """Start the job there and judge what it restores; without an own loss it must go on from nothing at all."""
        self.job.start(places)
        verdict = self.job.judge()
        self.tally.add(verdict)
        if self.talk:
            said = f"{len(places)} ranks restored {verdict.restored}, owed {verdict.owed}, in {verdict.took_s:.2f} s"
            print(f"{name}: {said}", flush=True)
        if verdict.error:
            self.tally.losses.append(f"{name}: {verdict.owed} was owed, but {verdict.error}")
            print(self.tally.losses[-1], flush=True)
        if self.job.refused():
            self.job.end()
            self.job.start(places, fresh=True)
            self.job.judge()


@contextmanager
def swept_folder() -> Iterator[Path]:
    """A folder for everything; what runs in it ends with this process, however that ends (tests/sweeper.py)."""
    folder = Path(tempfile.mkdtemp(prefix="ckptd-t-", dir=short_temp()))
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    command = [sys.executable, "-m", "tests.sweeper", str(folder)]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        sweeper.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="replicas=1", help="replicas=K, xor(N) or rs(K,M)")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--quiet", action="store_true")
    ask = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleaned up after, as Ctrl-C
    with swept_folder() as root:
        trials = Trials(root, ask.policy, ask.seed, talk=not ask.quiet)
        try:
            trials.run(range(ask.first, ask.first + ask.trials))
        finally:
            oracle = trials.job.oracle
            print(trials.tally.report(ask.policy, oracle.acknowledged, oracle.slowest_s), flush=True)
            trials.job.close()
    return 1 if trials.tally.losses else 0


if __name__ == "__main__":
    sys.exit(main())
