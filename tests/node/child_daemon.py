"""A process that stands for the daemon in tests of the keeper: a real arena, orders on a unix socket, one
JSON line each.

Run as ``python -m tests.node.child_daemon SOCKET [refuse]``. An order is a number, which the answer repeats,
and seal N, status, exit N or silent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from ckptd.arena.arena import Arena, Slot
from ckptd.arena.fdstore import Keeper
from ckptd.arena.sums import bad_blocks
from tests.node.slots import MIB, OWN, PEER, fill_and_seal


def facts(slots: dict[int, Slot]) -> dict[str, object]:
    sealed = {str(i): s.record.snapshot.step for i, s in slots.items() if s.record}
    bad = [i for i, s in slots.items() if s.record and bad_blocks(s.payload, s.record.layout, s.record.sums)]
    inodes = sorted({os.fstat(s.segment.fd).st_ino for s in slots.values()})
    return {"pid": os.getpid(), "slots": sorted(slots), "sealed": sealed, "bad": bad, "inodes": inodes}


def main(path: str, *options: str) -> int:
    if "refuse" in options:
        return 7
    keeper = Keeper.from_env()
    leaked = [name for name in os.environ if name.startswith(("LISTEN_", "NOTIFY_", "WATCHDOG_"))]
    arena = Arena(64 * MIB, keeper, incarnation=str(os.getpid()), reserve_bytes=0, prefault=False)
    arena.adopt(keeper.taken())
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    signal.signal(signal.SIGHUP, lambda number, _: terminated.append(number))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.settimeout(0.02)
    keeper.ready()
    silent = False
    while True:
        if signal.SIGTERM in terminated:
            keeper.stopping()
            return 3
        if not silent:
            keeper.watchdog()
        try:
            text, sender = listener.recvfrom(4096)
        except TimeoutError:
            continue
        number, order, *arguments = text.decode().split()
        if order == "exit":
            return int(arguments[0])
        if order == "silent":
            silent = True
        elif order == "seal":
            _seal(arena, int(arguments[0]))
        answer = {
            **facts(arena.slots),
            "leaked": leaked,
            "got": terminated,
            "interval": keeper.watchdog_interval_s,
        }
        listener.sendto(json.dumps({**answer, "number": int(number)}).encode(), sender)


def _seal(arena: Arena, step: int) -> None:
    """A sealed own slot and replica, one slot that is being filled, and one that was given back."""
    for tenant in (OWN, PEER):
        fill_and_seal(arena.allocate(tenant, 3 * MIB), step)
    arena.allocate(OWN, MIB).fill(step)
    arena.retire(arena.allocate(OWN, MIB))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
