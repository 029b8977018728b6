"""`ckptd plan`: which redundancy, what it costs in memory and on the wire, and what it survives; before a job starts."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.cli.plan_nodes import LIST_FORM, Nodes, parse_nodes, running
from ckptd.cli.plan_report import Plan, make_plan, report
from ckptd.cli.sizing import sizing
from ckptd.cli.state_flags import Ddp, FrozenBytes, StateBytes

LOSSES_MAX = 64


@with_settings
def plan(
    loaded: Loaded,
    nodes: Annotated[
        str | None,
        typer.Option(help=f"a number, or {LIST_FORM}; none: those of the running job", metavar="NODES"),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="which running job, where there are several", metavar="JOB")
    ] = None,
    state_bytes: StateBytes = None,
    frozen_bytes: FrozenBytes = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="ranks on each node")] = None,
    ddp: Ddp = False,
    tolerate: Annotated[
        int, typer.Option(min=0, max=16, help="auto: failure domains that may be lost at once")
    ] = 1,
    losses: Annotated[
        int, typer.Option(min=1, max=LOSSES_MAX, help="how many simultaneous losses to show")
    ] = 4,
    published: Annotated[
        bool,
        typer.Option("--published", help="compare computed with published probabilities, and nothing else"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Choose a redundancy, or show what the one in the settings costs and survives. Exit status 1: it does not fit.

    Where no setting names a redundancy, and with redundancy=auto, the best that fits memory_budget is chosen.
    """
    if published:
        _published(as_json)
        return
    asked = _nodes(loaded, nodes, job)
    state = _size(state_bytes, "--state-bytes") if state_bytes is not None else asked.state_bytes
    frozen = _size(frozen_bytes, "--frozen-bytes") if frozen_bytes is not None else asked.frozen_bytes
    if state is not None and frozen > state:
        raise typer.BadParameter(
            "more than --state-bytes, of which it is a part", param_hint="--frozen-bytes"
        )
    per_node = ranks_per_node or asked.ranks_per_node or 1
    size = None
    if state is not None:
        policy, where = loaded.config.policy(), asked.domains
        size = sizing(policy, state, len(where), per_node, replicated=ddp, frozen_bytes=frozen, domains=where)
    found = make_plan(loaded, asked, size, tolerate, losses)
    _print(found, as_json)
    if not found.fits:
        raise typer.Exit(1)


def _nodes(loaded: Loaded, nodes: str | None, job: str | None) -> Nodes:
    if nodes is None:
        return running(loaded, job)
    try:
        return parse_nodes(nodes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--nodes") from None


def _size(text: str, option: str) -> int:
    from ckptd.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _print(found: Plan, as_json: bool) -> None:
    from ckptd.cli.plan_tables import tables
    from ckptd.cli.show import console, print_json

    if as_json:
        print_json(report(found))
        return
    screen = console()
    for part in tables(found):
        screen.print(part)


def _published(as_json: bool) -> None:
    from ckptd.cli.published import rows
    from ckptd.cli.show import console, good, print_json, table

    found = list(rows())
    if as_json:
        print_json({"ok": all(row.ok for row in found), "rows": [row.report() for row in found]})
    else:
        cells = [
            [
                r.placement,
                r.nodes,
                r.holders,
                r.losses,
                r.kind,
                f"{r.published:.4f}",
                f"{r.computed:.4f}",
                good(r.ok),
            ]
            for r in found
        ]
        columns = ("placement", ">nodes", ">holders", ">lost", "value", ">published", ">computed", "")
        console().print(table("recovery probability (GEMINI, SOSP '23)", columns, cells))
    if not all(row.ok for row in found):
        raise typer.Exit(1)
