"""Seeds beyond those of `make test`, until everything that can happen has happened often enough, or for as long as told."""

from __future__ import annotations

import os
import time

import pytest

from tests.sim.census import Census, for_seconds
from tests.sim.scale import Large
from tests.sim.transitions import rare, table

FIRST = 1000  # seed; those before are run by test_sim.py
COVERED_S = 3600.0  # at most: some 5,000 seeds are enough, of which two quiet cores do four a second
COVERED_ENV = "CKPTD_COVERED_S"  # another limit, on a machine that others use
SOAK_ENV = "CKPTD_SOAK_S"
SOAK_S = 3600.0
SOAK_FIRST = 1_000_000  # seed; another one each second of the clock
NODES = 256
NODES_ENV = "CKPTD_SIM_NODES"  # another number; a snapshot costs about their square


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_every_transition_and_every_situation_happens_often(capsys: pytest.CaptureFixture[str]) -> None:
    census = Census()
    for census in for_seconds(float(os.environ.get(COVERED_ENV, COVERED_S)), FIRST, coverage=True):
        if not rare(census.counts):
            break
    with capsys.disabled():
        print(f"\n{census.seeds} seeds, {len(census.failures)} failed\n{table(census.counts)}")
    assert not census.failures, "\n".join(census.failures)
    lacking = rare(census.counts)
    assert not lacking, f"too seldom in {census.seeds} seeds: {lacking}"


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """A few snapshots, the loss of a node, a restore from memory (P3, P9): the time of the processor for all nodes together."""
    nodes = int(os.environ.get(NODES_ENV, NODES))
    world = Large(nodes)
    times = world.life()
    parent = max(world.oracle.records.values(), key=lambda record: record.number).parent
    assert parent is not None and world.oracle.certified_ever[parent] >= 1, "restored from a protected snapshot"
    with capsys.disabled():
        print(f"\n{nodes} nodes: {times}")


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_for_as_long_as_told(capsys: pytest.CaptureFixture[str]) -> None:
    """``CKPTD_SOAK_S`` seconds of seeds that no run before this one has seen; each failure is printed when it happens."""
    census, said = Census(), 0
    first = SOAK_FIRST + int(time.time()) * 1000
    for census in for_seconds(float(os.environ.get(SOAK_ENV, SOAK_S)), first):
        with capsys.disabled():
            for failure in census.failures[said:]:
                print(failure, flush=True)
        said = len(census.failures)
    with capsys.disabled():
        print(f"\n{census.seeds} seeds from {first} on, {said} failed")
    assert not census.failures, "\n".join(census.failures)
