"""Where settings come from: default, TOML file, environment, flag; the later one is the stronger one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from ckptd.config import Config
from ckptd.core.errors import CkptdError

SYSTEM_FILE = Path("/etc/ckptd/ckptd.toml")
FILE_VARIABLE = "CKPTD_CONFIG"
PREFIX = "CKPTD_"
DEFAULT = "default"
FILE_BYTES_MAX = 1 << 20
TWO_FORMS = (
    "redundancy",
    "replicas",
)  # of one decision: the stronger source's form replaces the weaker one's
# Names with our prefix that are no settings: what the client, deploy/torchrun/launch.sh, the keeper and the tests read,
# and what Kubernetes puts into every pod beside a Service called "ckptd".
OTHER_VARIABLES = frozenset(
    {FILE_VARIABLE, "CKPTD_AUTOSTART", "CKPTD_FAILPOINT", "CKPTD_LOG", "CKPTD_WAIT_S"}
)
OTHER_PREFIXES = ("CKPTD_SERVICE_", "CKPTD_PORT", "CKPTD_TEST_", "CKPTD_KEEPER", "CKPTD_DEMO_", "CKPTD_NOTICE_")


@dataclass(frozen=True)
class Loaded:
    """The settings in force; by name, where each came from (default, file:PATH, env:NAME, flag:--name)."""

    config: Config
    origins: Mapping[str, str]


def load(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    system_file: Path = SYSTEM_FILE,
) -> Loaded:
    """Merge the sources. ``flags``: values by name, None where the flag was not given. Raises CkptdError."""
    variables = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Config.model_fields, DEFAULT)
    for source, origin_of in (
        _from_file(_which_file(file, variables, system_file)),
        _from_environment(variables),
        _from_flags(flags or {}),
    ):
        if any(form in source for form in TWO_FORMS):
            for form in TWO_FORMS:
                values.pop(form, None)
        values.update(source)
        origins.update({name: origin_of(name) for name in source})
    given = next((form for form in TWO_FORMS if form in values), TWO_FORMS[0])
    origins.update({form: origins[given] for form in TWO_FORMS if form not in values})
    try:
        return Loaded(Config(**values), origins)
    except ValidationError as error:
        raise _explain(error, origins) from None


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return PREFIX + name.upper()


def _which_file(file: Path | None, variables: Mapping[str, str], system_file: Path) -> Path | None:
    """A file that was asked for must be there; the system's may be absent."""
    named = file or (Path(variables[FILE_VARIABLE]) if variables.get(FILE_VARIABLE) else None)
    if named is not None and not _is_file(named):
        raise CkptdError("no such configuration file", where=str(named), hint="see --config and CKPTD_CONFIG")
    return named or (system_file if _is_file(system_file) else None)


def _is_file(path: Path) -> bool:
    """Raises CkptdError: it cannot be known. The key beside it has rights of its own, so the directory needs none."""
    try:
        return path.is_file()
    except OSError as error:
        hint = f"chmod 755 {path.parent}, or name another file with --config or CKPTD_CONFIG"
        raise CkptdError(f"the configuration cannot be read: {error.strerror}", where=str(path), hint=hint) from error


def _from_file(path: Path | None) -> tuple[dict[str, Any], Any]:
    if path is None:
        return {}, str
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        values = TomlConfigSettingsSource(Config, toml_file=path).toml_data
    except (OSError, ValueError) as error:  # a TOML error is a ValueError
        raise CkptdError(f"the configuration cannot be read: {error}", where=str(path)) from error
    for name, value in values.items():
        if name not in Config.model_fields:
            raise _unknown(name, str(path), is_section=isinstance(value, dict))
    return values, lambda _: f"file:{path}"


def _from_environment(variables: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    known = {variable_name(name): name for name in Config.model_fields}
    for variable in variables:
        ours = variable.startswith(PREFIX) and variable not in OTHER_VARIABLES
        if ours and variable not in known and not variable.startswith(OTHER_PREFIXES):
            raise _unknown(variable[len(PREFIX) :].lower(), f"environment, {variable}")
    source = EnvSettingsSource(Config)
    source.env_vars = {
        variable.lower(): text for variable, text in variables.items() if variable in known and text
    }
    return source(), lambda name: f"env:{variable_name(name)}"


def _from_flags(flags: Mapping[str, object]) -> tuple[dict[str, Any], Any]:
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        if name not in Config.model_fields:
            raise _unknown(name, "flags")
    return given, lambda name: f"flag:{flag_name(name)}"


def _unknown(name: str, where: str, *, is_section: bool = False) -> CkptdError:
    if is_section:
        return CkptdError(
            f"there are no sections, but there is [{name}]", where=where, hint="write name = value, flat"
        )
    near = difflib.get_close_matches(name, Config.model_fields, n=1)
    hint = f"did you mean {near[0]}?" if near else "`ckptd config` lists every name"
    return CkptdError(f"unknown setting {name!r}", where=where, hint=hint)


def _explain(error: ValidationError, origins: Mapping[str, str]) -> CkptdError:
    lines, places = [], []
    for problem in error.errors():
        if problem["type"] == "default_factory_not_called":
            continue  # what this default follows from is bad, and named
        name = str(problem["loc"][0]) if problem["loc"] else ""
        text = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name} = {problem['input']!r}: {text}" if name else text)
        places.append(origins.get(name, "") if name else "")
    hint = "`ckptd config` shows what is in force"
    return CkptdError("bad setting: " + "; ".join(lines), where=", ".join(p for p in places if p), hint=hint)
