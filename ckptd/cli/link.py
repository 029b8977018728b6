"""Asking the running daemon, through the socket of its ranks."""

from __future__ import annotations

from typing import Any

from ckptd.cli.page import socket_of
from ckptd.config_sources import Loaded
from ckptd.core.errors import CkptdError
from ckptd.wire.rank import Refused
from ckptd.wire.seqpacket import RankSocket


def connect(loaded: Loaded, answer: type) -> RankSocket:
    """To this node's daemon, for questions that it answers with ``answer``. Raises CkptdError when none runs here."""
    path = socket_of(loaded)
    try:
        return RankSocket.connect(path, (answer, Refused))
    except OSError as error:
        hint = "start one with `ckptd run`, or name its socket with --socket or CKPTD_SOCKET"
        raise CkptdError(f"no ckptd daemon answers here: {error.strerror}", where=str(path), hint=hint) from error


def ask(link: RankSocket, message: object, timeout_s: float) -> Any:
    """The answer. Raises CkptdError when it is a refusal, or none comes."""
    try:
        link.send(message, timeout_s=timeout_s)
        received = link.recv(timeout_s)
    except TimeoutError as error:
        hint = "it may be at work on this still: see its log"
        raise CkptdError(f"the daemon has not answered for {timeout_s:.0f} s", hint=hint) from error
    except OSError as error:
        raise CkptdError(f"the daemon did not answer: {error!r}") from error
    if received is None:
        raise CkptdError("the daemon closed the connection", hint="is it of an older version, or stopping?")
    found: Any = received[0]
    if isinstance(found, Refused):
        raise CkptdError(found.what, where=found.where, hint=found.hint)
    return found
