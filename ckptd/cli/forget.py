"""`ckptd forget`: a job that is over leaves nothing, in memory, and on storage if that is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptd.cli.flags import Loaded, with_settings
from ckptd.core.errors import CkptdError

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
        print_json({"node": done.node, "job": done.job, "epoch": done.epoch, "silent": done.silent, "deleted": done.deleted})
        return
    typer.echo(f"job {done.job}: forgotten up to epoch {done.epoch}" + (f", {done.deleted} checkpoints deleted" if storage else ""))
    if done.silent:
        typer.echo(f"no answer from {', '.join(done.silent)}: forgotten there when it comes back")


def _ask(loaded: Loaded, job: str, storage: bool) -> Forgotten:
    from ckptd.cli.page import socket_of
    from ckptd.wire.rank import ForgetAsk, Forgotten, Refused
    from ckptd.wire.seqpacket import RankSocket

    path = socket_of(loaded)
    try:
        link = RankSocket.connect(path, (Forgotten, Refused))
    except OSError as error:
        hint = "start one with `ckptd run`, or name its socket with --socket or CKPTD_SOCKET"
        raise CkptdError(f"no ckptd daemon answers here: {error.strerror}", where=str(path), hint=hint) from error
    try:
        link.send(ForgetAsk(job, storage), timeout_s=ANSWER_TIMEOUT_S)
        received = link.recv(ANSWER_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise CkptdError(f"the daemon did not answer: {error!r}") from error
    finally:
        link.close()
    if received is None:
        raise CkptdError("the daemon closed the connection", hint="is it of an older version, or stopping?")
    message: Any = received[0]
    if isinstance(message, Refused):
        raise CkptdError(message.what, where=message.where, hint=message.hint)
    return message  # type: ignore[no-any-return]
