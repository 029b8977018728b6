"""One job on real daemons for chaos: ranks that are forked, killed and started again, and the oracle that listens to them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckptd.core.protocol.machine.steward.grants import FULL_S
from ckptd.core.redundancy.policies import parse
from ckptd.wire.keys import ClusterKey
from tests.chaos.oracle import Broken, Oracle, Verdict
from tests.chaos.records import Records
from tests.cluster.forked import REPO, Forked
from tests.cluster.nodes import Node
from tests.waiting import until

JOB = "chaos"
RESTORE_BOUND_S = 60.0  # of a restore, above all timeouts of its daemons
PROTECT_BOUND_S = FULL_S + 30.0  # until a snapshot is protected again when all is well (P14), after what keeps all slots went
END_BOUND_S = 30.0
FENCE_BOUND_S = 5
STALL_BOUND_S = FENCE_BOUND_S + 3.0  # P5; the rest is for a machine that does other things, too
SETTINGS: dict[str, Any] = {
    "memory_budget": "96MiB", "inventory_timeout_s": 2, "steward_timeout_s": 3, "join_timeout_s": 20,
    "restore_timeout_s": 30, "fence_timeout_s": FENCE_BOUND_S, "replicate_retry_s": 0.3,
}  # fmt: skip


def encrypted(root: Path) -> dict[str, Any]:
    """Settings of a cluster whose bulk bytes are encrypted; its key is made here."""
    key = root / "key"
    ClusterKey.generate().save(key)
    return {"plain_loopback": None, "bulk_mode": "aead", "key_file": key}


class Rank(Forked):
    """One process, forked from the template of the trials."""

    def __init__(self, node: Node, job: str, kind: str, env: dict[str, str]) -> None:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("CKPTD_")}
        variables |= {
            "CKPTD_SOCKET": str(node.socket),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
            **env,
        }
        self.node = node
        with open(node.root / "ranks.log", "ab") as log, open(os.devnull, "rb") as nothing:
            stdio = [nothing.fileno(), log.fileno(), log.fileno()]
            order = {"env": variables, "uid": 0, "job": job, "kind": kind}
            super().__init__("tests.chaos.template", order, stdio)


class Job:
    """``places``: the nodes, one failure domain each. ``policy``: a redundancy, not "auto"."""

    def __init__(self, root: Path, policy: str, count: int, *, failpoint: str = "", **settings: Any) -> None:
        redundancy = parse(policy)
        assert redundancy is not None, "what is owed follows from the policy, which must say how many losses it survives"
        self.tolerates = redundancy.tolerates
        self.root, self.oracle, self.failpoint = root, Oracle(self.tolerates), failpoint
        self.settings = {**SETTINGS, "redundancy": policy, **settings}
        self.records = Records(root / "records")
        self.generation = 0
        self.ranks: list[Rank] = []
        self.lost_now: set[str] = set()  # domains lost since the ranks were started
        self._names = 0
        self.places: list[Node] = []
        for index in range(count):
            self.places.append(self._launch(self._node(index)))
        self.until_up()

    # --- nodes --------------------------------------------------------------------------------------------------
    def _node(self, index: int, name: str = "") -> Node:
        self._names += 1
        node = Node(self.root, name or f"n{index}-{self._names}", index, domain=f"d{index}", **self.settings)
        node.anew = True  # interpreters differ in the order of their sets, as on a real cluster
        return node

    def _launch(self, node: Node) -> Node:
        return node.start(wait=False, failpoint=self.failpoint)

    def until_up(self) -> None:
        for node in self.places:
            node.until_up()

    def lose(self, victims: Sequence[int]) -> None:
        """These nodes with their memory, and the ranks on them, all at once."""
        nodes = [self.places[index] for index in victims]
        pids = [p.pid for node in nodes for p in node.processes()]
        pids += [rank.pid for rank in self.ranks if rank.node in nodes and not rank.ended()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.kill()
        self._until_dead(rank for rank in self.ranks if rank.node in nodes)
        domains = {f"d{index}" for index in victims}
        self.lost_now |= domains
        self.oracle.lost(domains)

    def replace(self, victims: Sequence[int], how: str) -> None:
        """``how``: "new" node, "wiped" (the same name, empty disk), "reboot" (its state directory is still there). Not awaited."""
        for index in victims:
            old = self.places[index]
            name = "" if how == "new" else old.name
            if how != "reboot":
                shutil.rmtree(old.root / "state", ignore_errors=True)
            self.places[index] = self._launch(self._node(index, name))

    # --- ranks --------------------------------------------------------------------------------------------------
    def start(
        self, places: Sequence[int], *, fresh: bool = False, failpoints: Mapping[int, str] | None = None
    ) -> int:
        """A start of the job: rank i on the node at places[i]. ``failpoints``: rank -> what is armed there. Returns its
        generation."""
        assert not self.ranks, "the last start is still there"
        self.generation += 1
        self.lost_now = set()
        self.oracle.started(self.generation, len(places))
        kind = f"{self.generation} fresh" if fresh else str(self.generation)
        for index, place in enumerate(places):
            env = {
                "RANK": str(index), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0",
                "CHAOS_STORE": str(self.root / f"store-{self.generation}"),
                "CHAOS_RECORD": str(self.records.path(self.generation, index)),
            }  # fmt: skip
            if failpoints and index in failpoints:
                env["CKPTD_FAILPOINT"] = failpoints[index]
            self.ranks.append(Rank(self.places[place], JOB, kind, env))
        return self.generation

    def end(self) -> None:
        """The launcher ends all ranks, as torchrun does when one has died."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        self._until_dead(self.ranks)
        self.listen()
        self.listen()
        self.records.close(self.generation)
        (self.root / f"store-{self.generation}").unlink(missing_ok=True)
        self.ranks = []

    def _until_dead(self, ranks: Any) -> None:
        for rank in list(ranks):
            assert rank.ended(END_BOUND_S), f"process {rank.pid} was killed and lives on"

    # --- listening ----------------------------------------------------------------------------------------------
    def listen(self) -> None:
        for generation, rank, fact in self.records.read():
            self.oracle.heard(generation, rank, fact, self.lost_now)

    def _heard(self, true: Callable[[], bool]) -> bool:
        self.listen()
        dead = [rank for rank in self.ranks if rank.ended()]
        if dead:
            log = (dead[0].node.root / "ranks.log").read_text()[-2000:]
            raise Broken(f"P5 a rank ended by itself: {log}")
        return true()

    def judge(self) -> Verdict:
        """Of the start under way: waits until every rank has restored or was refused."""
        generation = self.generation
        until(
            lambda: self._heard(lambda: self.oracle.done(generation)),
            RESTORE_BOUND_S,
            "the restore to end (D11)",
        )
        return self.oracle.judge(generation)

    @staticmethod
    def restored_or_refused(verdict: Verdict) -> None:
        """Under a fault a restore may be refused, but nothing is lost: the next start may still find what is owed."""
        assert not verdict.error or verdict.error.startswith("refused"), verdict

    def no_rank_waited_long(self) -> None:
        assert self.oracle.slowest_s < STALL_BOUND_S, f"P5: training waited {self.oracle.slowest_s:.1f} s"

    def until_level(self, level: int) -> None:
        told = self.oracle.level_of
        what = f"start {self.generation} to be told level {level} (P14)"
        until(lambda: self._heard(lambda: told(self.generation) >= level), PROTECT_BOUND_S, what)

    def newest_told(self, level: int) -> int:
        """Step of this start; -1: none."""
        told = self.oracle.told.items()
        return max(
            (made[1] for made, t in told if made[0] == self.generation and t.level >= level), default=-1
        )

    def until_newer(self, level: int, within_s: float = PROTECT_BOUND_S) -> int:
        """A step that is not made yet is told at that level (P14). Returns it."""
        now = max((made[1] for made in self.oracle.made if made[0] == self.generation), default=0)
        what = f"a step above {now} to be told level {level} (P14)"
        try:
            until(lambda: self._heard(lambda: self.newest_told(level) > now), within_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}{self.report()}") from None
        return self.newest_told(level)

    def report(self) -> str:
        """What the daemons say of themselves, for the message of a failure."""
        lines = [""]
        for node in self.places:
            with suppress(OSError, ValueError):
                job, log = node.job(JOB), node.log.read_text()[-1500:]
                lines.append(
                    f"{node.name}: newest {job.get('newest')}, problems {node.problems()}\n{job}\n{log}"
                )
        made = [line for line in self.oracle.recent if line[0] == self.generation]
        return "\n".join([*lines, *(f"{line}" for line in made[-30:])])

    def train_for(self, seconds: float) -> None:
        over = time.monotonic() + seconds
        until(lambda: self._heard(lambda: time.monotonic() >= over), seconds + END_BOUND_S)

    def train_for_blind(self, seconds: float) -> None:
        """The same while some ranks are dead already."""
        over = time.monotonic() + seconds
        until(lambda: time.monotonic() >= over, seconds + END_BOUND_S)

    def refused(self) -> bool:
        return any(outcome["k"] == "refused" for outcome in self.oracle.outcomes[self.generation].values())

    def close(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        for node in self.places:
            node.kill()


def shuffled(rng: random.Random, places: Sequence[int]) -> list[int]:
    return rng.sample(list(places), len(places))
