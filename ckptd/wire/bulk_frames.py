"""The fixed frames of a bulk stream and what secures them; the table is in wire/bulk.py."""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from hashlib import sha256

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckptd.wire.bulk import STREAMS_MAX, Mode, Ticket, TransferError
from ckptd.wire.keys import derive
from ckptd.wire.scratch import TAG_BYTES

VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
_HELLO = struct.Struct(">8sHHHBx16s16s16x")
_REPLY = struct.Struct(">4sB3x32s")
_CHUNK = struct.Struct(">QII")
HELLO_BYTES, REPLY_BYTES, CHUNK_HEAD_BYTES = _HELLO.size, _REPLY.size, _CHUNK.size
_MAGIC, _REPLY_MAGIC = b"CKPTBULK", b"CKPT"
_MODES: dict[int, Mode] = {0: "none", 1: "aead"}
LAST = 1

OK, VERSION_SKEW, UNKNOWN, WRONG_KEY, IN_USE, MODE, BUSY, FAILED = range(8)
REASONS = {
    VERSION_SKEW: "the receiver speaks another version of the bulk protocol",
    UNKNOWN: "the receiver does not know the ticket (used, expired or never issued)",
    WRONG_KEY: "the receiver does not accept the proof (another cluster key?)",
    IN_USE: "the ticket's stream is in use already",
    MODE: "the ticket was issued for another mode",
    BUSY: "the receiver has too many connections",
    FAILED: "the transfer failed at the receiver",
}


class Malformed(TransferError):
    """Bytes that no sender of this version sends."""


@dataclass(frozen=True, slots=True)
class Hello:
    stream: int
    streams: int
    mode: Mode
    ticket: bytes
    push: bytes
    version: int = VERSION

    def pack(self) -> bytes:
        mode = 1 if self.mode == "aead" else 0
        return _HELLO.pack(_MAGIC, self.version, self.stream, self.streams, mode, self.ticket, self.push)

    @staticmethod
    def unpack(data: bytes) -> Hello:
        """Raises Malformed. Another version's fields mean nothing here: look at ``version`` first."""
        if len(data) != HELLO_BYTES:
            raise Malformed("a greeting of another length")
        magic, version, stream, streams, mode, ticket, push = _HELLO.unpack(data)
        if magic != _MAGIC or mode not in _MODES:
            raise Malformed("not a bulk stream")
        if version == VERSION and not 0 <= stream < streams <= STREAMS_MAX:
            raise Malformed("stream number out of bounds")
        return Hello(stream, streams, _MODES[mode], ticket, push, version)


def pack_reply(status: int, body: bytes = bytes(32)) -> bytes:
    return _REPLY.pack(_REPLY_MAGIC, status, body)


def unpack_reply(data: bytes) -> bytes:
    """The body of a reply. Raises TransferError with the receiver's reason, or Malformed."""
    if len(data) != REPLY_BYTES:
        raise Malformed("an answer of another length")
    magic, status, body = _REPLY.unpack(data)
    if magic != _REPLY_MAGIC:
        raise Malformed("the answer is not a bulk receiver's")
    if status != OK:
        raise TransferError(REASONS.get(status, f"refused with status {status}"))
    return bytes(body)


def pack_chunk(offset: int, length: int, flags: int = 0) -> bytes:
    return _CHUNK.pack(offset, length, flags)


def unpack_chunk(data: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    return _CHUNK.unpack(data)


class StreamSecret:
    """What one connection proves and encrypts with. ``hello`` and ``nonce`` make it differ from every other connection."""

    def __init__(self, ticket: Ticket, bulk_key: bytes, hello: Hello, nonce: bytes) -> None:
        self._secret = derive(ticket.key, "bulk stream", salt=bulk_key)
        self._hello, self._nonce = hello.pack(), nonce
        self._aad = struct.pack(">I", len(ticket.aad)) + ticket.aad + struct.pack(">H", hello.stream)

    def proof(self, label: str, more: bytes = b"") -> bytes:
        text = label.encode() + b"\0" + self._hello + self._nonce + more
        return hmac.new(self._secret, text, sha256).digest()

    def check(self, proof: bytes, label: str, more: bytes = b"") -> bool:
        return hmac.compare_digest(proof, self.proof(label, more))

    def cipher(self) -> ChunkCipher:
        key = derive(self._secret, "bulk aead", salt=self._nonce + self._hello)
        return ChunkCipher(AESGCM(key), self._aad)


class ChunkCipher:
    """AES-256-GCM over the chunks of one stream in the order they are sent: one counter, so nonces never repeat."""

    def __init__(self, aead: AESGCM, aad: bytes) -> None:
        self._aead, self._aad, self._count = aead, aad, 0

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")

    def seal(self, head: bytes, plain: bytes | memoryview, scratch: memoryview) -> memoryview:
        """Encrypted chunk and tag, in the scratch."""
        out = scratch[: len(plain) + TAG_BYTES]
        self._aead.encrypt_into(self._next(), plain, self._aad + head, out)
        return out

    def open(self, head: bytes, sealed: memoryview, into: memoryview) -> None:
        """Decrypt chunk and tag. Raises cryptography's InvalidTag."""
        self._aead.decrypt_into(self._next(), sealed, self._aad + head, into)
