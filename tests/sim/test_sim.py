"""The very core that ships, under seeded faults (P1-P4, P6, P9, P11, P12, P14): every seed holds, every named situation happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.sim.census import run_all
from tests.sim.transitions import SITUATIONS

EVERYDAY, MANY = range(6), range(6, 1000)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seeds", [EVERYDAY, pytest.param(MANY, marks=pytest.mark.chaos)])
def test_every_seed_holds_and_every_situation_happens(seeds: range) -> None:
    *_, census = run_all(seeds.start, seeds.stop)
    assert not census.failures, "\n".join(census.failures)
    never = [name for name in SITUATIONS if not census.counts[name]] if seeds is MANY else []
    assert not never, f"never happened in {len(seeds)} seeds: {never}"


def test_a_seed_is_the_same_world_in_every_process() -> None:
    def life(hash_seed: str) -> str:
        command = [sys.executable, "-m", "tests.sim", "--seed", "8", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        said = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
        return re.sub("0x[0-9a-f]+| failed in .*", "", said)

    first = life("1")
    assert "Certificate" in first
    assert life("2") == first
