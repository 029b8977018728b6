"""At a memory cgroup's limit only the sacrificial child dies, and arithmetic refuses before it comes to that (D1, P8)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.node.slots import MIB
from tests.places import MemoryGroup, needs_root

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_BYTES = 96 * MIB
pytestmark = needs_root

# A daemon's arena inside the cgroup: asks for more than there is, says what happened and that it lives.
PROGRAM = """
import json, sys
from ckptd.arena import segment_pool as module
from ckptd.arena.arena import Arena, NoMemory, Tenant
from ckptd.arena.budget import Headroom, headroom
from ckptd.arena.fdstore import NullKeeper
size, blind = int(sys.argv[1]), sys.argv[2] == "blind"
room = headroom()
if blind:  # somebody else took the memory after the arithmetic
    module.headroom = lambda: Headroom(1 << 40, "nothing")
arena = Arena(1 << 40, NullKeeper(), incarnation="x", reserve_bytes=8 << 20)
tenant = Tenant("0/a", 0, "own", 0)
kept = arena.allocate(tenant, 8 << 20)
kept.payload[:] = bytes([7]) * kept.capacity
try:
    arena.allocate(tenant, size)
    error = ""
except NoMemory as refused:
    error = refused.what
again = arena.allocate(tenant, 8 << 20)
again.payload[:] = kept.payload
print(json.dumps({"error": error, "room": room.nbytes, "by": room.limited_by, "used": arena.used_bytes,
                  "intact": bytes(again.payload) == bytes([7]) * kept.capacity}))
"""


@pytest.fixture
def cgroup() -> Iterator[MemoryGroup]:
    """Of LIMIT_BYTES."""
    made = MemoryGroup(f"ckptd-test-{os.getpid()}", LIMIT_BYTES)
    yield made
    made.close()


def inside(cgroup: MemoryGroup, *arguments: str) -> dict[str, Any]:
    command = [*cgroup.within, sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT, timeout=200)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_oom_killer_takes_the_child_alone_and_leaves_nothing(cgroup: MemoryGroup) -> None:
    answer = inside(cgroup, str(400 * MIB), "blind")
    assert "OOM killer" in answer["error"]
    assert answer["intact"]
    assert answer["used"] < 20 * MIB
    assert cgroup.kills() == 1


def test_what_does_not_fit_is_refused_before_a_page_is_touched(cgroup: MemoryGroup) -> None:
    answer = inside(cgroup, str(400 * MIB), "careful")
    assert "no room" in answer["error"]
    assert answer["by"].startswith(str(cgroup.path))
    assert 0 < answer["room"] < LIMIT_BYTES
    assert answer["intact"]
    assert cgroup.kills() == 0
