"""The timeline as a picture: loss over time with the failures marked, and how far each level of safety was behind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptd.demo.claims import NOTHING_DIED, SOURCES, Chapter
from ckptd.demo.cluster import Sample

SIZE_INCHES = (12.0, 7.0)
DOTS_PER_INCH = 110
COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e")  # of the runs, in their order
GAP_S = 3.0  # between two samples: not joined by a line
LABEL_ROWS, LABEL_HEIGHT = 3, 0.12  # of the height of the axes
LEVEL_COLOURS = {"trained": "#777777", "protected": "#2ca02c", "durable": "#8c564b"}

Run = tuple[str, Sequence[tuple[float, int, float]]]  # name, [(unix time, step, loss)]


def draw(path: Path, runs: Sequence[Run], chapters: Sequence[Chapter], samples: Sequence[Sample]) -> None:
    """Writes a PNG. Needs matplotlib (``pip install ckptd[demo]``): raises ImportError without it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = min((points[0][0] for _, points in runs if points), default=0.0)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=SIZE_INCHES, sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    _draw_losses(top, runs, start)
    _draw_failures(top, bottom, chapters, start)
    _draw_levels(bottom, samples, start)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")
    pyplot.close(figure)


def _draw_losses(axes: Any, runs: Sequence[Run], start: float) -> None:
    for (name, points), colour in zip(runs, COLOURS, strict=False):
        axes.plot([t - start for t, _, _ in points], [loss for _, _, loss in points], ".-", color=colour, label=name)
    axes.set_ylabel("loss (nats per character)")
    axes.set_title("one training run and its failures; a line is one start of the job", loc="left")
    if runs:
        axes.legend(loc="lower left", frameon=False)
    axes.grid(alpha=0.3)


def _draw_failures(top: Any, bottom: Any, chapters: Sequence[Chapter], start: float) -> None:
    """A dashed line where something died, red until the first step after it."""
    marked = sorted((c for c in chapters if c.at and c.died != NOTHING_DIED), key=lambda c: c.at)
    for row, chapter in enumerate(marked):
        at, back = chapter.at - start, max(chapter.back, chapter.at) - start
        for axes in (top, bottom):
            axes.axvspan(at, back, color="#d62728", alpha=0.12, linewidth=0)
            axes.axvline(at, color="#d62728", linestyle="--", linewidth=1)
        height = 0.98 - LABEL_HEIGHT * (row % LABEL_ROWS)  # neighbours stand at different heights
        top.annotate(
            label(chapter), (at, height), xycoords=("data", "axes fraction"), xytext=(4, 0),
            textcoords="offset points", va="top", fontsize=8, color="#a01010",
        )  # fmt: skip


def label(chapter: Chapter) -> str:
    """Two or three short lines beside the mark."""
    lines = [f"{chapter.number}. {chapter.title}"]
    if chapter.steps_lost is not None:
        lines.append(f"steps lost: {chapter.steps_lost}")
    moved = {source: chapter.bytes.get(source, 0) for source in SOURCES if chapter.bytes.get(source, 0)}
    if moved:
        total = sum(moved.values())
        lines.append("from " + ", ".join(f"{source} {count / total:.0%}" for source, count in moved.items()))
    return "\n".join(lines)


def _draw_levels(axes: Any, samples: Sequence[Sample], start: float) -> None:
    for level, colour in LEVEL_COLOURS.items():
        times, steps = level_line(samples, level, start)
        axes.plot(times, steps, ".-", markersize=3, color=colour, label=level)
    axes.set_ylabel("newest step")
    axes.set_xlabel("seconds since the first step")
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", frameon=False)
    axes.grid(alpha=0.3)


def level_line(samples: Sequence[Sample], level: str, start: float) -> tuple[list[float], list[float]]:
    """Times and steps of one level, with a gap (NaN) where nobody looked for a while: the job was down."""
    times: list[float] = []
    steps: list[float] = []
    for sample in samples:
        step = getattr(sample, level)
        if step <= 0:
            continue
        if times and sample.time - start - times[-1] > GAP_S:
            times.append(sample.time - start)
            steps.append(math.nan)
        times.append(sample.time - start)
        steps.append(float(step))
    return times, steps


def points_of(steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, int, float]]:
    return [(fact["time"], fact["step"], fact["loss"]) for fact in steps]
