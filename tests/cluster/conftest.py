"""Fixtures for tests with real daemons and trainers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.nodes import Cluster, cluster


@pytest.fixture
def nodes() -> Iterator[Cluster]:
    with cluster() as made:
        yield made
