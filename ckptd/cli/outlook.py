"""The table of `ckptd status` that says what a failure would cost now, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptd.cli.show import NONE, size

if TYPE_CHECKING:
    from ckptd.observe.report import OutlookReport

COLUMNS = ("if it failed now", "comes back to", "from", ">steps lost", ">of late", ">training lost", ">to move", ">restore takes")
WHO = {"process": "a process", "node": "one node", "domain": "one domain", "all": "all nodes"}
SOURCES = {"own": "own memory", "peer": "peer memory", "parity": "parity", "durable": "storage"}
UNKNOWN = "not measured yet"


def row(outlook: OutlookReport) -> list[object]:
    who = WHO.get(outlook.get("failure", ""), outlook.get("failure", ""))
    victim, step = outlook.get("victim", ""), outlook.get("step", -1)
    nothing = step < 0
    restore = NONE if nothing else seconds(outlook.get("restore_s"), "about ")
    return [
        f"{who}, worst {victim}" if victim else who,
        "the beginning" if nothing else f"step {step}",
        SOURCES.get(outlook.get("source", ""), NONE),
        outlook.get("lost_steps", NONE),
        f"up to {outlook.get('lost_steps_worst', NONE)}",
        seconds(outlook.get("lost_s")),
        size(outlook.get("move_bytes")),
        restore,
    ]


def notes(rows: Sequence[OutlookReport]) -> Iterator[str]:
    """What the seconds come from, and what is missing for them."""
    basis = dict.fromkeys(text for row in rows for text in row.get("basis", []))
    if basis:
        yield f"measured: {', '.join(basis)}; a job's own way back to restore() comes on top"
    missing = dict.fromkeys(text for row in rows if row.get("step", -1) >= 0 for text in row.get("not_measured", []))
    if missing:
        yield f"{UNKNOWN}: {', '.join(missing)}"
    if not all(row.get("exact", True) for row in rows):
        yield "nodes and domains by level, perhaps better than shown: the steward's node knows who holds what"


def seconds(value: float | None, before: str = "") -> str:
    if value is None:
        return UNKNOWN
    if value < 0.1:
        return f"{before}{1000 * value:.0f} ms"
    return f"{before}{value:.1f} s" if value < 100 else f"{before}{value:.0f} s"
