"""A trainer that has imported everything and forks itself for each rank: a start costs milliseconds, not seconds of torch.

``python template.py FD``: orders come over that socket as JSON with the descriptors 0, 1, 2 and so on of the rank, answers are
process ids. A rank is a process of its own in every respect that matters here: session, user, environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ckptd.core import failpoint
from tests.cluster import trainer

ORDER_BYTES_MAX = 1 << 16
FDS_MAX = 4
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")  # torch's own, at first use


def main(rank_main: Callable[[str, str], None], late_imports: Sequence[str]) -> None:
    """``rank_main``: (job, kind), in the process of the rank."""
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in late_imports:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are reaped by the kernel
    link.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(link, ORDER_BYTES_MAX, FDS_MAX)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            link.close()
            become(rank_main, json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        link.send(str(pid).encode())


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
