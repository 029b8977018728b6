"""Why no snapshot is granted, besides ``events.NO_MEMORY``: the causes that metrics and statuses name before the colon (P15)."""

from __future__ import annotations

from collections.abc import Iterable

NO_STEWARD = "no steward"
FOR_A_PEER, FOR_A_RANK, FOR_STORAGE = "waiting for a peer", "waiting for a rank", "waiting for storage"
BUSY = "busy"  # with earlier snapshots: nothing is wrong
SHOWN_MAX = 5  # nodes, ranks or steps in one text


def shown(names: Iterable[object]) -> str:
    found = [str(name) for name in names]
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    return ", ".join(found[:SHOWN_MAX]) + more

