"""A process that has imported everything and forks itself for each ``ckptd`` command: the start of a node costs 0.1 s of processor
time, not the 2 s that two interpreters and their imports take. ``python -m tests.cluster.node_template FD``, as template.py.

Of ``ckptd run`` keeper and daemon are processes of their own; where either would become another program, it goes on as this one,
with that program's arguments, environment and descriptors. Trials and the tests of keeper and command line start real ones.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import NoReturn

import typer.main

from ckptd.arena import keeper
from ckptd.cli import main as ckptd
from ckptd.cli.app import app
from ckptd.core import failpoint
from tests.cluster import template

IMPORTS = (
    "uvloop", "ckptd.daemon", "ckptd.daemon.server", "ckptd.export.export", "ckptd.imports.hints",
    "ckptd.imports.write",
)  # fmt: skip
STATUS_FD = 3  # where a process that ends by itself says its status; one that is killed says nothing


def command(arguments: str, kind: str) -> NoReturn:
    """``arguments``: JSON. ``kind``: a module to be imported before, or none."""
    if kind:
        importlib.import_module(kind)
    keeper.run_under_keeper = _stay_keeper
    os.execvpe = _stay_daemon  # type: ignore[assignment]
    named = ModuleSpec("ckptd.__main__", None)  # the daemon's own children look here for what they are to import
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__spec__ = named
    _end_as(json.loads(arguments), STATUS_FD)


def _stay_keeper(argv: list[str], watchdog_s: float = 0.0) -> int:
    return keeper.main([str(watchdog_s), *argv])


def _stay_daemon(program: str, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    assert list(argv[:3]) == [sys.executable, "-m", "ckptd"], argv
    os.closerange(keeper.FIRST_FD + int(env.get("LISTEN_FDS", 0)), os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    failpoint.arm(env.get("CKPTD_FAILPOINT", ""))
    _end_as(list(argv[3:]))


def _end_as(arguments: list[str], status_fd: int | None = None) -> NoReturn:
    """Runs the command and ends as an interpreter does."""
    sys.argv = ["ckptd", *arguments]
    status: object = 1
    try:
        ckptd()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    code = status if isinstance(status, int) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status_fd is not None:
        os.write(status_fd, bytes([code]))
    os._exit(code)


if __name__ == "__main__":
    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)  # 0.05 s, which each command would take
    template.main(command, IMPORTS)
