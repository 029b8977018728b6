"""Adapters: one file for each library, imported by who has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def named(kind: str, values: Iterable[Any]) -> dict[str, Any]:
    """For ``register``: the first one has the kind's own name."""
    return {f"{kind}_{i}" if i else kind: value for i, value in enumerate(values)}
