"""A process that stands for a training rank in tests of the unix socket. Orders on stdin, one JSON line each on stdout.

Run as ``python -m tests.node.rank_process SOCKET``. Orders: hello, raw HEX, big N, memfd N, flood N, fork, close, recv, end.
"""

from __future__ import annotations

import json
import os
import socket
import sys

from ckptd.wire import rank as wire
from ckptd.wire.seqpacket import RankSocket, memfd_object


def obey(link: RankSocket, order: str, argument: str) -> object:
    if order == "hello":
        return link.send(wire.Hello(wire.PROTOCOL_VERSION, "gpt", os.getpid()), timeout_s=5)
    if order == "raw":
        return link.sock.send(bytes.fromhex(argument))
    if order == "big":
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        return link.sock.send(bytes(int(argument)))
    if order == "memfd":
        fds = [memfd_object(b"object") for _ in range(int(argument))]
        return link.send(wire.Wants(1), fds)
    if order == "flood":
        return sum(link.send(wire.Called(step), timeout_s=5) for step in range(int(argument)))
    if order == "fork":
        pid = os.fork()
        if pid == 0:  # as a loader's worker: it holds the socket open and does nothing
            sys.stdin.close()
            os.read(os.pipe()[0], 1)
        return pid
    if order == "close":
        link.close()
        return None
    if order == "recv":
        received = link.recv(5)
        return None if received is None else [type(received[0]).__name__, len(received[1])]
    raise ValueError(order)


def main(path: str) -> int:
    link = RankSocket.connect(path)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order, _, argument = line.strip().partition(" ")
        if order == "end":
            os._exit(0)
        try:
            answer = obey(link, order, argument)
        except (OSError, TimeoutError) as error:
            answer = type(error).__name__
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
