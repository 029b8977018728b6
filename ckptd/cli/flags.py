"""One flag for every setting, made from the settings themselves, so that a new one needs no line here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptd.config import Config
from ckptd.config_sources import Loaded, flag_name, load

FILE = "config"
_UNIT_OF_SUFFIX = {"_s": "seconds", "_steps": "steps", "_bytes": "bytes"}


def unit_of(name: str) -> str:
    """``seconds`` for names in _s and so on; for the others what the field says (``TCP port``, ``copies``)."""
    said = str(_extra(name)["unit"])
    return said or next((unit for end, unit in _UNIT_OF_SUFFIX.items() if name.endswith(end)), "")


def group_of(name: str) -> str:
    return str(_extra(name)["group"])


def text_of(name: str) -> str:
    return Config.model_fields[name].description or ""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(loaded, ...)`` a flag for each setting and --config; it is called with what is in force."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        flags = {name: given.pop(name) for name in Config.model_fields}
        command(load(file=given.pop(FILE), flags=flags), **given)

    parameters = [*own, *_parameters()]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameters() -> Iterator[inspect.Parameter]:
    file = typer.Option(
        "--config", "-c", help="TOML file (CKPTD_CONFIG; /etc/ckptd/ckptd.toml)", metavar="FILE"
    )
    yield _parameter(FILE, Annotated[Path | None, file])
    for name, field in Config.model_fields.items():
        is_switch = field.annotation is bool
        flag = flag_name(name)
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if is_switch else flag,
            help=_help_of(name),
            metavar=None if is_switch else "VALUE",
            rich_help_panel=f"Settings: {group_of(name)}",
            show_default=False,
        )
        kind: Any = bool | None if is_switch else str | None
        yield _parameter(name, Annotated[kind, option])


def _help_of(name: str) -> str:
    unit = unit_of(name)
    return f"{text_of(name)} ({unit})" if unit else text_of(name)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _extra(name: str) -> dict[str, Any]:
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), name
    return extra


__all__ = ["Loaded", "group_of", "text_of", "unit_of", "with_settings"]
