"""Who and where this node is: its kept identity, its addresses, its users."""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import secrets
import socket
from pathlib import Path

import psutil

from ckptd.core.errors import CkptdError
from ckptd.directory import make_directories, sync_path

NODE_ID_FILE = "node_id"
NODE_ID_RANDOM_BYTES = 3
NODE_ID_HOST_CHARS_MAX = 60
NODE_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def address_of(text: str) -> str:
    """An IPv4 address as it is, or the first one of the interface of that name. Raises ValueError.

    Host names are refused: they resolve to whichever interface the resolver likes, often the slow one.
    """
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        interfaces = psutil.net_if_addrs()
    for entry in interfaces.get(text, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise ValueError(
        f"{text!r} is neither an IPv4 address nor an interface with one (there are: {', '.join(interfaces)})"
    )


def uid_of(name: str) -> int:
    """A user's number, by name or number. Raises ValueError."""
    try:
        return int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ValueError(f"no user {name!r} on this machine") from None


def kept_node_id(state_dir: Path) -> str:
    """The identity kept in ``state_dir``, made there at the first start. Raises CkptdError."""
    kept = state_dir / NODE_ID_FILE
    try:
        make_directories(state_dir, 0o700)
        if not kept.exists():
            _write_once(kept, _fresh_node_id())
        found = kept.read_text("ascii", "replace").strip()
    except OSError as error:
        raise CkptdError(
            f"the node's identity cannot be kept: {error}",
            where=str(kept),
            hint="set state_dir to a directory of yours",
        ) from error
    if not re.fullmatch(NODE_ID_PATTERN, found):
        hint = "write the node's name into it; removed, the node gets a new one and is a stranger to its peers"
        raise CkptdError("the node's kept identity is damaged", where=str(kept), hint=hint)
    return found


def _fresh_node_id() -> str:
    """Host name and a few random digits: images are cloned with their host name, and two nodes must never share one."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0]) or "node"
    return f"{host[:NODE_ID_HOST_CHARS_MAX]}-{secrets.token_hex(NODE_ID_RANDOM_BYTES)}"


def _write_once(path: Path, text: str) -> None:
    """Whole or not at all, and the first of two starters wins: written beside, synced, then linked into place."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with fresh.open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)
    except FileExistsError:
        return
    finally:
        fresh.unlink()
        sync_path(path.parent)  # also for the one who came second: the first may not have got so far
