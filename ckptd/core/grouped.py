"""Errors about many tensors, for people: grouped by cause, counted, five of each shown; the rest belongs into a log (P15)."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHOWN_MAX = 5  # of one cause
_NUMBER = re.compile(r"\d+")


def grouped(problems: Sequence[str]) -> str:
    """Of lines "key: cause": one clause per cause, the commonest first. Causes that differ in numbers only (shapes) are one."""
    causes: dict[str, list[str]] = {}
    for line in problems:
        _, separator, cause = line.partition(": ")
        causes.setdefault(_NUMBER.sub("#", cause) if separator else line, []).append(line)
    return "; ".join(_clause(lines) for lines in sorted(causes.values(), key=len, reverse=True))


def _clause(lines: list[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    parted = [line.partition(": ") for line in lines]
    more = f" and {len(lines) - SHOWN_MAX} more" if len(lines) > SHOWN_MAX else ""
    if len({cause for _, _, cause in parted}) > 1:
        return f"{'; '.join(lines[:SHOWN_MAX])}{more} ({len(lines)} in all)"
    keys = ", ".join(key for key, _, _ in parted[:SHOWN_MAX])
    return f"{keys}{more}: {parted[0][2]} ({len(lines)} in all)"
