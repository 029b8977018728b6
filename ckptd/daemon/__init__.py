"""The daemon's shell: everything with an effect, around the pure core (design D5)."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from ckptd import thread_pool
from ckptd.config import Config

THREADS_END_S = 2.0  # from the end of the event loop until threads that still hang are left behind


def main(config: Config) -> int:
    """Run the daemon until SIGTERM. Returns the exit status; a CkptdError at start is the caller's to print."""
    import uvloop

    from ckptd.daemon.server import Daemon

    async def live() -> int:
        return await Daemon(config).run()

    status = int(uvloop.run(live()))
    _leave_stuck_threads(status)
    return status


def _leave_stuck_threads(status: int) -> None:
    """A thread that hangs on storage would keep the process: the interpreter waits for each at its end. Threads of a pool count
    while they are in the midst of a task; idle ones end with the process."""
    deadline = time.monotonic() + THREADS_END_S
    for thread in _waited_for():
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [t.name for t in _waited_for()] + thread_pool.at_work(deadline - time.monotonic())
    if stuck:
        logging.getLogger("ckptd.daemon").warning("left behind, they hang: %s", " ".join(stuck))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _waited_for() -> list[threading.Thread]:
    """Threads that keep the interpreter from ending."""
    return [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
