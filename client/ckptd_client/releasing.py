"""Undoing a ``keep``: release()."""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptd.core.errors import CkptdError
from ckptd.wire import rank as wire
from ckptd_client.session import SUPERSEDED

if TYPE_CHECKING:
    from ckptd_client.client import Client

RELEASE_TIMEOUT_S = 15.0  # the daemon gives storage up after less
AGAIN = "it may have happened all the same: call release() again"


class Releasing:
    """A client's part of it."""

    def release(self, step: int, timeout: float = RELEASE_TIMEOUT_S) -> str:
        """Undo ``snapshot(step, keep=True)``, or a mark made by hand: retention may delete that checkpoint like any other. One that
        is not on storage yet is written all the same, and is not kept then. From any thread, on one rank or on several, also by a
        client that has registered nothing; the step is one of the line that the job is on.

        Returns "released"; "not kept": there was nothing to undo; "no such step": neither storage nor this node's memory has it.
        Raises CkptdError when it could not be done: no daemon, one of an earlier release, no storage, storage or daemon that do not
        answer within ``timeout`` seconds, another start of the job that has taken over.
        """
        step = operator.index(step)
        client = cast("Client", self)
        client._check_here()
        session, kept = client._session, client._snapshots.kept
        if session.phase == SUPERSEDED:
            raise CkptdError("another start of the job has taken over", where=client.job, hint="release it there")
        if session.link.up and not session.policy.get("release"):
            hint = "install ckptd of this release there, or remove the file keep beside the checkpoint's manifest.json by hand"
            raise CkptdError("the daemon is of an earlier release, which cannot release a step", where=session.link.path, hint=hint)
        reply = session.ask(partial(wire.Release, step=step, epoch=kept.get(step, 0)), timeout)
        if not isinstance(reply, wire.Released):
            what = f"the daemon does not answer within {timeout:g} s" if session.link.up else session.link.trouble
            raise CkptdError(f"step {step} is not released: {what}", where=session.link.path, hint=AGAIN)
        if not reply.outcome:
            raise CkptdError(f"step {step} is not released: {reply.what}", where=reply.where, hint=reply.hint or AGAIN)
        kept.pop(step, None)
        return reply.outcome
