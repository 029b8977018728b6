"""`ckptd run`: the daemon, in the foreground, under whoever keeps its memory over a crash."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

KEEPER_WATCHDOG_S = 60.0  # a daemon that does not beat for this long is hung: it is killed and comes back with its memory


@with_settings
def run(
    loaded: Loaded,
    keeper: Annotated[
        bool,
        typer.Option("--keeper/--no-keeper", help="a small parent process keeps the memory over a crash"),
    ] = True,
) -> None:
    """Run the daemon in the foreground until SIGTERM.

    Its memory outlives a crash in systemd's descriptor store where there is one (NOTIFY_SOCKET), else in
    a parent process of its own.
    """
    settings = loaded.config.with_identity()
    from ckptd.arena.fdstore import has_service_manager

    if keeper and not has_service_manager():
        from ckptd.arena.keeper import run_under_keeper

        named = ["--node-id", settings.node_id]  # whatever becomes of state_dir: ranks and peers know it under this one
        raise typer.Exit(run_under_keeper([sys.executable, "-m", "ckptd", *sys.argv[1:], *named], KEEPER_WATCHDOG_S))
    from ckptd.daemon import main
    from ckptd.observe import log

    log.setup(settings.log_level, settings.log_format, node=settings.node_id)
    try:
        status = main(settings)
    except OSError as error:
        raise CkptdError(f"the daemon cannot start: {error}") from error
    raise typer.Exit(status)
