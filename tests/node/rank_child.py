"""A process of its own that stands for a training rank: it joins, fills slots, and can be killed with -9.

Run as ``python -m tests.node.rank_child SOCKET NODE JOB BYTES``; NODE is the daemon's NodeInfo as JSON. Orders on stdin: begin,
restore STEP (it is offered that one), seal STEP, goodbye, fail; it answers each with one line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from ckptd.core.ids import NodeInfo
from ckptd.wire import rank as wire
from tests.node.daemon_rig import Rank, Rig


class Child:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def order(self, text: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{text}\n".encode())
        await self.process.stdin.drain()
        line = await asyncio.wait_for(self.process.stdout.readline(), 30)
        assert line == b"done\n", f"the rank's process answered {line!r}"

    async def kill(self) -> None:
        """With -9."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def rank_child(house: Rig, job: str, state_bytes: int, first: str = "begin") -> AsyncIterator[Child]:
    """One that was let into an epoch of its own, or stands at its restore."""
    node = json.dumps(asdict(house.daemon.services.node))
    arguments = ["-m", "tests.node.rank_child", str(house.daemon.config.socket), node, job, str(state_bytes)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)
    child = Child(process)
    try:
        await child.order(first)
        yield child
    finally:
        await child.kill()


async def main(path: str, node: str, job: str, state_bytes: int) -> None:
    services = SimpleNamespace(node=NodeInfo(**json.loads(node)))
    daemon: Any = SimpleNamespace(config=SimpleNamespace(socket=path), services=services)
    rank = Rank(daemon, job)
    for line in iter(sys.stdin.readline, ""):
        order, _, argument = line.strip().partition(" ")
        if order == "begin":
            rank.join(job, state_bytes)
            await rank.heard(wire.Ready)
        elif order == "restore":
            rank.join(f"{job}-again", state_bytes)
            opened, _ = await rank.heard(wire.Opened)
            assert opened.snapshot is not None and opened.snapshot[1] == int(argument), opened
        elif order == "seal":
            await rank.sealed(int(argument))
        else:
            rank.say(wire.Goodbye(order == "goodbye"))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], int(sys.argv[4])))
