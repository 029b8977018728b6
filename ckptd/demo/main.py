"""``ckptd demo``: tell the story, check its claims, write the report and the picture, leave nothing behind."""

from __future__ import annotations

import json as json_module
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from ckptd.core.errors import CkptdError
from ckptd.demo import plot
from ckptd.demo.claims import Chapter
from ckptd.demo.cluster import Cluster
from ckptd.demo.controls import control_runs
from ckptd.demo.event_all import all_killed
from ckptd.demo.event_node import goes_on, node_lost
from ckptd.demo.event_process import daemon_killed, trainer_killed
from ckptd.demo.report import Report
from ckptd.demo.stage import QUICK, START_TIMEOUT_S, Pace, Stage

NODES = 4
SECONDS_MAX = 900.0  # of which two cores that have nothing else to do take a third
CONSOLE_WIDTH_MIN = 100  # of what is written into a file or a pipe


def run(directory: Path, *, seconds_max: float = SECONDS_MAX, quick: bool = False, json: bool = False) -> int:
    """The exit status: 0 when every claim holds. ``directory`` gets report.json, timeline.png, logs/ and notebook/.

    seconds_max: the demo stops, failed, after so long. quick: fewer steps (12 instead of 50 after the first event).
    json: the report goes to stdout, the story to stderr. Raises CkptdError when the demo cannot begin.
    """
    _must_be_importable()
    console = Console(stderr=json)
    if not console.is_terminal:
        console = Console(stderr=json, width=max(console.width, CONSOLE_WIDTH_MIN))
    folder = _folder(directory)
    with _signals_as_exceptions():
        report = _story(folder, console, seconds_max, QUICK if quick else Pace())
    report.write(folder / "report.json")
    report.show(console)
    if json:
        json_module.dump(report.to_dict(), sys.stdout, indent=2)
        print()
    return 0 if report.ok else 1


def _story(folder: Path, console: Console, seconds_max: float, pace: Pace) -> Report:
    began, failure = time.monotonic(), ""
    with Cluster(folder, began + seconds_max) as cluster:
        stage = Stage(cluster, pace, console)
        try:
            _play(stage)
        except CkptdError as error:
            failure = str(error)
        except Exception:  # a daemon that answers nonsense is a failed demo, not a crashed one: report what was seen
            failure = traceback.format_exc()
        seconds = time.monotonic() - began
        files = {"report": str(folder / "report.json"), "logs": str(cluster.logs), "notebook": str(cluster.notebook)}
        picture = _draw(folder / "timeline.png", stage)
        if picture:
            files["timeline"] = picture
        return Report(stage.chapters, seconds, failure, cluster.samples, files)


def _play(stage: Stage) -> None:
    _begin(stage)
    node_lost(stage)
    goes_on(stage)
    trainer_killed(stage)
    daemon_killed(stage)
    all_killed(stage)
    control_runs(stage)


def _begin(stage: Stage) -> None:
    cluster = stage.cluster
    cluster.keygen()
    stage.say(f"{NODES} nodes start, each with its own ckptd")
    stage.nodes = cluster.start_nodes(NODES)
    stage.say(f"training starts: a character GPT under FSDP2 on {NODES} ranks, a snapshot after every step")
    job = stage.train("four", stage.nodes, "--saves", str(cluster.saves))
    stage.until_step(job, 1, START_TIMEOUT_S)
    stage.until_step(job, stage.pace.first)


def _draw(path: Path, stage: Stage) -> str:
    """The picture is no claim: without matplotlib the demo goes on without it, and says so."""
    runs = [(f"{job.world} nodes ({job.name})", plot.points_of(job.pages.refresh().steps())) for job in stage.jobs]
    chapters: list[Chapter] = sorted(stage.chapters, key=lambda c: c.number)
    try:
        plot.draw(path, runs, chapters, stage.cluster.samples)
    except ImportError:
        stage.say("no picture: matplotlib is not installed (pip install 'ckptd[demo]')")
        return ""
    return str(path)


def _must_be_importable() -> None:
    try:
        import ckptd_client  # noqa: F401
    except ImportError as error:
        raise CkptdError(f"the demo needs ckptd_client: {error}", hint="pip install -e .") from error


def _folder(directory: Path) -> Path:
    folder = directory.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").unlink(missing_ok=True)
    except OSError as error:
        raise CkptdError(f"the demo cannot write its report: {error}", where=str(folder)) from error
    return folder


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as SIGINT does: through every ``finally``."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
