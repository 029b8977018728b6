"""Asking the running daemon, through its page on loopback."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from ckptd.config import HTTP_SUFFIX, SOCKET_NAME, SYSTEM_RUN_DIR
from ckptd.config_sources import DEFAULT, Loaded
from ckptd.core.errors import CkptdError

TIMEOUT_S = 15.0  # the daemon itself gives up after 10 s
ANSWER_BYTES_MAX = 64 << 20
PORT_MAX = 65535
HANGS = "it hangs, or its machine does: see its log; one that its keeper or systemd starts again finds its memory as it was"


def fetch(loaded: Loaded, path: str) -> dict[str, Any]:
    """GET ``path`` of this node's daemon. Raises CkptdError when none runs here, or when it answers with an error."""
    announced = _announced(loaded)
    host, port = _address(announced)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read(ANSWER_BYTES_MAX))
    except ConnectionRefusedError as error:
        died = "its keeper starts it again in seconds if it died; else "
        raise _nobody(announced, "the daemon that wrote it is gone", died) from error
    except TimeoutError as error:
        raise CkptdError(
            f"the daemon is there, and has not answered for {TIMEOUT_S:.0f} s", where=f"http://{host}:{port}{path}", hint=HANGS
        ) from error
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise CkptdError(
            f"the daemon did not answer: {error!r}", where=f"http://{host}:{port}{path}"
        ) from error
    finally:
        connection.close()
    if answer.status not in (200, 503) or not isinstance(body, dict):
        raise _refusal(body, f"http://{host}:{port}{path}")
    return body


def _announced(loaded: Loaded) -> Path:
    """Beside the socket. Where nobody named one, a user without a daemon of his own means the machine's."""
    own = loaded.config.http_file()
    system = (SYSTEM_RUN_DIR / SOCKET_NAME).with_suffix(HTTP_SUFFIX)
    is_default = loaded.origins["socket"] == DEFAULT
    return system if is_default and not own.exists() and system.exists() else own


def socket_of(loaded: Loaded) -> Path:
    """The rank socket of the daemon that ``fetch`` asks."""
    own = loaded.config.socket
    return own if _announced(loaded) == loaded.config.http_file() else SYSTEM_RUN_DIR / SOCKET_NAME


def _address(announced: Path) -> tuple[str, int]:
    try:
        host, _, port = announced.read_text().strip().rpartition(":")
        if not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
            raise ValueError("no port stands there")
        return host, int(port)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _nobody(announced, "none has announced itself") from error
    except (OSError, ValueError) as error:
        raise CkptdError(f"the daemon's page cannot be found: {error}", where=str(announced)) from error


def _nobody(announced: Path, why: str, first: str = "") -> CkptdError:
    hint = f"{first}start one with `ckptd run`, or name its socket with --socket or CKPTD_SOCKET"
    return CkptdError(f"no ckptd daemon runs here: {why}", where=str(announced), hint=hint)


def _refusal(body: Any, where: str) -> CkptdError:
    if isinstance(body, dict) and "error" in body:
        return CkptdError(
            str(body["error"]), where=str(body.get("where") or where), hint=str(body.get("hint", ""))
        )
    return CkptdError("the daemon answered with something else", where=where)
