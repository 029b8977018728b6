"""`ckptd forget`: a job that is over leaves nothing, in memory, and on storage if that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckptd.cli.flags import Loaded, with_settings

if TYPE_CHECKING:
    from ckptd.wire.rank import Forgotten

ANSWER_TIMEOUT_S = 600.0  # storage deletes meanwhile


@with_settings
def forget(
    loaded: Loaded,
    job: Annotated[str, typer.Argument(help="NAME, or UID/NAME of another user's, as `ckptd status` shows it")],
    storage: Annotated[bool, typer.Option("--storage", help="its checkpoints on storage go as well")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="what was done, for machines")] = False,
) -> None:
    """Let go of all that is in memory of a job that is over, on all its nodes. It begins anew when it starts again.

    Without --storage its checkpoints stay, and a new start restores from them. Only the job's owner, root and the daemon's own
    user may. Exit status 0: forgotten; a node that did not answer forgets when it comes back.
    """
    from ckptd.cli.show import print_json

    done = _ask(loaded, job, storage)
    if as_json:
        print_json({"node": done.node, "job": done.job, "epoch": done.epoch, "nodes": done.nodes, "silent": done.silent,
                    "deleted": done.deleted})  # fmt: skip
        return
    deleted = f", {done.deleted} checkpoints deleted" if storage else ""
    typer.echo(f"job {done.job}: forgotten up to epoch {done.epoch} on {', '.join(done.nodes)}{deleted}")
    if done.silent:
        typer.echo(f"no answer from {', '.join(done.silent)}: forgotten there when it comes back")


def _ask(loaded: Loaded, job: str, storage: bool) -> Forgotten:
    from ckptd.cli.link import ask, connect
    from ckptd.wire.rank import ForgetAsk, Forgotten

    link = connect(loaded, Forgotten)
    try:
        return ask(link, ForgetAsk(job, storage), ANSWER_TIMEOUT_S)  # type: ignore[no-any-return]
    finally:
        link.close()
