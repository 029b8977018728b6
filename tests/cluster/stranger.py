"""Another user of the machine, who has read the sources: ``python -m tests.cluster.stranger UID ATTACK SOCKET ARGUMENTS``, JSON.

Each attack speaks to the daemon's socket as a rank does, and then says "done" and waits for the end of its input.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import Any

from ckptd.arena.header import EXTENTS_AT, SEALED, Header, SlotRow, encode_header, place_of
from ckptd.arena.tenant import Tenant
from ckptd.process import start_ticks
from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import RankSocket, memfd_object
from ckptd.wire.world import pack_world

ANSWER_S = 30.0
SLEEPERS = 60
EMPTY_LIST = b"\x90"
LIST_OF = b"\xdd"  # msgpack's array 32
MAP_OF_TWO = b"\x82"


def hello(path: str, job: str) -> tuple[RankSocket, dict[str, Any]]:
    link = RankSocket.connect(path)
    link.send(wire.Hello(wire.PROTOCOL_VERSION, job, os.getpid()))
    welcome, _ = link.recv(ANSWER_S)  # type: ignore[misc]
    return link, welcome.node


def join(link: RankSocket, world: bytes, state_bytes: int = 1 << 20) -> None:
    fd = memfd_object(world)
    ask = {"step": None, "source": None, "allow_fresh": True}
    link.send(wire.Join(f"attempt-{os.getpid()}", 0, state_bytes, ask), (fd,), ANSWER_S)
    os.close(fd)


def many_empty_lists(nbytes: int) -> bytes:
    """In lists of lists, none of which is long."""
    row = b"\xdc\xff\xff" + EMPTY_LIST * 0xFFFF
    count = nbytes // len(row)
    return LIST_OF + count.to_bytes(4, "big") + row * count


def false_address(path: str, peers: list[dict[str, Any]]) -> list[RankSocket]:
    """Another node's id, at an address where nobody listens."""
    link, here = hello(path, "false")
    moved = [{**peer, "control": "tcp://127.0.0.99:9", "bulk": "127.0.0.99:9"} for peer in peers]
    join(link, pack_world([here["node"], *(peer["node"] for peer in moved)], [here, *moved]))
    return [link]


def many_nodes(path: str, count: int) -> list[RankSocket]:
    """Nodes that there are not."""
    link, here = hello(path, "many")
    names = [f"nowhere{n}" for n in range(count)]
    made = [{**here, "node": name, "control": f"tcp://127.1.{n // 250}.{n % 250 + 1}:9"} for n, name in enumerate(names)]
    join(link, pack_world([here["node"], *names], [here, *made]))
    return [link]


def empty_world(path: str, nbytes: int, times: int) -> list[RankSocket]:
    """Garbage that unfolds to a hundred times its size."""
    links = []
    for _ in range(times):
        link, _ = hello(path, "empty")
        join(link, MAP_OF_TWO + b"\xa5ranks" + many_empty_lists(nbytes) + b"\xa5nodes" + EMPTY_LIST)
        links.append(link)
    return links


def large_state(path: str, nbytes: int) -> list[RankSocket]:
    """More than anybody else is left with; nothing is ever captured."""
    link, here = hello(path, "large")
    join(link, pack_world([here["node"]], [here]), nbytes)
    return [link]


def offered(path: str, kind: str, count: int) -> list[RankSocket]:
    """Memory of his own making, as if a daemon had lost it: "number" (the highest there is), "empty" (segments without slots),
    "record" (one of 3 GiB, of which nothing was written), "mappers" (other processes that map it)."""
    link, _ = hello(path, "offered")
    tenant = Tenant(f"{os.getuid()}/offered", os.getuid(), "own", 0)
    asleep = [subprocess.Popen(["sleep", "60"]).pid for _ in range(SLEEPERS if kind == "mappers" else 0)]
    mappers = [(pid, start_ticks(pid)) for pid in asleep]
    for first in range(0, count, 16):
        names, fds = [], []
        for number in range(first, min(first + 16, count)):
            name = f"own-{'f' * 20 if kind == 'number' else f'{number + 1:x}'}-{tenant.tag}"
            record = 3 << 30 if kind == "record" else 0
            rows = [SlotRow(number + 1, EXTENTS_AT, 4096, record, SEALED, record, bytes(16))] if kind != "empty" else []
            names.append(name)
            fds.append(forged(name, EXTENTS_AT + sum(row.capacity + row.meta_capacity for row in rows), tenant, rows, mappers))
        link.send(wire.Offer(names), fds, ANSWER_S)
        for fd in fds:
            os.close(fd)
    link.send(wire.AskHealth(7), (), ANSWER_S)
    while (got := link.recv(ANSWER_S)) is not None and not isinstance(got[0], wire.Health):
        pass
    for pid in asleep:
        os.kill(pid, signal.SIGKILL)
    return [link]


def forged(name: str, size: int, tenant: Tenant, rows: list[SlotRow], mappers: list[tuple[int, int]]) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    header = Header(name, size, tenant, "i", tuple(mappers), tuple(rows), 1)
    os.pwrite(fd, encode_header(header), place_of(1))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def false_layouts(path: str, nbytes: int, count: int) -> list[RankSocket]:
    """Of snapshots that nobody captured."""
    link, here = hello(path, "layouts")
    join(link, pack_world([here["node"]], [here]))
    slot = None
    while slot is None:
        message, _ = link.recv(ANSWER_S)  # type: ignore[misc]
        slot = message.slot if isinstance(message, wire.Mapped) else None
    fd = memfd_object(bytes(nbytes))
    for number in range(count):
        link.send(wire.SealedSlot(slot, 1, 1, f"layout {number}", 0), (fd,), ANSWER_S)
    return [link]


def main() -> None:
    uid, attack, path, *arguments = (json.loads(text) for text in sys.argv[1:])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    attacks = (false_address, many_nodes, empty_world, large_state, offered, false_layouts)
    links = {f.__name__: f for f in attacks}[attack](path, *arguments)
    print("done", flush=True)
    sys.stdin.read()
    for link in links:
        link.close()


if __name__ == "__main__":
    main()
