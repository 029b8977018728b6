"""Whose jobs a caller may see: one user's jobs are invisible to another's (P13), on the status page too.

Loopback is open to every user of the machine, so the uid behind a connection is read from the kernel's own table
(``/proc/net/tcp``, column ``uid``): the entry whose local end is the caller's address and whose remote end is ours.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC_NET_TCP = Path("/proc/net/tcp")
ROOT_UID = 0

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sight:
    """``everything``: root, the daemon's own user, and those named in ``http_users``. Otherwise jobs of ``uid`` only."""

    everything: bool = False
    uid: int | None = None  # None: unknown, sees no job at all

    def sees(self, job: str) -> bool:
        """``job`` is ``{uid}/{name}``; the empty string stands for the node itself and is seen by everyone."""
        if self.everything or not job:
            return True
        return self.uid is not None and job.startswith(f"{self.uid}/")


ALL = Sight(everything=True)
NOBODY = Sight()


def _hex_address(address: Address) -> str:
    ip = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{ip:08X}:{address[1]:04X}"


def caller_uid(caller: Address, server: Address, table: Path = PROC_NET_TCP) -> int | None:
    """The uid that owns the socket ``caller`` connected to ``server`` (both IPv4 loopback); None when not found."""
    local, remote = _hex_address(caller), _hex_address(server)
    with table.open() as lines:
        for line in lines:
            fields = line.split()
            if fields[1] == local and fields[2] == remote:
                return int(fields[7])
    return None


def sight_of(caller: Address, server: Address, trusted: Iterable[int] = ()) -> Sight:
    """What the process behind this connection may see."""
    uid = caller_uid(caller, server)
    everything = uid is not None and uid in {ROOT_UID, os.geteuid(), *trusted}
    return Sight(everything, uid)
