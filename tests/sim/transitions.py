"""Everything that must happen in a run of the simulator, and how often at least (tests/sim/test_chaos.py).

Where the core has states, every transition between two of them; every event, instruction and message there is, so that a new
one is asked for by itself; every code by which something is refused; every fault and every named situation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import get_args

from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg

OFTEN = 100
SELDOM = {  # 29, 20 and 99 times in 4,000 seeds (2026-11)
    "epoch loading -> fetching": 5,
    "fault: job forgotten by order": 20,
    "offer refused: stale epoch": 5,
    "restore opened -> joining": 25,
}

SITUATIONS = (
    "steward lost between holdings and certificate",
    "a void racing a certificate",
    "a stale epoch fenced",
    "a restore mixing three sources",
    "a retrained step after a fork",
)
RARER_SITUATIONS = (
    "a failed sync of a file",
    "a commit reported as failed",
    "an epoch that could not be written down",
    "restore into another world",
    "fresh start",
    "a node asked to go",
    "a drained node gone",
    "a job forgotten on a node",
    "a slice from parity",
    "data made from parity",
    "a slot too small",
)
FAULTS = (
    "a node does not hear of the new epoch", "a rank comes again as one of another world",
    "a job that is read", "bit flip", "clog", "daemon and keeper lost", "daemon dies between two instructions",
    "daemon dies while an epoch is written down", "daemon lost", "daemon stopped", "daemon stopped between two instructions",
    "daemon stopped with an old time", "memory short", "node lost", "node rebooted", "one way lost", "partition", "rank lost",
    "slow link", "state directory EIO", "state directory ENOSPC", "state directory fsync", "storage away", "storage failing",
    "storage full", "storage loses power", "storage slow", "the job started over itself", "the job started twice at once",
    "un-synced writes lost", "a write past the fence", "job killed", "job forgotten by order", "steward's daemon aimed at",
    "storage away at a claim",
)  # fmt: skip
SLOTS = (
    "own none -> FREE", "own none -> SEALED", "own FREE -> none", "own FREE -> FILLING", "own FILLING -> SEALED",
    "own FILLING -> FREE", "own FILLING -> DOOMED", "own DOOMED -> FREE", "own SEALED -> FREE", "own SEALED -> RELEASED",
    "own RELEASED -> FREE", "own SEALED -> DAMAGED", "own DAMAGED -> FREE", "replica none -> SEALED",
    "replica SEALED -> none", "replica SEALED -> RELEASED", "replica RELEASED -> none", "replica SEALED -> DAMAGED",
    "replica DAMAGED -> none",
)  # fmt: skip
SNAPSHOTS = (
    "unknown -> sealed", "unknown -> protected", "unknown -> fallen", "unknown -> void", "sealed -> protected",
    "sealed -> fallen", "sealed -> void", "protected -> sealed", "protected -> fallen", "protected -> void",
    "fallen -> sealed", "fallen -> protected", "fallen -> void", "-> durable",
)  # fmt: skip
GRANTS = ("none -> open", "open -> complete", "open -> void", "void -> settled")
EPOCHS = (
    "known for the first time", "round n+1", "idle -> joining", "idle -> running", "idle -> open", "joining -> fetching",
    "joining -> idle", "joining -> running", "fetching -> loading", "fetching -> running", "fetching -> idle",
    "loading -> running", "loading -> fetching", "loading -> idle", "open -> idle", "open -> fetching", "open -> joining",
    "open -> running", "running -> joining", "running -> open", "running -> idle", "superseded while idle",
    "superseded while joining", "superseded while open", "superseded while fetching", "superseded while loading",
    "superseded while running",
)  # fmt: skip
RESTORES = (
    "none -> joining", "none -> asking", "joining -> asking", "joining -> none", "asking -> claiming", "asking -> none",
    "claiming -> opened", "claiming -> opened without its claim", "opened -> asking", "opened -> joining", "opened -> none",
    "claiming -> asking",
)  # fmt: skip  # "claiming -> none" comes twice in 4,000 seeds: core/test_deciding.py -k during
SESSIONS = ("opened", "renewed", "taken over by another steward", "closed")
MEMBERS = ("none -> invited", "invited -> established", "established -> invited", "begun anew")
OFFICES = ("none -> first", "first -> none", "none -> successor", "successor -> none")
FLUSHES = (
    "none -> writing", "writing -> committing", "writing -> given up", "committing -> durable", "committing -> given up",
)  # fmt: skip
REFUSALS = (
    "JoinRefused: left", "JoinRefused: superseded", "JoinRefused: timeout", "JoinRefused: unreachable",
    "JoinRefused: unrecoverable", "JoinRefused: mismatch", "JoinRefused: load", "FailJoin: unreachable",
    "FailJoin: unrecoverable", "FailJoin: superseded", "FailJoin: mismatch", "FailJoin: timeout", "FailRestore: left",
    "FailRestore: superseded", "FailRestore: timeout", "FailRestore: mismatch", "FailRestore: load", "RestoreAbort: left",
    "RestoreAbort: superseded", "RestoreAbort: timeout", "RestoreAbort: mismatch", "RestoreAbort: load", "Vote fetched ok",
    "Vote fetched damage", "Vote fetched unreachable", "Vote fetched left", "Vote fetched mismatch", "Vote fetched timeout",
    "Vote fetched superseded",
    "Vote loaded ok", "Vote loaded left", "Vote loaded load", "Missed: late", "Missed: void", "Missed: taken back",
    "Missed: fence timeout", "Missed: no free slot", "Missed: no memory", "Missed: a tensor was written past the fence",
    "Missed: the rank is gone",
    "Missed: the rank is not here",
    "Missed: its slot is still being read", "Missed: another process maps its slot", "offer refused: full",
    "offer refused: void", "offer refused: stale epoch", "offer refused: unreachable", "offer refused: no memory",
)  # fmt: skip
SAID = ("Held: here", "Held: lost", "Holders: a rank", "Holders: a shared slice", "Certificate: releases")
ALARMS = ("breakpoint", "degraded", "flush", "degradation", "silent_corruption")
ANSWERS = (
    ev.EpochClaimed,
    ev.DurableRead,
    ev.FilesWritten,
    ev.CommitDone,
    ev.RankFetched,
    ev.RankLoaded,
    ev.ReplicaSent,
)

MUST: tuple[str, ...] = (
    *SITUATIONS,
    *RARER_SITUATIONS,
    *(f"fault: {name}" for name in FAULTS),
    *(f"event {kind.__name__}" for kind in get_args(ev.Event)),
    *(f"event {kind.__name__} {how}" for kind in ANSWERS for how in ("ok", "failed")),
    "event RankLeft clean",
    "event RankLeft died",
    *(f"do {kind.__name__}" for kind in get_args(ins.Instruction)),
    *(f"{way} {kind.__name__}" for kind in get_args(msg.Message) for way in ("sent", "received")),
    *(f"slot {name}" for name in SLOTS),
    *(f"grant {name}" for name in GRANTS),
    *(f"snapshot {name}" for name in SNAPSHOTS),
    *(f"epoch {name}" for name in EPOCHS),
    *(f"restore {name}" for name in RESTORES),
    *(f"session {name}" for name in SESSIONS),
    *(f"member {name}" for name in MEMBERS),
    *(f"office {name}" for name in OFFICES),
    *(f"flush {name}" for name in FLUSHES),
    *REFUSALS,
    *SAID,
    *(f"alarm: {kind}" for kind in ALARMS),
)


def rare(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in MUST if counts.get(name, 0) < SELDOM.get(name, OFTEN)}


def table(counts: Counter[str]) -> str:
    lines = [f"{counts[name]:10d}  {name}" for name in MUST]
    others = sorted(set(counts) - set(MUST))
    return "\n".join([*lines, "not asked for:", *(f"{counts[name]:10d}  {name}" for name in others)])
