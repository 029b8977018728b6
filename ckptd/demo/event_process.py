"""Event 4: a trainer alone dies. Event 5: a daemon alone dies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptd.demo import claims, processes
from ckptd.demo.claims import Chapter
from ckptd.demo.node import Node
from ckptd.demo.stage import START_TIMEOUT_S, Stage

SETTLE_TIMEOUT_S = 30.0
SNAPSHOT_CALL_MAX_S = 1.0  # training "did not notice" a dead daemon: no snapshot() call took longer


def trainer_killed(stage: Stage) -> None:
    chapter = stage.chapter(4, "a trainer alone is killed")
    job = stage.job
    stage.sync(job)
    rank, pid = max(job.trainer_pids().items())
    chapter.died = f"the trainer of rank {rank} (pid {pid})"
    chapter.at = time.time()
    processes.kill([pid])
    stage.detected(chapter, job, stage.nodes)
    again = stage.restart(chapter, "three-again")
    chapter.check(claims.only_from(("own",), chapter.bytes))
    stage.check_digests(chapter)
    stage.until_step(again, (chapter.restored_step or 0) + stage.pace.little)


@dataclass(frozen=True)
class Daemon:
    """What a daemon is and holds at one moment."""

    pid: int
    keeper: int
    inodes: frozenset[processes.Inode]
    used: int  # bytes of its arena

    @classmethod
    def look(cls, node: Node) -> Daemon:
        """Raises KeyError when it does not answer."""
        status = node.status() or {}
        pid = int(status["node"]["pid"])
        used = int(status["memory"]["used_bytes"])
        return cls(pid, processes.parent(pid), frozenset(processes.memfds(pid)), used)

    def __str__(self) -> str:
        return f"daemon {self.pid} under keeper {self.keeper}"


def daemon_killed(stage: Stage) -> None:
    """The steward's."""
    chapter = stage.chapter(5, "a daemon alone is killed")
    node, job = stage.nodes[0], stage.job
    stage.sync(job)
    before, trainers = _settled(stage, node), job.trainer_pids()
    chapter.at, chapter.world = time.time(), job.world
    chapter.trained_step = chapter.restored_step = job.pages.last_step()
    processes.kill([before.pid])
    chapter.died = f"ckptd of {node.name} (pid {before.pid}), the steward's"
    after = _back(stage, chapter, node, before)
    newest = stage.until_levels(job, "protection again", protected=chapter.trained_step + 1)
    chapter.seconds["protect"] = time.time() - chapter.at
    stage.until_step(job, chapter.trained_step + stage.pace.little)
    _claim_same_memory(chapter, before, after)
    chapter.claim(
        "new steps are protected again", newest["protected"] > chapter.trained_step,
        f"killed at step {chapter.trained_step}, protected now {newest['protected']}",
    )  # fmt: skip
    _claim_not_noticed(stage, chapter, trainers)


def _settled(stage: Stage, node: Node) -> Daemon:
    """Two looks in a row that agree: memory is not being given or taken just now."""
    looks = [Daemon.look(node)]

    def agree() -> Daemon | None:
        looks.append(Daemon.look(node))
        return looks[-1] if looks[-1] == looks[-2] else None

    found: Daemon = stage.cluster.wait(agree, SETTLE_TIMEOUT_S, "the daemon's memory to settle", stage.job)
    return found


def _back(stage: Stage, chapter: Chapter, node: Node, before: Daemon) -> Daemon:
    def answers() -> bool:
        pid = node.daemon_pid()
        return pid is not None and pid != before.pid

    stage.cluster.wait(answers, START_TIMEOUT_S, "the daemon to come back", stage.job)
    chapter.back = time.time()
    chapter.seconds["answer"] = chapter.back - chapter.at
    return Daemon.look(node)


def _claim_same_memory(chapter: Chapter, before: Daemon, after: Daemon) -> None:
    chapter.claim("its keeper, which never died, started it again", after.keeper == before.keeper, f"{before}; {after}")
    kept, fresh = before.inodes & after.inodes, after.inodes - before.inodes
    chapter.bytes["own"] = 0
    chapter.claim(
        "it has its memory back, nothing was copied", bool(before.inodes) and before.inodes == after.inodes,
        f"{len(kept)} of {len(before.inodes)} memfds are the very same (device and inode), {len(fresh)} are new; "
        f"{before.used} bytes of arena before, {after.used} after",
    )  # fmt: skip


def _claim_not_noticed(stage: Stage, chapter: Chapter, trainers: dict[int, int]) -> None:
    pages = stage.job.pages.refresh()
    alive = all(processes.alive(pid) for pid in trainers.values())
    chapter.claim("the trainers are the same processes", alive, f"pids {sorted(trainers.values())}")
    gaps = [rank for rank in trainers if missing([f["step"] for f in pages.steps(rank)])]
    since = pages.last_step() - chapter.trained_step
    chapter.claim("no step was missed", not gaps, f"{since} steps since the kill, on all ranks")
    waits = [f["seconds"] for f in pages.of("snapshot") if f["time"] >= chapter.at]
    worst = max(waits, default=0.0)
    chapter.claim(
        f"no snapshot() took longer than {SNAPSHOT_CALL_MAX_S:g} s", bool(waits) and worst <= SNAPSHOT_CALL_MAX_S,
        f"longest of {len(waits)} calls since the kill: {worst * 1000:.1f} ms",
    )  # fmt: skip


def missing(steps: Sequence[int]) -> list[int]:
    """Steps after which the next one is not the next number."""
    return [a for a, b in pairwise(steps) if b != a + 1]
