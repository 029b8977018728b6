"""`ckptd preflight`: what fits and why not, before a job finds out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from ckptd.cli import checks
from ckptd.cli.checks import Check
from ckptd.cli.flags import Loaded, with_settings
from ckptd.cli.sizing import formula, sizing
from ckptd.cli.state_flags import Ddp, FrozenBytes, StateBytes
from ckptd.config import Config
from ckptd.core.errors import CkptdError
from ckptd.core.redundancy.sizing import Sizing
from ckptd.units import format_bytes, parse_bytes


@with_settings
def preflight(
    loaded: Loaded,
    state_bytes: StateBytes = None,
    frozen_bytes: FrozenBytes = None,
    nodes: Annotated[int, typer.Option(min=1, help="nodes of the job")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="ranks on each")] = 1,
    ddp: Ddp = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Check memory, storage, addresses, ports, keys and limits of this node. Exit status 1 when something is wrong."""
    from ckptd.cli.show import print_json

    config = loaded.config
    found = list(_node_checks(config))
    if state_bytes is not None:
        state, frozen = _size(state_bytes, "--state-bytes"), _size(frozen_bytes or "0", "--frozen-bytes")
        if frozen > state:
            raise typer.BadParameter("more than --state-bytes, of which it is a part", param_hint="--frozen-bytes")
        asked = sizing(config.policy(), state, nodes, ranks_per_node, replicated=ddp, frozen_bytes=frozen)
        found.append(_fits(asked, config.memory_budget_bytes()))
    if as_json:
        print_json({"ok": all(c.ok is not False for c in found), "checks": [c.report() for c in found]})
    else:
        _print(found)
    if any(check.ok is False for check in found):
        raise typer.Exit(1)


def _node_checks(config: Config) -> Iterator[Check]:
    """A check that raises has failed: its error says what, where and what to do."""
    for name, check in checks.ALL.items():
        yield _guarded(name, check, config)


def _guarded(name: str, check: Callable[[Config], Check], config: Config) -> Check:
    try:
        return check(config)
    except CkptdError as error:
        where = f" [{error.where}]" if error.where else ""
        return Check(name, False, error.what + where, error.hint)
    except OSError as error:
        return Check(name, False, str(error))


def _fits(asked: Sizing, budget: int) -> Check:
    text = f"needs {format_bytes(asked.needed_bytes)} per node = {formula(asked)}; the budget is {format_bytes(budget)}"
    text += f"; one rank's slot is {format_bytes(asked.slot_bytes)}"
    if asked.needed_bytes <= budget:
        lost = f"survives the loss of {asked.tolerates} of {asked.nodes} nodes at once"
        return Check("state", True, f"{text}; {lost}")
    less = asked.fitting(budget)
    if less is None:
        return Check(
            "state", False, text, "not even local generations fit: raise memory_budget or use more nodes"
        )
    hint = f"own_slots={less.own_slots} {less.redundancy.text} would fit ({format_bytes(less.needed_bytes)})"
    return Check("state", False, text, f"{hint}; `ckptd plan` weighs parity; or raise memory_budget, or use more nodes")


def _size(text: str, option: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _print(found: list[Check]) -> None:
    from rich.text import Text

    from ckptd.cli.show import console, good, table

    def mark(check: Check) -> Text:
        return Text("note", style="yellow") if check.ok is None else good(check.ok)

    rows = [
        [check.name, mark(check), check.text + (f"\n-> {check.hint}" if check.hint else "")]
        for check in found
    ]
    console().print(table("", ("check", "", "what was found"), rows))
