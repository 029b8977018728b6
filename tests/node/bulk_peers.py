"""Both ends of the bulk port for tests: real transports with one key, and a sender that does what it likes."""

from __future__ import annotations

import socket

from ckptd.wire import bulk_frames as frames
from ckptd.wire.bulk import Ticket
from ckptd.wire.keys import ClusterKey
from ckptd.wire.landing import Landing
from ckptd.wire.tcp import TcpTransport
from ckptd.wire.tcp_io import split_address

KEY = ClusterKey(bytes(range(32)))
HANDSHAKE = frames.HELLO_BYTES + frames.PROOF_BYTES  # bytes a sender says before its first chunk
MODES = ["none", "aead"]


def transport(mode: str, **options: object) -> TcpTransport:
    settings: dict[str, object] = {"secret": KEY, "handshake_timeout_s": 2.0, "idle_timeout_s": 5.0, **options}
    return TcpTransport("127.0.0.1", mode=mode, **settings)  # type: ignore[arg-type]


def expect(receiver: TcpTransport, nbytes: int) -> Landing:
    return receiver.expect(memoryview(bytearray(nbytes)), aad=b"snapshot")


def knock(transport: TcpTransport) -> socket.socket:
    return socket.create_connection(split_address(transport.address), timeout=30)


def answer(sock: socket.socket) -> bytes:
    """All the receiver says until it closes."""
    said = b""
    try:
        while data := sock.recv(4096):
            said += data
    except ConnectionError:  # closed with something unread
        pass
    return said


class RawSender:
    """A sender with the right key that does whatever a test wants, chunk by chunk, in mode none."""

    def __init__(self, ticket: Ticket, stream: int = 0, streams: int = 1, push: bytes = bytes(16)) -> None:
        self.hello = frames.Hello(stream, streams, ticket.mode, ticket.id, push)
        self.sock = socket.create_connection(split_address(ticket.address), timeout=30)
        try:
            self.sock.sendall(self.hello.pack())
            nonce = frames.unpack_reply(self.read(frames.REPLY_BYTES))
            self.secret = frames.StreamSecret(ticket, KEY.bulk, self.hello, nonce)
            self.sock.sendall(self.secret.proof("sender"))
            frames.unpack_reply(self.read(frames.REPLY_BYTES))
        except BaseException:
            self.sock.close()
            raise

    def read(self, nbytes: int) -> bytes:
        data = self.sock.recv(nbytes, socket.MSG_WAITALL)
        if len(data) < nbytes:
            raise EOFError(data)
        return data

    def chunk(self, offset: int, data: bytes, flags: int = 0, length: int | None = None) -> None:
        self.sock.sendall(frames.pack_chunk(offset, len(data) if length is None else length, flags) + data)

    def end(self, chunks: int) -> None:
        self.chunk(chunks, b"", frames.LAST)
