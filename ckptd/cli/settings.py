"""`ckptd config`: each value in force, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.cli.flags import Loaded, group_of, text_of, unit_of, with_settings
from ckptd.config import Config


def printable(name: str, value: Any) -> Any:
    """As JSON and TOML write it: paths as text, lists as lists, rights in octal; null where there is none."""
    if name == "socket_mode":
        return f"0{value:o}"
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def rows(loaded: Loaded) -> list[dict[str, Any]]:
    """One per setting: name, value, unit, group, where it came from, its default and what it means."""
    defaults = Config()
    return [
        {
            "name": name,
            "value": printable(name, getattr(loaded.config, name)),
            "unit": unit_of(name),
            "group": group_of(name),
            "from": loaded.origins[name],
            "default": printable(name, getattr(defaults, name)),
            "text": text_of(name),
        }
        for name in Config.model_fields
    ]


@with_settings
def config(
    loaded: Loaded,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Print every setting in force and where it came from (default, file, environment, flag: the later is stronger)."""
    from ckptd.cli.show import console, print_json, table

    found = rows(loaded)
    if as_json:
        print_json({row["name"]: row for row in found})
        return
    cells = [[row["name"], _cell(row["value"]), row["unit"], row["from"]] for row in found]
    console().print(table("", ("setting", "value", "unit", "from"), cells))


def _cell(value: Any) -> str:
    if value is None or value == "" or value == []:
        return "-"
    return ",".join(value) if isinstance(value, list) else str(value)
