"""A thousand peers of one daemon: real sockets on both sides, and nothing left of them when no job names them any more."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ckptd.core.ids import NodeInfo
from tests.node.links import KEY, Link, eventually

PEERS = 1000
FILES = 8 * PEERS  # a link has five descriptors, half a dozen while it begins

# Greets as whatever node it is taken for, and answers pings.
EVERYBODY = """
import sys, zmq
from ckptd.wire import link_frames as lf
from tests.node.links import KEY
context = zmq.Context()
router = context.socket(zmq.ROUTER)
router.curve_server, router.curve_secretkey = True, KEY.curve_server.secret
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
while True:
    who, frame = router.recv_multipart()
    if frame == lf.PING_FRAME:
        router.send_multipart([who, lf.PONG_FRAME])
    elif frame[0] == lf.HELLO:
        router.send_multipart([who, lf.pack(lf.WELCOME, lf.unpack(frame, 3)[2], "i1")])
"""


@pytest_asyncio.fixture
async def everybody() -> AsyncIterator[str]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < FILES:
        pytest.skip(f"needs {FILES} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], FILES), before[1]))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", EVERYBODY, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    port = await process.stdout.readline()
    yield f"tcp://127.0.0.1:{int(port)}"
    process.kill()
    await process.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_thousand_peers_are_up_and_go_with_the_last_job_that_names_them(everybody: str) -> None:
    async with Link("a", secret=KEY, down_after_s=30.0) as a:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(PEERS):
            for job in ("0/one", "0/two"):
                a.connect(NodeInfo(f"n{number}", everybody, "", ""), job)
        await eventually(lambda: sum(up for _, up in a.peers) == PEERS, 120, "all greeted")
        a.release("0/one")
        assert all(a.up(f"n{number}") for number in range(PEERS))
        a.release("0/two")
        await eventually(lambda: len(os.listdir("/proc/self/fd")) < before + 50, 30, "their sockets are closed")
        assert not a.problems
