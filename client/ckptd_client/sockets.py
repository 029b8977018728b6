"""Where the daemon's socket is when nobody says: the same places that `ckptd run` takes."""

from __future__ import annotations

import os

VARIABLE = "CKPTD_SOCKET"
SYSTEM = "/run/ckptd/ckptd.sock"
NAME = "ckptd/ckptd.sock"


def default(*, to_start: bool) -> str:
    """CKPTD_SOCKET, else a daemon of this user if there is one, else the machine's. ``to_start``: where this user would
    start one, unless the machine has one already."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    if os.geteuid() == 0:
        return SYSTEM
    own = _own()
    if not os.path.isabs(own):
        return SYSTEM
    return own if os.path.exists(own) or (to_start and not os.path.exists(SYSTEM)) else SYSTEM


def _own() -> str:
    """An ordinary user's: $XDG_RUNTIME_DIR, else beside the daemon's state. Relative for a user without a home directory."""
    run = os.environ.get("XDG_RUNTIME_DIR")
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(run or state, NAME)
