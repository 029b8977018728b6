"""Which nodes `ckptd plan` is asked about: a number, a list, or those of the running job."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ckptd.config_sources import Loaded
from ckptd.core.errors import CkptdError
from ckptd.core.ids import NodeInfo

NODES_MAX = 1 << 16
LIST_FORM = "NODE[:DOMAIN[:GROUP]], separated by commas"
_ONE = re.compile(r"[^\s:,]+(:[^\s:,]*){0,2}")


@dataclass(frozen=True, slots=True)
class Nodes:
    """``together``: node -> its model-parallel group, where one is known. The others are of the running job, None where not
    known: ``state_bytes`` of all ranks, ``frozen_bytes`` of them do not train; ``budget_bytes`` of the node with least."""

    nodes: tuple[NodeInfo, ...]
    together: dict[str, str] = field(default_factory=dict)
    ranks_per_node: int | None = None
    state_bytes: int | None = None
    frozen_bytes: int = 0
    budget_bytes: int | None = None
    source: str = "as given"

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(node.domain for node in self.nodes)


def parse_nodes(text: str) -> Nodes:
    """``16`` or ``a:rack1,b:rack2``. Raises ValueError."""
    text = text.strip()
    if text.isdigit():
        count = int(text)
        if not 1 <= count <= NODES_MAX:
            raise ValueError(f"{count} nodes: there are 1 to {NODES_MAX}")
        width = len(str(count - 1))
        return Nodes(tuple(_node(f"n{number:0{width}d}", "") for number in range(count)))
    nodes, together = [], {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        if not _ONE.fullmatch(part):
            raise ValueError(f"{part!r}: write a number, or {LIST_FORM}")
        name, domain, group = (*part.split(":"), "", "")[:3]
        nodes.append(_node(name, domain))
        if group:
            together[name] = group
    names = [node.node for node in nodes]
    if not nodes or len(set(names)) < len(names):
        raise ValueError("name each node once" if nodes else f"write a number, or {LIST_FORM}")
    return Nodes(tuple(nodes), together)


def running(loaded: Loaded, wanted: str | None) -> Nodes:
    """Of the job ``wanted`` (the only one if None), from this node's daemon. Raises CkptdError."""
    from ckptd.cli.page import fetch

    hint = f"say --nodes: a number, or {LIST_FORM}"
    try:
        jobs = fetch(loaded, "/status").get("jobs", [])
    except CkptdError as error:
        raise CkptdError(f"which nodes? {error.what}", where=error.where, hint=hint) from error
    found = [
        job for job in jobs if wanted in (None, job.get("job"), str(job.get("job", "")).partition("/")[2])
    ]
    if len(found) != 1:
        names = ", ".join(str(job.get("job")) for job in found or jobs) or "none"
        raise CkptdError(
            f"which job? this daemon knows: {names}", hint=f"say --job, or {hint.removeprefix('say ')}"
        )
    return _of_job(found[0])


def _of_job(job: dict[str, Any]) -> Nodes:
    nodes = tuple(_node(node["node"], node.get("domain") or "") for node in job.get("nodes", []))
    if not nodes:
        raise CkptdError(
            f"job {job.get('job')} names no nodes yet", hint="ask again when it trains, or say --nodes"
        )
    ranks = job.get("ranks", [])
    world = job.get("world", 0)
    frozen = sum(rank.get("frozen_bytes", 0) for rank in ranks)
    live = [rank["state_bytes"] for rank in ranks if "state_bytes" in rank]
    budgets = [node["memory"]["budget_bytes"] for node in job["nodes"] if "memory" in node]
    return Nodes(
        nodes,
        ranks_per_node=-(-world // len(nodes)) if world else None,
        state_bytes=sum(live) + frozen if len(live) == world else None,
        frozen_bytes=frozen,
        budget_bytes=min(budgets, default=None),
        source=f"job {job.get('job')}, now",
    )


def _node(name: str, domain: str) -> NodeInfo:
    return NodeInfo(name, "", "", domain or name)
