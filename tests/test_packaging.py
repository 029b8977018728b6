"""What `make` installs: every dependency is pinned, and the two lists of OS packages are one."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if "==" in line}
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *(line for extra in extras.values() for line in extra)]
    assert {name_of(line) for line in wanted if "python_version <" not in line} <= pinned


def test_the_manual_lists_the_same_os_packages() -> None:
    lines = (ROOT / "deploy" / "os-packages.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    manual = (ROOT / "docs" / "OPERATIONS.md").read_text()
    block = manual.split("`deploy/os-packages.txt`:\n\n```\n")[1].split("```")[0]
    assert block.split() == packages


def test_the_client_says_its_version() -> None:
    import ckptd_client

    assert ckptd_client.__version__ == version("ckptd")
    with pytest.raises(AttributeError, match="no attribute 'revision'"):
        ckptd_client.revision  # noqa: B018
