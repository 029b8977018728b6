"""The table of a snapshot's phases in docs/ARCHITECTURE.md, made from the core: python -m tests.states [--write]"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from ckptd.core.protocol.machine.steward.grants import Grants
from ckptd.core.protocol.machine.steward.guards import Guards
from ckptd.core.protocol.machine.steward.snapshot import TRANSITIONS, Phase, SnapshotState
from ckptd.core.protocol.machine.steward.table import SnapshotTable

DOCUMENT = Path(__file__).parents[1] / "docs" / "ARCHITECTURE.md"
BEGIN = "<!-- made by `python -m tests.states --write`: a test compares -->\n"
END = "<!-- end of what is made -->\n"


def table() -> str:
    """One row per phase, then one per guard and where it leads."""
    rows = ["| phase | what it means |", "|---|---|"]
    rows += [f"| {phase.name} | {phase.value} |" for phase in Phase]
    rows += ["", "| from | to | guard | when |", "|---|---|---|---|"]
    found: dict[tuple[str, Phase], list[Phase]] = {}
    for (before, to), guards in TRANSITIONS.items():
        for guard in guards:
            found.setdefault((guard, to), []).append(before)
    for (guard, to), sources in sorted(found.items(), key=lambda row: list(Phase).index(row[0][1])):
        names = ", ".join(phase.name for phase in sources)
        rows.append(f"| {names} | {to.name} | `{guard}` | {meaning(guard)} |")
    return "\n".join([*rows, ""])


def meaning(guard: str) -> str:
    """The first sentence of what the guard says of itself."""
    (found,) = [method for owner in (SnapshotState, Guards, Grants, SnapshotTable) if (method := getattr(owner, guard, None))]
    text = inspect.getdoc(found)
    assert text, f"{guard} says nothing of itself"
    return " ".join(text.split()).split(". ")[0].rstrip(".")


def written() -> str:
    """What the document has."""
    text = DOCUMENT.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write() -> None:
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :])


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    else:
        print(table())
