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
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_BYTES = 96 * MIB
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a memory cgroup"),
]

# A daemon's arena inside the cgroup: asks for more than there is, says what happened and that it lives.
PROGRAM = """
import json, sys
from ckptd.arena import stock as module
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
def cgroup() -> Iterator[Path]:
    """A memory cgroup of LIMIT_BYTES, v1 or v2."""
    top = next(
        (p for p in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if (p / "cgroup.procs").exists()),
        None,
    )
    if top is None:
        pytest.skip("no memory cgroup is mounted")
    made = top / f"ckptd-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    limit = made / ("memory.limit_in_bytes" if top.name == "memory" else "memory.max")
    try:
        limit.write_text(str(LIMIT_BYTES))
        (made / "memory.swap.max").exists() and (made / "memory.swap.max").write_text("0")
    except OSError as error:
        made.rmdir()
        pytest.skip(f"the memory controller is not available here: {error}")
    yield made
    until(lambda: not (made / "cgroup.procs").read_text(), what="the cgroup is empty")
    made.rmdir()


def inside(cgroup: Path, *arguments: str) -> dict[str, Any]:
    shell = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def kills(cgroup: Path) -> int:
    for name in ("memory.oom_control", "memory.events"):
        if (cgroup / name).exists():
            lines = dict(line.split() for line in (cgroup / name).read_text().splitlines())
            return int(lines.get("oom_kill", 0))
    return 0


def test_the_oom_killer_takes_the_child_alone_and_leaves_nothing(cgroup: Path) -> None:
    answer = inside(cgroup, str(400 * MIB), "blind")
    assert "OOM killer" in answer["error"]
    assert answer["intact"]
    assert answer["used"] < 20 * MIB
    assert kills(cgroup) == 1


def test_what_does_not_fit_is_refused_before_a_page_is_touched(cgroup: Path) -> None:
    answer = inside(cgroup, str(400 * MIB), "careful")
    assert "no room" in answer["error"]
    assert answer["by"].startswith(str(cgroup))
    assert 0 < answer["room"] < LIMIT_BYTES
    assert answer["intact"]
    assert kills(cgroup) == 0
