"""`ckptd status`: this node and, through it, its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckptd.observe.report import HealthReport, JobReport, PacingReport, RankReport, StatusReport

LEVELS = ("sealed", "protected", "durable")
OVER = ("orphaned", "finished")  # phases of jobs of which nobody trains
STATE_WORDS = {
    "no step times": "no rank reports steps",
    "measuring": "not enough steps seen",
    "within": "traffic does not slow training",
    "floor": "at pacing_floor_bytes_s",
    "deadline": "a deadline comes first",
    "held": "a look at steps without traffic",
    "windows": "in the gaps between communication",
}


@with_settings
def status(
    loaded: Loaded,
    job: Annotated[str, typer.Argument(help="only this one: NAME, or UID/NAME")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Show this node and its jobs, those that run first: nodes, ranks, newest step at each level, memory, lag, problems.

    Exit status 0 when the daemon answered; whether all is well is said by health.ok in --json, and by GET /healthz.
    """
    from ckptd.cli.page import fetch
    from ckptd.cli.show import console, print_json

    report: StatusReport = fetch(loaded, "/status")  # type: ignore[assignment]
    if job:
        report["jobs"] = _named(job, report.get("jobs", []))
    if as_json:
        print_json(report)
    else:
        screen = console()
        for part in tables(report):
            screen.print(part)


def tables(report: StatusReport) -> Iterator[RenderableType]:
    yield _node(report)
    yield from _problems(report.get("health", {}))
    jobs = report.get("jobs", [])
    if not jobs:
        yield "no job of yours is known here"
    for job in sorted(jobs, key=lambda job: job.get("phase") in OVER):
        yield from _job(job, report.get("storage", {}).get("ok", True))


def _named(name: str, jobs: list[JobReport]) -> list[JobReport]:
    """Raises CkptdError when there is none."""
    found = [job for job in jobs if name in (job.get("job", ""), job.get("job", "").partition("/")[2])]
    if not found:
        known = ", ".join(job.get("job", "") for job in jobs) or "none"
        raise CkptdError("no job of yours of this name is known here", where=name, hint=f"known: {known}")
    return found


def _node(report: StatusReport) -> RenderableType:
    from ckptd.cli.show import NONE, good, size, table

    node, storage = report.get("node", {}), report.get("storage", {})
    memory: dict[str, Any] = {**report.get("memory", {})}
    used = f"{size(memory.get('used_bytes'))} of {size(memory.get('budget_bytes'))}"
    kinds = ("own", "peer", "scratch")
    parts = [f"{kind} {size(memory.get(kind + '_bytes'))}" for kind in kinds]
    in_slots = sum(memory.get(kind + "_bytes") or 0 for kind in kinds)
    parts.append(f"kept ready {size(max(0, (memory.get('used_bytes') or 0) - in_slots))}")
    root = storage.get("root") or "none: memory only"
    cells: list[list[object]] = [
        ["node", f"{node.get('id', NONE)}  domain {node.get('domain') or NONE}  pid {node.get('pid', NONE)}"],
        ["links", f"control {node.get('control', NONE)}  bulk {node.get('bulk', NONE)}"],
        ["memory", f"{used}  ({', '.join(parts)})"],
        ["pacing", _pacing(report.get("pacing", {}))],
        ["storage", root if storage.get("ok", True) else f"{root}: {storage.get('reason') or 'not usable'}"],
        ["health", good(report.get("health", {}).get("ok", True), "ok", "see the problems")],
    ]
    return table("", ("", f"ckptd {node.get('version', '')}"), cells)


def _pacing(pacing: PacingReport) -> str:
    """One line: is traffic held back, how much, and why."""
    from ckptd.cli.show import NONE, size

    state, rate, slowdown = pacing.get("state", NONE), pacing.get("rate_bytes_s"), pacing.get("slowdown")
    limit = "no limit" if rate is None else f"at most {size(int(rate))}/s"
    known = (
        ""
        if slowdown is None
        else f", steps {slowdown:+.1%} beside traffic and captures"
        f" (captures {pacing.get('captures', 0):.1%}), {pacing.get('overhead_max', 0):.1%} allowed"
    )
    return f"{STATE_WORDS.get(state, state)}: {limit}{known}"


def _problems(health: HealthReport) -> Iterator[RenderableType]:
    from ckptd.cli.show import table, when

    cells = [
        [p.get("kind", ""), p.get("job", ""), when(p.get("first")), p.get("count", 1), p.get("text", "")]
        for p in health.get("problems", [])
    ]
    if cells:
        yield ""
        yield table("problems", ("kind", "job", "since", ">times", "what"), cells)


def _job(job: JobReport, stores: bool) -> Iterator[RenderableType]:
    from ckptd.cli.outlook import seconds
    from ckptd.cli.show import NONE, good, size, step, table

    yield ""
    newest, lag = job.get("newest", {}), job.get("lag", {})
    levels = [[level, step(newest.get(level)), lag.get(level, NONE)] for level in LEVELS]
    level = job.get("level", -1)
    wanted, redundancy = job.get("wanted", NONE), job.get("redundancy") or NONE
    held = "nothing in memory" if level < 0 else f"{level} of {wanted} domains may be lost"
    if level == wanted == 0 and redundancy != "replicas=0":
        held = "no node may be lost, for there is no second failure domain"
    held += f" ({redundancy}"
    held += ", lowered for want of memory)" if job.get("degradation") else ")"
    over = f" for {seconds(job['life_s'])}" if job.get("life_s") else ""
    title = f"job {job.get('job', '')}: epoch {job.get('epoch', NONE)}, {job.get('phase', '')}{over}, "
    world = job.get("world", NONE)
    title += f"{world} rank{'' if world == 1 else 's'}, steward {job.get('steward') or NONE}"
    yield title
    if job.get("steward_up", True) or job.get("phase") in OVER:
        yield good(not job.get("degraded", False), f"protection: {held}", f"DEGRADED: {held}")
    else:
        away = f"NOT KNOWN NOW: steward {job.get('steward')} is down, all below is of before"
        yield good(False, "", f"{away}; protection was: {held}")
    if job.get("waits"):
        yield f"no snapshot is granted: {job['waits']}"
    yield table("", ("level", ">newest step", ">steps behind"), levels)
    if job.get("flushed_bytes"):
        state, written = job["flushed_bytes"], job.get("written_bytes", 0)
        yield f"stored here since this daemon started: {size(state)} of state in {size(written)} of files ({written / state:.0%})"
    yield from _outlook(job, stores)
    yield from _members(job)


def _outlook(job: JobReport, stores: bool) -> Iterator[RenderableType]:
    from ckptd.cli.outlook import COLUMNS, notes, row
    from ckptd.cli.show import table

    rows = job.get("outlook", [])
    if rows:
        yield table("", COLUMNS, [row(outlook) for outlook in rows])
        yield from notes(rows)
        if not stores and any(row.get("source") == "durable" for row in rows):
            yield "storage is not usable now: what comes from there comes once it is"


def _members(job: JobReport) -> Iterator[RenderableType]:
    from ckptd.cli.show import NONE, good, size, step, table

    nodes = [
        [n.get("node", ""), n.get("domain", ""), good(n.get("up", False), "up, leaving" if n.get("leaving") else "up", "DOWN"),
         size(n.get("memory", {}).get("used_bytes")), size(n.get("memory", {}).get("budget_bytes"))]
        for n in job.get("nodes", [])
    ]  # fmt: skip
    if nodes:
        yield table("", ("node", "domain", "link", ">memory used", ">budget"), nodes)
    gone = "GONE" if job.get("phase") != "idle" else "none yet"
    ranks = [
        [r.get("rank"), r.get("node", ""), _process(r, gone),
         step(r.get("step")), NONE if r.get("silent") else r.get("free_slots", "")]
        for r in job.get("ranks", [])
    ]  # fmt: skip
    if ranks:
        yield table("", (">rank", "node", "process", ">step", ">free slots"), ranks)


def _process(rank: RankReport, gone: str) -> RenderableType:
    from ckptd.cli.show import good

    if rank.get("silent"):
        gone = "its daemon does not answer"
    return good(rank.get("up", False) or rank.get("finished", False), "here" if rank.get("up") else "finished", gone)
