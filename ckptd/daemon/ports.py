"""The ports of both links, kept over restarts. Peers know a daemon by the address of its last life; when several restart at
once (an upgrade, a power cut of a rack), nobody is left who could tell one the new address of the other. Nor can anybody
reach a daemon that lost its state directory: so the first ports are made from its configuration, and are the same again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from ckptd.config import FIRST_PORT, PORTS
from ckptd.core.errors import CkptdError
from ckptd.daemon.services import log
from ckptd.daemon.state import StateDir
from ckptd.wire.control import ControlLink

FILE = "ports.json"
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
T = TypeVar("T")


class Ports(msgspec.Struct, frozen=True):
    """0: none was kept."""

    control: Port = 0
    bulk: Port = 0


def kept(state: StateDir, node: str, address: str) -> Ports:
    """What does not parse counts as nothing: those of the first start then."""
    try:
        return msgspec.json.decode((state.path / FILE).read_bytes(), type=Ports)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return first(f"{node} {address} {state.path.absolute()}")


def first(who: str) -> Ports:
    """Two different ones, the same for the same ``who``; another daemon of this machine has another state directory."""
    digest = hashlib.blake2b(who.encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") % (PORTS // 2)
    return Ports(FIRST_PORT + 2 * at, FIRST_PORT + 2 * at + 1)


def keep(state: StateDir, control: str, bulk: str) -> None:
    """``control``, ``bulk``: the addresses in use. Without room for them the daemon goes on; ``state`` is in trouble then."""
    data = msgspec.json.encode(Ports(_port(control), _port(bulk)))
    path = state.path / FILE
    if path.exists() and path.read_bytes() == data:
        return
    state.keep(FILE, data)


def listen(make: Callable[[int], T], wanted: int, last: int) -> T:
    """``make`` binds a port. ``wanted`` 0: the last one if it is free, else any."""
    if wanted or not last:
        return make(wanted)
    try:
        return make(last)
    except CkptdError as error:
        log.info("port %d, kept for this daemon, cannot be had (%s): taking another", last, error.what)
        return make(0)


async def start(make: Callable[[int], ControlLink], wanted: int, last: int) -> ControlLink:
    """The same for the control link, which binds when it starts."""
    if not wanted and last:
        link = make(last)
        try:
            await link.start()
            return link
        except CkptdError as error:
            log.info("port %d, kept for this daemon, cannot be had (%s): taking another", last, error.what)
            await link.stop()
    link = make(wanted)
    await link.start()
    return link


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
