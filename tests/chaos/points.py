"""Every failpoint of the source, and in which trial each is met: a new one without a place here fails a test."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.cluster.nodes import REPO

# Daemons meet these while the job trains, and when it is started again.
SEALING = ("seal.begin", "seal.summed", "seal.written", "grant.given", "slot.release", "level.certified",
           "arena.keep", "arena.header.half", "arena.seal.meta")  # fmt: skip
COPYING = ("protect.push", "protect.seal", "protect.sealed", "bulk.send", "bulk.open", "fetch.serve")
CODING = ("protect.parity.seal",)  # only in a job with parity
WRITING = ("persist.write.begin", "persist.write.chunk", "persist.write.synced", "persist.write.report",
           "persist.commit.checked", "persist.commit.named", "persist.commit.synced", "persist.commit.manifest",
           "persist.commit.complete", "persist.commit.visible", "persist.commit.done")  # fmt: skip
KEEPING = ("persist.read_back", "persist.retain.verified", "persist.retain.hidden", "persist.retain.moved")
STARTING = (
    "epoch.entered",
    "epoch.persisted",
    "persist.claim.published",
    "restore.vote",
    "restore.done",
    "arena.drop",
)
DIRECT = ("restore.part",)  # only without room for a second copy
DAEMON = {
    "sealing": SEALING, "copying": COPYING, "coding": CODING, "writing": WRITING, "keeping": KEEPING,
    "starting": STARTING, "direct": DIRECT,
}  # fmt: skip
FORGETTING = ("persist.forget.asked", "persist.forget.claimed", "persist.forget.hidden",
              "persist.forget.dropped")  # fmt: skip  # one by one, in cluster/test_job_life.py
PASSING = ("restore.pass",)  # only between nodes that read a bucket, in cluster/test_bucket.py
KEEPER = ("keeper.store", "keeper.remove", "keeper.restart")
CLIENT = ("capture.granted", "capture.tensor", "capture.helping", "capture.sealing", "capture.sealed",
          "restore.load", "restore.loaded")  # fmt: skip


def in_source() -> set[str]:
    """Names that are given to ``failpoint(...)`` anywhere in what ships."""
    paths = [path for top in ("ckptd", "client") for path in (REPO / top).rglob("*.py")]
    return {name for path in paths for name in _names(path)}


def _names(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "failpoint"]
    return [
        part.value
        for call in named
        for part in ast.walk(call.args[0])
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def met() -> set[str]:
    return {*CLIENT, *KEEPER, *FORGETTING, *PASSING, *(name for names in DAEMON.values() for name in names)}
