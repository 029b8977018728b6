"""What `ckptd plan` prints for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptd.cli.plan_report import Plan
from ckptd.cli.show import good, table
from ckptd.cli.sizing import formula
from ckptd.core.redundancy.probability import Chance
from ckptd.core.redundancy.scheme import Scheme
from ckptd.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUPS_SHOWN = 8
DDP = "each slice by as many ranks as survive that, in different domains, spread over the job: any more losses may hit all of one"


def tables(found: Plan) -> Iterator[RenderableType]:
    domains = len(set(found.nodes.domains))
    rows: list[list[object]] = [
        ["nodes", f"{len(found.nodes.nodes)} in {domains} failure domains ({found.nodes.source})"]
    ]
    rows.append(["redundancy", found.policy])
    rows += [
        ["because" if at == 0 else "", reason]
        for at, reason in enumerate(found.choice.reasons if found.choice else ())
    ]
    rows.append(["survives", _survives(found.scheme.tolerates)])
    rows += _groups(found.scheme) if found.sharded else [["held by", DDP]]
    rows += _costs(found)
    if found.size is not None:
        rows.append(["fits", good(found.fits, f"yes, memory_budget is {format_bytes(found.budget_bytes)}",
                                  f"NO, memory_budget is {format_bytes(found.budget_bytes)}")])  # fmt: skip
    yield table("", ("", "plan"), rows)
    if found.choice and found.choice.rejected:
        yield ""
        yield table(
            "rejected", ("redundancy", "why"), [[r.redundancy.text, r.why] for r in found.choice.rejected]
        )
    if found.sharded:
        yield from _chances("nodes", found.by_node)
    if found.sharded and found.by_domain:
        yield from _chances("failure domains", found.by_domain)


def _groups(made: Scheme) -> Iterator[list[object]]:
    holders = dict.fromkeys(tuple(sorted((node, *held))) for node, held in made.copies.items())
    for name, groups in (("parity groups", made.groups), ("held together by", tuple(holders))):
        if groups:
            shown = "  ".join("+".join(group) for group in groups[:GROUPS_SHOWN])
            more = len(groups) - GROUPS_SHOWN
            yield [name, shown + (f"  and {more} more (--json has them)" if more > 0 else "")]


def _costs(found: Plan) -> Iterator[list[object]]:
    size = found.size
    if size is None:
        held, sent = max(found.scheme.held().values()), max(found.scheme.sent().values())
        yield [
            "per node",
            f"holds {held:.3g} of a node's state for others per generation, sends {sent:.3g} per snapshot",
        ]
        return
    own, peer = size.own_bytes(size.where), size.peer_bytes(size.where)
    yield ["memory", f"{format_bytes(own + peer)} = own {format_bytes(own)} + of others {format_bytes(peer)}"]
    after = f"{format_bytes(size.steady_bytes(size.left))}, on the way there {format_bytes(size.after_loss_bytes())}"
    yield ["after a loss", f"{after} ({len(size.left)} nodes left)"]
    yield ["needs", f"{format_bytes(size.needed_bytes)} = {formula(size)}"]
    yield ["on the wire", f"{format_bytes(size.sent_bytes)} sent, as much received, per node and snapshot"]


def _chances(unit: str, chances: list[Chance]) -> Iterator[RenderableType]:
    rows = [[c.losses, probability(c.value), _how(c), probability(c.bound)] for c in chances]
    yield ""
    yield f"recovery from memory by {unit} lost at once"
    yield table("", (">lost", ">probability", "", ">GEMINI's bound"), rows)


def _how(chance: Chance) -> str:
    return (
        "exact"
        if chance.exact
        else f"95 % in {chance.low:.4f} to {chance.high:.4f}, {chance.trials} random sets"
    )


def _survives(lost: int) -> str:
    if lost < 2:
        return "the loss of any failure domain" if lost else "no lost failure domain"
    return f"the loss of any {lost} failure domains at once"


def probability(value: float) -> str:
    """Four digits; never 1.0000 for what is less than certain."""
    text = f"{value:.4f}"
    return f"1 - {1 - value:.0e}" if text == "1.0000" and value < 1 else text
