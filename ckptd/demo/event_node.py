"""Event 1: a whole node dies while the durable storage is away. Event 2: the survivors train on."""

from __future__ import annotations

import shutil
import time

from ckptd.demo import claims, processes
from ckptd.demo.claims import Chapter
from ckptd.demo.processes import describe, kind
from ckptd.demo.stage import Stage

PROCESSES_OF_A_NODE = {"keeper", "daemon", "torchrun", "trainer"}


def node_lost(stage: Stage) -> None:
    """The node of rank 0, which is the job's steward and torchrun's master as well."""
    job, cluster = stage.job, stage.cluster
    chapter = stage.chapter(1, "a whole node dies while the storage is gone")
    stage.until_levels(job, "a first durable step", durable=1)
    cluster.storage_away()
    newest = _protected_ahead(stage)
    victim, survivors = stage.nodes[0], stage.nodes[1:]
    pids = {node.name: node.daemon_pid() for node in survivors}
    inodes = processes.memfds_of(f.pid for f in victim.living())
    chapter.at = time.time()
    killed = cluster.power_off(victim)
    holders, unreadable = processes.holders(inodes)
    chapter.died = f"{victim.name}: " + describe(killed)
    stage.detected(chapter, job, survivors)
    _claim_dead(chapter, killed, newest)
    chapter.check(claims.no_holder(inodes, holders, unreadable))
    stage.nodes = survivors
    stage.restart(chapter, "three")
    _claim_restored_from_memory(stage, chapter, newest, pids)
    _keep_reference(stage, chapter)


def _protected_ahead(stage: Stage) -> dict[str, int]:
    """Steps newer than the last durable one are protected, and durable stands still: the storage is gone."""
    newest = stage.cluster.sample(stage.job)
    while True:
        durable = newest["durable"]
        newest = stage.until_levels(stage.job, "protected steps ahead", protected=durable + stage.pace.ahead)
        if newest["durable"] == durable:
            return newest


def _claim_dead(chapter: Chapter, killed: list[processes.Found], newest: dict[str, int]) -> None:
    left = [f.pid for f in killed if processes.alive(f.pid)]
    dead = {kind(found) for found in killed} == PROCESSES_OF_A_NODE and not left
    chapter.claim("keeper, daemon, torchrun and trainer are dead", dead, describe(killed))
    chapter.claim(
        "the newest protected step is newer than the newest durable one", newest["protected"] > newest["durable"],
        f"at the kill: protected {newest['protected']}, durable {newest['durable']}",
    )  # fmt: skip


def _claim_restored_from_memory(
    stage: Stage, chapter: Chapter, newest: dict[str, int], pids: dict[str, int | None]
) -> None:
    restored = chapter.restored_step or 0
    chapter.check(claims.only_from(("own", "peer"), chapter.bytes))
    storage = stage.cluster.storage
    chapter.claim("the storage was away all the time", not storage.exists(), f"{storage} does not exist")
    chapter.claim(
        "nothing protected was lost", restored >= newest["protected"],
        f"protected {newest['protected']} at the kill, restored {restored}",
    )  # fmt: skip
    now = {node.name: node.daemon_pid() for node in stage.nodes}
    chapter.claim("the survivors' daemons ran on", now == pids and None not in now.values(), f"pids {now}")
    stage.check_digests(chapter)


def _keep_reference(stage: Stage, chapter: Chapter) -> None:
    """The reference run of event 2 will start from what plain torch.save wrote at that step."""
    stage.reduced_start = chapter.restored_step or 0
    saved = stage.cluster.saves / f"{stage.reduced_start}.pt"
    chapter.claim("a plain torch.save of that step exists", saved.exists(), saved.name)
    if saved.exists():
        shutil.copy(saved, stage.reference_start)


def goes_on(stage: Stage) -> None:
    """Its claims about losses are made by the control runs, later."""
    chapter = stage.chapter(2, f"training goes on on {len(stage.nodes)} nodes")
    start = stage.reduced_start
    chapter.died, chapter.at, chapter.world = claims.NOTHING_DIED, time.time(), len(stage.nodes)
    stage.until_step(stage.job, start + stage.pace.onward)
    stage.cluster.storage_back()
    stage.say("the storage is back")
    newest = stage.until_levels(stage.job, "durable steps again", durable=start + 1)
    chapter.claim(
        "once the storage is back, flushing goes on by itself", newest["durable"] > start,
        f"newest durable step {newest['durable']}",
    )  # fmt: skip
