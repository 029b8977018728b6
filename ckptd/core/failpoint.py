"""Named places where a test can make a process die, stop, wait or fail: ``CKPTD_FAILPOINT=name:action[,name:action]``.

Actions: ``kill`` (SIGKILL to itself), ``stop`` (SIGSTOP), each also once: ``kill_once=FILE`` does it unless FILE exists, which it
makes (a daemon that is started again lives); ``sleep=SECONDS``, ``error`` (raises FailpointError). Unset: a dictionary look-up.
The core never calls it (it decides nothing); rooms with effects do. The keeper, which imports nothing, loads this file by its path.
"""

from __future__ import annotations

import os


class FailpointError(RuntimeError):
    """Raised by the action ``error``."""


def _parse(text: str) -> dict[str, str]:
    return dict(part.split(":", 1) for part in text.split(",") if ":" in part)


_armed = _parse(os.environ.get("CKPTD_FAILPOINT", ""))


def arm(text: str) -> None:
    """Replace what is armed in this process (tests of one process)."""
    _armed.clear()
    _armed.update(_parse(text))


def failpoint(name: str) -> None:
    action = _armed.get(name)
    if action is not None:
        _act(name, action)


def _act(name: str, action: str) -> None:
    import signal
    import time

    once, _, path = action.partition("_once=")
    deadly = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if once in deadly:
        if not path or _first(path):
            os.kill(os.getpid(), deadly[once])
    elif action == "error":
        raise FailpointError(name)
    elif action.startswith("sleep="):
        time.sleep(float(action[6:]))
    else:
        raise ValueError(f"failpoint {name}: unknown action {action!r}")


def _first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True
