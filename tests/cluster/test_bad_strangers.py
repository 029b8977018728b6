"""Garbage, floods and wrong keys at the doors of a live cluster, while it trains: nothing of it is felt (P13)."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.wire.keys import ClusterKey
from tests.cluster.nodes import Cluster, Node, TrainerError, together
from tests.cluster.test_bad_restore import protected
from tests.waiting import until

JOB = "doors"
CONNECTIONS_MAX = 48
FLOOD = 2 * CONNECTIONS_MAX
FRAME_BYTES = 64 * 1024
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    ClusterKey.generate().save(path)
    return path


def keyed(key: Path) -> dict[str, Any]:
    return {"key_file": key, "plain_loopback": None, "bulk_mode": "aead", "connections_max": CONNECTIONS_MAX}


def test_a_live_cluster_under_garbage_and_floods(nodes: Cluster, key: Path) -> None:
    """P5, P13: on the ranks' socket, the control port and the bulk port of both nodes; snapshots go on being protected."""
    first, second = nodes.several(2, **keyed(key))
    world = nodes.world([first, second], JOB, kind="fsdp")
    assert together(world, "restore") == [None, None]
    protected(world)
    before = [keeper_and_daemon(node) for node in (first, second)]
    with strangers(first), strangers(second):
        for _ in range(3):
            protected(world)
    digest = protected(world)
    assert [keeper_and_daemon(node) for node in (first, second)] == before
    assert not any("Traceback" in node.log.read_text() for node in (first, second))
    together(world, "again", job=JOB, kind="fsdp")
    assert together(world, "restore") == [10, 10]
    assert together(world, "digest") == [digest, digest]


def keeper_and_daemon(node: Node) -> set[int]:
    """Their process ids, when the child that touches new memory is not there."""

    def two() -> set[int] | None:
        pids = {process.pid for process in node.processes()}
        return pids if len(pids) == 2 else None

    found: set[int] = until(two, what="keeper and daemon alone")  # type: ignore[assignment]
    return found


def test_a_peer_with_the_wrong_key(nodes: Cluster, key: Path, tmp_path: Path) -> None:
    """P13: it gets neither an answer nor memory, says so to its own ranks in bounded time, and the others do not notice."""
    other = tmp_path / "other"
    ClusterKey.generate().save(other)
    first, second = nodes.several(2, **keyed(key), join_timeout_s=2)
    stranger = nodes.node(**keyed(other), join_timeout_s=2)
    world = nodes.world([first, second], JOB)
    together(world, "restore")
    protected(world)
    mixed = nodes.world([first, stranger], "mixed")
    for error in together(mixed, "restore"):
        assert isinstance(error, TrainerError) and str(error).startswith("CkptdError"), error
    assert mixed[1].do("train", steps=2)["step"] == 2
    assert stranger.get("/status")["memory"]["peer_bytes"] == 0
    protected(world)
    assert first.newest(JOB, "protected") == 4


@contextlib.contextmanager
def strangers(node: Node) -> Iterator[None]:
    """Talk nonsense to every door until the block ends, and keep a flood of silent connections standing."""
    here = node.get("/status")["node"]
    ports = [_port(here["control"].removeprefix("tcp://")), _port(here["bulk"])]
    over = threading.Event()
    with contextlib.ExitStack() as flood:
        for address in ports:
            for _ in range(FLOOD):
                flood.enter_context(_silent(address))
        threads = [threading.Thread(target=_pester, args=(over, babble)) for babble in _babblers(node, ports)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def _port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _silent(address: tuple[str, int]) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.connect(address)
    return sock


def _babblers(node: Node, ports: list[tuple[str, int]]) -> list[Callable[[random.Random], None]]:
    return [
        lambda chance: _to_socket(node.socket, chance.randbytes(chance.randrange(1, 4096))),
        lambda chance: _to_socket(node.socket, chance.randbytes(2 * FRAME_BYTES)),
        lambda chance: _to_port(ports[0], ZMTP_GREETING + chance.randbytes(512)),
        lambda chance: _to_port(ports[0], ZMTP_GREETING[:12] + b"CURVE".ljust(20, b"\0") + struct.pack(">Q", 1 << 62)),
        lambda chance: _to_port(ports[1], chance.randbytes(2000)),
        lambda chance: _to_port(ports[1], struct.pack(">I", 0xFFFFFFFF) * 64),
    ]


def _pester(over: threading.Event, babble: Callable[[random.Random], None]) -> None:
    chance = random.Random(1)
    while not over.wait(0.02):
        with contextlib.suppress(OSError):  # it hangs up, as it should
            babble(chance)


def _to_socket(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(1)
        sock.connect(os.fspath(path))
        sock.send(data)
        sock.recv(1024)


def _to_port(address: tuple[str, int], data: bytes) -> None:
    with socket.create_connection(address, timeout=1) as sock:
        sock.sendall(data)
        while sock.recv(1024):
            pass
