"""Collected where the frameworks are: `make matrix`."""

from __future__ import annotations

from importlib.util import find_spec

from tests.cluster.conftest import nodes

__all__ = ["nodes"]
collect_ignore_glob = [] if find_spec("transformers") is not None else ["test_*.py"]
