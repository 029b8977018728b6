"""What `ckptd plan` finds out, and how machines read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from ckptd.cli.flags import Loaded
from ckptd.cli.plan_nodes import Nodes
from ckptd.config_sources import DEFAULT
from ckptd.core.errors import CkptdError
from ckptd.core.redundancy.choice import Choice, choose
from ckptd.core.redundancy.policies import parse
from ckptd.core.redundancy.probability import Chance, recovery
from ckptd.core.redundancy.scheme import Scheme, scheme
from ckptd.core.redundancy.sizing import Sizing

SEED = 1  # the same question has the same answer


@dataclass(frozen=True, slots=True)
class Plan:
    """``size`` None: nobody said how large the state is. ``by_node``, ``by_domain``: chances for 1, 2, ... lost at once."""

    nodes: Nodes
    policy: str
    scheme: Scheme
    choice: Choice | None
    size: Sizing | None
    budget_bytes: int
    by_node: list[Chance]
    by_domain: list[Chance]

    @property
    def sharded(self) -> bool:
        """False: plain DDP, whose slices are captured by ranks that the client's balanced plan spreads over the job."""
        return self.size is None or not self.size.replicated

    @property
    def fits(self) -> bool:
        return self.size is None or self.size.needed_bytes <= self.budget_bytes


def make_plan(loaded: Loaded, asked: Nodes, size: Sizing | None, tolerate: int, losses: int) -> Plan:
    """Raises CkptdError where the choice is ours and nobody said how large the state is."""
    config, choice = loaded.config, None
    budget = _budget(loaded, asked)
    redundancy = None if loaded.origins["redundancy"] == DEFAULT else parse(config.redundancy)
    if redundancy is None:
        if size is None:
            hint = "say --state-bytes, or --redundancy for what is to be shown"
            raise CkptdError(
                "how large is one snapshot of the job? Nothing can be chosen without it", hint=hint
            )
        choice = choose(size, budget, tolerate)
        redundancy = choice.redundancy
    size = replace(size, redundancy=redundancy) if size is not None else None
    made = scheme(asked.nodes, redundancy, asked.together)
    fatal, draw = made.fatal_sets(), _sample()
    by_node = recovery(fatal, {node.node: node.node for node in asked.nodes}, losses, draw)
    domains = {node.node: node.domain for node in asked.nodes}
    racks = recovery(fatal, domains, losses, draw) if len(set(domains.values())) < len(domains) else []
    return Plan(asked, redundancy.text, made, choice, size, budget, by_node, racks)


def _budget(loaded: Loaded, asked: Nodes) -> int:
    """What was said, else what the running job's nodes have, else this machine's."""
    if loaded.origins["memory_budget"] == DEFAULT and asked.budget_bytes is not None:
        return asked.budget_bytes
    return loaded.config.memory_budget_bytes()


def _sample() -> Any:
    rng = Random(SEED)
    return lambda count, k: rng.sample(range(count), k)


def report(found: Plan) -> dict[str, Any]:
    size, choice = found.size, found.choice
    return {
        "nodes": [{"node": n.node, "domain": n.domain} for n in found.nodes.nodes],
        "redundancy": found.policy,
        "chosen": choice is not None,
        "reasons": list(choice.reasons) if choice else [],
        "rejected": [
            {"redundancy": r.redundancy.text, "needed_bytes": r.needed_bytes, "why": r.why}
            for r in (choice.rejected if choice else ())
        ],
        "fits": found.fits,
        "survives_domains": found.scheme.tolerates,
        "groups": [list(group) for group in found.scheme.groups] if found.sharded else [],
        "copies": {n: list(held) for n, held in found.scheme.copies.items()} if found.sharded else {},
        "memory": None if size is None else {**memory(size), "budget_bytes": found.budget_bytes},
        "sent_bytes_per_snapshot": None if size is None else int(size.sent_bytes),
        "recovery": [
            {"unit": unit, **asdict(chance), "exact": chance.exact}
            for unit, chances in (("node", found.by_node), ("domain", found.by_domain))
            for chance in chances
            if found.sharded
        ],
    }


def memory(size: Sizing) -> dict[str, int]:
    """Of the fullest node."""
    return {
        "own_bytes": int(size.own_bytes(size.where)),
        "peer_bytes": int(size.peer_bytes(size.where)),
        "steady_bytes": int(size.steady_bytes(size.where)),
        "steady_after_loss_bytes": int(size.steady_bytes(size.left)),
        "worst_after_loss_bytes": int(size.after_loss_bytes()),
        "needed_bytes": size.needed_bytes,
    }
