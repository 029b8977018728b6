"""Event 3: everything dies; a fresh start on two other nodes has nothing but the durable storage."""

from __future__ import annotations

import time

from ckptd.demo import claims, processes
from ckptd.demo.claims import Chapter
from ckptd.demo.stage import Stage

NODES_AT_LAST = 2
FINISH_TIMEOUT_S = 90.0


def all_killed(stage: Stage) -> None:
    chapter = stage.chapter(3, "everything is killed")
    newest = stage.sync(stage.job)
    _kill_everything(stage, chapter)
    began = time.time()
    stage.nodes = stage.cluster.start_nodes(NODES_AT_LAST)
    chapter.seconds["daemons"] = time.time() - began
    last_step = chapter.trained_step + stage.pace.little
    stage.restart(chapter, "two", steps=last_step)
    chapter.check(claims.only_from(("durable",), chapter.bytes))
    chapter.claim(
        "nothing durable was lost", (chapter.restored_step or 0) >= newest["durable"] > 0,
        f"durable {newest['durable']} at the kill, restored {chapter.restored_step}",
    )  # fmt: skip
    stage.check_digests(chapter)
    _ends_well(stage, chapter, last_step)


def _kill_everything(stage: Stage, chapter: Chapter) -> None:
    everything = [found for node in stage.nodes for found in node.living()]
    inodes = processes.memfds_of(found.pid for found in everything)
    chapter.at = time.time()
    processes.kill(found.pid for found in everything)
    for node in stage.nodes:
        stage.cluster.power_off(node)
    holders, unreadable = processes.holders(inodes)
    chapter.trained_step = stage.job.pages.refresh().last_step()
    chapter.died = f"all {len(everything)} processes of {len(stage.nodes)} nodes"
    chapter.check(claims.no_holder(inodes, holders, unreadable))


def _ends_well(stage: Stage, chapter: Chapter, last_step: int) -> None:
    stage.cluster.wait(stage.job.finished, FINISH_TIMEOUT_S, "the job's own end", stage.job)
    durable = stage.cluster.sample(stage.job)["durable"]
    chapter.claim(
        "the job ends by itself, its last step durable", durable == last_step, f"last step {last_step}, durable {durable}"
    )
    for node in stage.nodes:
        stage.cluster.power_off(node)
