"""Collected where the frameworks are: `make matrix`. Its table of kinds comes last."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from tests.cluster.conftest import nodes

__all__ = ["nodes"]
collect_ignore_glob = [] if find_spec("transformers") is not None else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests of kinds said of each cell and pair."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports if hasattr(report, "user_properties")]
    told = sorted({(name, *row) for report in reports for name, row in report.user_properties if name in ("cell", "pair")}, key=str)
    for title, kind in (("kind, model, ranks, how: differing out, into", "cell"), ("pairs: elements that differ", "pair")):
        rows = [row[1:] for row in told if row[0] == kind]
        if rows:
            terminalreporter.section(title)
        for row in rows:
            terminalreporter.write_line("  ".join(map(str, row)))
