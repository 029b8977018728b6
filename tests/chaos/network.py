"""A network of namespaces for daemons, and what goes wrong in it: one-way silence, resets, slow links (root).

Each node has a namespace with one veth pair to a bridge in a namespace of its own. A namespace has no name: it lives as long as
its processes, so nothing is left when they are killed, however that happens. Nothing but iproute2 is needed: a packet to a
neighbour whose link address nobody has is lost without a word, which is a partition in one direction.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.cluster.nodes import Node
from tests.waiting import until

CLONE_NEWNET = 0x40000000
NOBODY = "02:de:ad:be:ef:01"  # no card has this link address
HUB_START_S = 10.0
HEARD_S = 10.0  # until a datagram that is not lost has come
T = TypeVar("T")


class Namespace:
    """A network namespace, held by a process that sleeps."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], start_new_session=True)
        self.pid = self._holder.pid
        ours = os.readlink("/proc/self/ns/net")
        until(
            lambda: self._exists() and os.readlink(f"/proc/{self.pid}/ns/net") != ours,
            HUB_START_S,
            "a namespace",
        )
        self.run("ip", "link", "set", "lo", "up")

    def _exists(self) -> bool:
        if self._holder.poll() is not None:
            raise AssertionError(f"unshare ended with {self._holder.returncode}")
        return Path(f"/proc/{self.pid}/ns/net").exists()

    @property
    def within(self) -> list[str]:
        return ["nsenter", "--net", "--target", str(self.pid)]

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run([*self.within, *command], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def inside(self, call: Callable[[], T]) -> T:
        """``call`` in a thread of this process that has entered the namespace."""
        found: list[Any] = []

        def enter() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
            try:
                if libc.setns(fd, CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                found.append((call(), None))
            except Exception as error:
                found.append((None, error))
            finally:
                os.close(fd)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        value, error = found[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Probe:
    """Words in datagrams from one node to another. They come in order or not at all, so whoever hears a later one knows which
    before it were lost."""

    def __init__(self, sender: Namespace, receiver: Namespace, address: str) -> None:
        self._out, self._in = sender.inside(_datagrams), receiver.inside(_datagrams)
        self._in.bind((address, 0))
        self._in.settimeout(HEARD_S)

    def say(self, word: str) -> None:
        self._out.sendto(word.encode(), self._in.getsockname())

    def until_heard(self, word: str) -> list[str]:
        """All that came up to this word. Raises TimeoutError."""
        heard: list[str] = []
        while word not in heard:
            heard.append(self._in.recv(100).decode())
        return heard

    def close(self) -> None:
        self._out.close()
        self._in.close()


def _datagrams() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


class Network:
    """``count`` namespaces on one bridge; node i has 10.77.0.(i + 1)."""

    def __init__(self, count: int) -> None:
        self.spaces: list[Namespace] = []
        self.hub = Namespace()
        try:
            self.hub.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            self.hub.run("ip", "link", "set", "bridge0", "up")
            for index in range(count):
                self._join(index)
        except BaseException:
            self.close()
            raise

    def _join(self, index: int) -> None:
        space = Namespace()
        self.spaces.append(space)
        hub, port = self.hub, f"p{index}"
        hub.run(
            "ip", "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", str(space.pid)
        )
        hub.run("ip", "link", "set", port, "master", "bridge0", "up")
        space.run("ip", "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        space.run("ip", "link", "set", "eth0", "up")

    @staticmethod
    def address(index: int) -> str:
        return f"10.77.0.{index + 1}"

    def probe(self, sender: int, receiver: int) -> Probe:
        return Probe(self.spaces[sender], self.spaces[receiver], self.address(receiver))

    # --- faults -------------------------------------------------------------------------------------------------
    def silence(self, sender: int, receiver: int) -> None:
        """What ``sender`` sends to ``receiver`` is lost; the other direction works."""
        self._neighbour(sender, receiver, "replace", "lladdr", NOBODY, "nud", "permanent")

    def hear(self, sender: int, receiver: int) -> None:
        self._neighbour(sender, receiver, "del")

    def _neighbour(self, sender: int, receiver: int, verb: str, *how: str) -> None:
        self.spaces[sender].run("ip", "neigh", verb, self.address(receiver), *how, "dev", "eth0")

    def reset(self, index: int) -> int:
        """Every TCP connection of this node is reset. Returns how many."""
        said = self.spaces[index].run("ss", "-K", "-H", "-t", "state", "established", check=False)
        return len(said.splitlines())

    def reset_after(self, index: int, nbytes: int) -> int:
        """Reset each connection of this node that has sent more than so many bytes. Returns how many."""
        said = self.spaces[index].run("ss", "-H", "-t", "-n", "-i", "-O", "state", "established")
        count = 0
        for line in said.splitlines():
            sent = re.search(r"bytes_sent:(\d+)", line)
            if sent and int(sent[1]) > nbytes:
                count += self._reset_one(index, *line.split()[2:4])
        return count

    def _reset_one(self, index: int, here: str, there: str) -> int:
        command = ["ss", "-K", "-H", "-t", "src", here, "dst", there]
        return len(self.spaces[index].run(*command, check=False).splitlines())

    def limit(self, index: int, rate: str) -> None:
        """What this node sends, for example "20mbit"."""
        self.spaces[index].run(
            "tc",
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "64kb",
            "latency",
            "100ms",
        )

    def unlimit(self, index: int) -> None:
        self.spaces[index].run("tc", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        for space in (*self.spaces, self.hub):
            with suppress(OSError):
                space.close()


class NetNode(Node):
    """A daemon in a namespace; its status page is on the loopback of that."""

    space: Namespace

    def get(self, path: str) -> Any:
        plain = super().get
        return self.space.inside(lambda: plain(path))
