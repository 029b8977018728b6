"""One job as status, health and metrics show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.protocol.machine.context import is_told
from ckptd.core.protocol.machine.ranks import FINISHED
from ckptd.observe.report import JobReport, PeerReport, RankReport

if TYPE_CHECKING:
    from ckptd.daemon.job import JobShell


def summary(job: JobShell) -> JobReport:
    """For status, health and metrics: steps are -1 where there is none."""
    record, view = job.record, job.machine.view()
    newest = {"sealed": -1, "protected": -1, "durable": -1}
    level, wanted = -1, 0
    told_of = record is not None and is_told(record, job.services.node.node, holds=bool(job.machine.slots.sealed))
    for snapshot, told in sorted(job.levels.items()):
        if told.void or record is None or not record.is_candidate(snapshot):
            continue
        if snapshot in job.machine.levels.released and not told.durable:
            continue  # P2: its memory went for a newer one
        wanted = told.wanted if told_of else 0
        if told_of and told.level >= 0:
            newest["sealed"] = snapshot.step
            level = told.level
        if told_of and told.level >= max(1, told.wanted):
            newest["protected"] = snapshot.step
        if told.durable and snapshot not in job.durable.damaged:
            newest["durable"] = snapshot.step
    ranks = _rank_reports(job)
    lifetime = job.machine.lifetime
    phase = lifetime.life.state.value if lifetime.life.over else str(view.get("phase", ""))
    trains = phase == "running" and bool(job.ranks.progress)
    trained = max([*job.ranks.progress.values(), *newest.values()])
    leaving = job.machine.ctx.leaving
    aims = {"sealed": trains, "protected": trains and wanted > 0, "durable": trains and job.services.storage is not None}
    nodes: list[PeerReport] = [
        {"node": n.node, "domain": n.domain, "leaving": n.node in leaving} for n in (record.nodes if record else ())
    ]
    return {
        "job": job.job,
        "epoch": record.number if record else 0,
        "phase": phase,
        "life": lifetime.life.state.value,
        "life_s": round(lifetime.age(job.services.now()), 3) if lifetime.life.over else 0.0,
        "steward": str(view.get("steward", "")),
        "world": record.world if record else 0,
        "nodes": nodes,
        "ranks": ranks,
        "newest": newest,
        "lag": {name: trained - max(step, 0) for name, step in newest.items() if step >= 0 or aims[name]},  # before the first: all
        "redundancy": str(view.get("redundancy", "")),
        "degradation": int(view.get("degradation", 0)),
        "waits": job.losses.waits,
        "wanted": wanted,
        "level": level,
        "degraded": bool(record) and (max(level, 0) < wanted or (level < 0 and trains)),
        "flushed_bytes": job.durable.flushed_bytes,
        "written_bytes": job.durable.written_bytes,
        "unprotected_s": round(job.meter.unprotected_s(), 3),
    }


def _rank_reports(job: JobShell) -> list[RankReport]:
    """Those of the newest epoch that live here."""
    here, homes = job.services.node.node, job.record.ranks if job.record is not None else ()
    found: list[RankReport] = []
    for rank in (rank for rank, node in enumerate(homes) if node == here):
        own = job.local_slots.by_rank.get(rank)
        step = job.ranks.progress.get(rank, -1)
        report: RankReport = {"rank": rank, "node": here, "step": step, "free_slots": 0, "up": False}
        gone = job.machine.ranks.here.get(rank)
        report["finished"] = gone is not None and gone.left == FINISHED
        if own is not None:
            report |= {"free_slots": len(own.free), "up": own.session is not None}
            if own.state_bytes:  # not of slots that were taken back from memory
                report |= {"state_bytes": own.state_bytes, "frozen_bytes": own.frozen_bytes}
        found.append(report)
    return found
