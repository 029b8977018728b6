"""The story as tables for people and as JSON for machines."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptd.demo.claims import SOURCES, Chapter
from ckptd.demo.cluster import Sample

REPORT_VERSION = 1
PHASES = ("detect", "daemons", "launch", "decide", "transfer", "load", "answer", "protect")
MIB = 1 << 20


@dataclass
class Report:
    """``failure``: why the story could not be told to its end, empty when it was."""

    chapters: Sequence[Chapter]
    seconds: float
    failure: str = ""
    samples: Sequence[Sample] = ()
    files: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every claim of every event holds, and no event is missing."""
        return not self.failure and bool(self.chapters) and all(chapter.ok for chapter in self.chapters)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": REPORT_VERSION,
            "ok": self.ok,
            "seconds": round(self.seconds, 1),
            "failure": self.failure,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "events": [chapter.to_dict() for chapter in sorted(self.chapters, key=lambda c: c.number)],
            "timeline": [asdict(sample) for sample in self.samples],
            "files": self.files,
        }

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        draft.replace(path)

    def show(self, console: Console) -> None:
        for chapter in sorted(self.chapters, key=lambda c: c.number):
            console.print(chapter_table(chapter))
        held = sum(claim.ok for chapter in self.chapters for claim in chapter.claims)
        total = sum(len(chapter.claims) for chapter in self.chapters)
        verdict = "[bold green]every claim holds[/]" if self.ok else "[bold red]the demo FAILED[/]"
        console.print(f"{verdict}: {held} of the {total} claims that were looked at hold, {self.seconds:.0f} s", highlight=False)
        if self.failure:
            console.print(Text(self.failure, style="red"))
        for what, path in self.files.items():
            console.print(f"  {what}: {path}", highlight=False)


def machine() -> dict[str, Any]:
    """The versions are looked up, not imported: torch takes seconds."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def chapter_table(chapter: Chapter) -> Table:
    """What it cost in the head, one row per claim."""
    table = Table(title=f"{chapter.number}. {chapter.title}", title_justify="left", title_style="bold", expand=True)
    table.add_column("", width=2)
    table.add_column("what", ratio=2)
    table.add_column("how it is known", ratio=3)
    for what, value in facts(chapter):
        table.add_row("", what, Text(value))
    table.add_section()
    for claim in chapter.claims:
        mark = "[green]✓[/]" if claim.ok else "[bold red]✗[/]"
        table.add_row(mark, Text(claim.name), Text(claim.evidence, style="" if claim.ok else "red"))
    return table


def facts(chapter: Chapter) -> list[tuple[str, str]]:
    """(what, value) rows; those that mean nothing for this event are left out."""
    rows = [("died", chapter.died)]
    if chapter.world:
        rows.append(("ranks afterwards", str(chapter.world)))
    if chapter.steps_lost is not None:
        span = f"trained {chapter.trained_step}, back at {chapter.restored_step}"
        rows.append(("steps lost", f"{chapter.steps_lost} ({span})"))
    phases = [f"{name} {chapter.seconds[name]:.2f}" for name in PHASES if name in chapter.seconds]
    if phases:
        rows.append(("seconds to", ", ".join(phases)))
    if chapter.back > chapter.at:
        rows.append(("seconds until it was back", f"{chapter.back - chapter.at:.1f}"))
    if any(chapter.bytes.values()):
        moved = [f"{source} {chapter.bytes.get(source, 0) / MIB:.2f} MiB" for source in SOURCES]
        rows.append(("bytes by source", ", ".join(moved)))
    return rows
