"""Mutants that live on, each with the reason why that is all right. An entry that is not needed any more is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutants.generate import Mutant
from tests.mutants.run import Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).with_name("survivors.toml")


def explained() -> dict[str, str]:
    """id -> why. ValueError: an entry without a reason, or the same one twice."""
    found: dict[str, str] = {}
    for entry in tomllib.loads(FILE.read_text(encoding="utf-8")).get("survivor", []):
        if entry["id"] in found or not entry["why"].strip():
            raise ValueError(f"{FILE.name}: {entry['id']} is there twice, or without a reason")
        found[entry["id"]] = entry["why"]
    return found


def gone(entries: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """Entries about mutants that there are no longer: the source has changed."""
    return sorted(set(entries) - {mutant.id for mutant in mutants})


def not_needed(entries: Iterable[str], outcomes: Mapping[str, Outcome]) -> list[str]:
    """Entries about mutants that a test kills by now."""
    return sorted(name for name in entries if name in outcomes and outcomes[name].killed)
