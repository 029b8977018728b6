"""A trainer that has imported everything and forks itself for each rank: a start costs milliseconds, not seconds of torch.

``python template.py FD``: whoever connects to that socket sends orders as JSON with the descriptors 0, 1, 2 and so on of the rank;
answers are process ids. A rank is a process of its own in every respect that matters here: session, user, environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ckptd.core import failpoint
from tests.cluster import trainer
from tests.cluster.forked import REPO

ORDER_BYTES_MAX = 1 << 16
FDS_MAX = 4
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")  # torch's own, at first use


def main(rank_main: Callable[[str, str], None], late_imports: Sequence[str]) -> None:
    """``rank_main``: (job, kind), in the process of the rank."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.chdir(REPO)
    for name in late_imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # it lives on, and a rank that looked through it would copy it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are reaped by the kernel
    links: list[socket.socket] = []
    while True:
        for ready in select.select([listener, *links], [], [])[0]:
            if ready is listener:
                links.append(listener.accept()[0])
                links[-1].send(b"ready")
            elif not serve(ready, [listener, *links], rank_main):
                links.remove(ready)
                ready.close()
                if not links:
                    return


def serve(link: socket.socket, ours: Sequence[socket.socket], rank_main: Callable[[str, str], None]) -> bool:
    """One order. False: whoever was at the other end is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(link, ORDER_BYTES_MAX, FDS_MAX)
        if not data:
            return False
        pid = os.fork()
        if pid == 0:
            for one in ours:
                one.close()
            become(rank_main, json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        link.send(str(pid).encode())
    except ConnectionError:
        return False
    return True


def become(rank_main: Callable[[str, str], None], order: dict[str, Any], fds: list[int]) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(order["env"])
        failpoint.arm(order["env"].get("CKPTD_FAILPOINT", ""))
        if order["uid"]:
            os.setgroups([])
            os.setgid(order["uid"])
            os.setuid(order["uid"])
        rank_main(order["job"], order["kind"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(trainer.main, LATE_IMPORTS)
