"""How every benchmark here measures: warm first, contenders in turn (A B A B ...), medians with their spread, each as a
ratio to the machine's own limit in the same run. Machines are shared and noisy; a single absolute figure means little."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPEATS_MIN = 7
GB = 1e9


@dataclass
class Row:
    """One contender. seconds: one per repeat. limit: the contender it is compared with. floor: ratio asked for."""

    name: str
    seconds: list[float]
    nbytes: int = 0
    limit: str = ""
    ratio: float | None = (
        None  # speed relative to the limit (1: as fast), or time relative to it, see ``kind``
    )
    floor: float | None = None
    kind: str = "speed"  # "speed": higher is better; "time": lower is better
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def met(self) -> bool | None:
        if self.ratio is None or self.floor is None:
            return None
        return self.ratio >= self.floor if self.kind == "speed" else self.ratio <= self.floor


@dataclass
class Report:
    title: str
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row, limit: Row | None = None) -> Row:
        if limit is not None:
            row.limit = limit.name
            pairs = zip(row.seconds, limit.seconds, strict=False)
            ratios = [b / a if row.kind == "speed" else a / b for a, b in pairs if b > 0 and (a > 0 or row.kind == "time")]
            row.ratio = statistics.median(ratios)
        self.rows.append(row)
        return row

    def finish(self, json_path: Path | None) -> int:
        """Print the table, write the JSON. 1 when a floor was missed: for a person to look at, CI runs no benchmarks."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.title} ({machine()})")
        for column in ("what", "median s", "min", "max", "GB/s", "ratio", "floor", ""):
            table.add_column(column, justify="left" if column in ("what", "") else "right")
        for row in self.rows:
            speed = f"{row.nbytes / row.median / GB:.2f}" if row.nbytes else ""
            ratio = "" if row.ratio is None else f"{row.ratio:.3f} x {row.limit}"
            mark = {None: "", True: "ok", False: "MISSED"}[row.met]
            sign = ">=" if row.kind == "speed" else "<="
            floor = "" if row.floor is None else f"{sign} {row.floor}"
            table.add_row(
                row.name, f"{row.median:.4f}", f"{min(row.seconds):.4f}", f"{max(row.seconds):.4f}", speed, ratio,
                floor, f"{mark} {row.note}".strip(),
            )  # fmt: skip
        Console(width=160).print(table)
        for name, fact in self.facts.items():
            print(f"{name}: {fact}")
        if json_path is not None:
            body = {
                "title": self.title,
                "machine": machine(),
                "facts": self.facts,
                "rows": [asdict(r) for r in self.rows],
            }
            json_path.write_text(json.dumps(body, indent=1))
        return int(any(row.met is False for row in self.rows))


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} x {model}, {gib:.0f} GiB, Linux {platform.release()}"


def interleave(
    contenders: Mapping[str, Callable[[], float | None]], repeats: int, warm: int = 1
) -> dict[str, list[float]]:
    """Each contender once per round, in turn. It returns its own seconds, or None to be timed as a whole."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(warm + repeats):
        for name, contender in contenders.items():
            started = time.perf_counter()
            said = contender()
            seconds = time.perf_counter() - started if said is None else said
            if turn >= warm:
                taken[name].append(seconds)
    return taken


def arguments(description: str, nbytes: float = 2e9, **extra: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--bytes", type=float, default=nbytes, help=f"size of the state (default {nbytes / GB:g} GB)")
    parser.add_argument("--repeats", type=int, default=REPEATS_MIN)
    parser.add_argument("--json", type=Path, default=None, help="also write the figures to this file")
    for name, how in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), **how)
    return parser.parse_args()
