"""Forked children (loader workers) must not keep the daemon's socket and memory open (design D1, D2).

The mappings themselves are MADV_DONTFORK; here are the descriptors. In a child no lock is taken and nothing is unmapped.
"""

from __future__ import annotations

import os

_descriptors: set[int] = set()


def guard(fd: int) -> int:
    """From now on a forked child closes ``fd``. Returns it."""
    _descriptors.add(fd)
    return fd


def close(fd: int) -> None:
    """Close a guarded descriptor. Forgotten first: a child must never close a number that means something else."""
    _descriptors.discard(fd)
    os.close(fd)


def release(fd: int) -> None:
    """Somebody else closes it (a socket object)."""
    _descriptors.discard(fd)


def _in_child() -> None:
    for fd in list(_descriptors):
        try:
            os.close(fd)
        except OSError:
            continue  # the parent was just closing it
    _descriptors.clear()


os.register_at_fork(after_in_child=_in_child)
