"""Control links for tests: one that remembers what it heard, one in its own process, a peer that speaks raw frames."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import zmq

from ckptd.core.ids import NodeInfo
from ckptd.wire import link_frames as lf
from ckptd.wire.control import ControlLink
from ckptd.wire.keys import ClusterKey

KEY = ClusterKey(bytes(range(32)))
JOB = "1000/gpt"
POLL_S = 0.01


async def eventually(predicate: Callable[[], Any], timeout: float = 30.0, what: str = "") -> Any:
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or predicate}"
        await asyncio.sleep(POLL_S)
    return value


async def stays(predicate: Callable[[], Any], seconds: float = 0.1) -> None:
    """What must not happen has no moment to wait for: look for a while. A slow machine makes this miss, never fail."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert predicate()
        await asyncio.sleep(POLL_S)
    assert predicate()


class Link(ControlLink):
    """Lists of what the callbacks were told: ``messages``, ``peers``, ``problems``."""

    def __init__(
        self, node: str, bind: str = "tcp://127.0.0.1:*", secret: ClusterKey | None = KEY, **options: Any
    ) -> None:
        self.messages: list[tuple[str, str, object]] = []
        self.peers: list[tuple[str, bool]] = []
        self.problems: list[str] = []
        super().__init__(
            node, bind, secret, lambda *m: self.messages.append(m), lambda *p: self.peers.append(p),
            on_problem=self._told_of, **options,
        )  # fmt: skip

    def _told_of(self, text: str, node: str) -> None:
        """Each time that it happens; one of each is kept."""
        if text not in self.problems:
            self.problems.append(text)

    async def __aenter__(self) -> Link:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(self.node, self.address, "", "", self.incarnation)

    async def met(self, other: ControlLink | NodeInfo) -> None:
        """Connect and wait until it is up."""
        info = other if isinstance(other, NodeInfo) else NodeInfo(other.node, other.address, "", "")
        self.connect(info)
        await eventually(lambda: self.up(info.node), what=f"{info.node} is up")

    def said(self, text: str) -> list[str]:
        return [problem for problem in self.problems if text in problem]


CHILD = """
import asyncio, sys
from ckptd.core.ids import NodeInfo
from tests.node.links import KEY, Link

async def main(node, incarnation, address):
    link = Link(node, address, incarnation=incarnation)
    link._on_message = lambda sender, job, message: link.send(sender, job, message)
    await link.start()
    print(link.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class LinkProcess:
    """A link in another process that sends every message back."""

    def __init__(self, node: str, incarnation: str = "i1", address: str = "tcp://127.0.0.1:*") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, node, incarnation, address], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.info = NodeInfo(node, self.process.stdout.readline().strip(), "", "", incarnation)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """kill -9. Idempotent."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> LinkProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class RawPeer:
    """A DEALER that holds the cluster key (or another) and sends whatever frames a test wants."""

    def __init__(self, address: str, key: ClusterKey | None = KEY, client: ClusterKey | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            pair = (client or key).curve_client
            self.socket.curve_serverkey = key.curve_server.public
            self.socket.curve_publickey, self.socket.curve_secretkey = pair.public, pair.secret
        self.socket.connect(address)

    async def ask(self, frame: bytes, timeout: float = 30.0) -> bytes:
        """Send, and wait for one answer. Raises AssertionError when none comes."""
        self.socket.send(frame)
        return bytes(await eventually(self._answer, timeout, "an answer"))

    def _answer(self) -> bytes | None:
        try:
            return self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None

    async def greet(self, node: str, incarnation: str, meant: str) -> bytes:
        return await self.ask(lf.pack(lf.HELLO, node, incarnation, meant))

    def close(self) -> None:
        self.context.destroy(0)
