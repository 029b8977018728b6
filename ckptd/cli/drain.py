"""`ckptd drain`: a node that is to go hands away what only it holds, before it goes."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

if TYPE_CHECKING:
    from ckptd.wire.rank import DrainState
    from ckptd.wire.seqpacket import RankSocket

DEADLINE = "120s"
LOOK_S = 0.5
ANSWER_TIMEOUT_S = 10.0
UNANSWERED_MAX = 5  # looks in a row, with which it gives up; a message between two daemons may be lost
STUCK_S = 5.0  # all that is left has had nowhere to go for so long: it is not going to change
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|)")
_FACTORS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@with_settings
def drain(
    loaded: Loaded,
    node: Annotated[str, typer.Argument(help="node id, as `ckptd status` shows it; none: this node", metavar="[NODE]")] = "",
    deadline: Annotated[str, typer.Option("--deadline", help="wait at most so long: 120s, 2m", metavar="TIME")] = DEADLINE,
    cancel: Annotated[bool, typer.Option("--cancel", help="the node stays after all")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the end's state, for machines")] = False,
) -> None:
    """Hand away what only this node holds in memory, the most exposed first, before it goes.

    Exit status 0: nothing on the node is needed any more. 1: the deadline passed, or nobody can take the rest; what would be lost
    is printed. The node goes on handing away, and gets nothing new to hold, until it ends or --cancel is said.
    """
    from ckptd.cli.link import connect
    from ckptd.wire.rank import DrainState

    limit_s = seconds_of(deadline)
    link = connect(loaded, DrainState)
    try:
        state = _ask(link, "off" if cancel else "on", node)
        if not cancel:
            state = _wait(link, node, state, limit_s, quiet=as_json)
    finally:
        link.close()
    done = all(job["done"] for job in state.jobs)
    _print_end(state, done=done, cancelled=cancel, as_json=as_json)
    raise typer.Exit(0 if done or cancel else 1)


def seconds_of(text: str) -> float:
    """``120s``, ``2m``, ``1.5h``, ``90``. Raises CkptdError."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise CkptdError(f"{text!r} is not a time", where="--deadline", hint="write it like 120s, 2m or 1h")
    return float(found[1]) * _FACTORS[found[2]]


def _ask(link: RankSocket, want: str, node: str) -> DrainState:
    from ckptd.cli.link import ask
    from ckptd.wire.rank import DrainAsk

    return ask(link, DrainAsk(want, node), ANSWER_TIMEOUT_S)  # type: ignore[no-any-return]


def _wait(link: RankSocket, node: str, state: DrainState, limit_s: float, *, quiet: bool) -> DrainState:
    """Until nothing is left, nothing can be done about the rest, or the time is over."""
    from ckptd.wire.rank import NO_ANSWER

    ends, stuck_since, said, unanswered = time.monotonic() + limit_s, None, "", 0
    while True:
        now = time.monotonic()
        line = _progress(state)
        if line != said and not quiet:
            typer.echo(line)
            said = line
        open_jobs = [job for job in state.jobs if not job["done"]]
        is_stuck = bool(open_jobs) and all(job["known"] and job["stuck"] == job["slots"] for job in open_jobs)
        stuck_since = (stuck_since or now) if is_stuck else None
        if not open_jobs or now >= ends or (stuck_since is not None and now - stuck_since >= STUCK_S):
            return state
        time.sleep(min(LOOK_S, max(0.0, ends - now)))
        try:
            state, unanswered = _ask(link, "look", node), 0
        except CkptdError as error:
            unanswered += 1
            if error.what != NO_ANSWER or unanswered >= UNANSWERED_MAX:
                raise
        if not state.draining:
            raise CkptdError("the drain was called off, or the daemon restarted", where=state.node, hint="ask again")


def _progress(state: DrainState) -> str:
    from ckptd.units import format_bytes

    if any(not job["known"] for job in state.jobs):
        return f"{state.node}: waiting for the steward of {sum(not job['known'] for job in state.jobs)} jobs to look"
    slots, nbytes = (sum(job[what] for job in state.jobs) for what in ("slots", "bytes"))
    return f"{state.node}: {slots} slots left, {format_bytes(nbytes)}" if slots else f"{state.node}: no slots left"


def _print_end(state: DrainState, *, done: bool, cancelled: bool, as_json: bool) -> None:
    from ckptd.cli.show import print_json

    if as_json:
        print_json({"node": state.node, "draining": state.draining, "done": done, "jobs": state.jobs})
    elif cancelled:
        typer.echo(f"{state.node} stays")
    elif done:
        typer.echo(f"nothing on {state.node} is needed any more")
        undone = f"`ckptd drain {state.node} --cancel` undoes that"
        typer.echo(f"until it ends it gets nothing new to hold that another node could take: {undone}")
    else:
        for job in state.jobs:
            for line in _unfinished(job):
                typer.echo(line)


def _unfinished(job: dict[str, Any]) -> list[str]:
    if job["done"]:
        return []
    if not job["known"]:
        return [f"job {job['job']}: its steward has not answered; what this node holds may be needed"]
    why = [f"job {job['job']}: cannot be moved: {reason}" for reason in job["reasons"]]
    falls = [f"job {job['job']}: {_fall(fall)}" for fall in job["falls"]]
    return [*why, *falls]


def _fall(fall: dict[str, int]) -> str:
    step = f"step {fall['step']} of epoch {fall['epoch']}"
    if fall["without"] < 0:
        return f"{step} would be lost from memory"
    return f"{step} would survive the loss of {fall['without']} more failure domains instead of {fall['level']}"
