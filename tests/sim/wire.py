"""What the wire between daemons makes of a message: it has a length, a link has a speed, and what is too large is not sent.

The encoding and the limits are the real ones (ckptd/wire); only the sockets are not.
"""

from __future__ import annotations

from ckptd.core.errors import CkptdError
from ckptd.core.protocol.messages import Message
from ckptd.wire.codec import encode
from ckptd.wire.outbox import OUTBOX_BYTES_MAX

SMALL_BYTES = 16 * 1024  # zmq takes what is smaller in between, so that it waits for nothing


class Wire:
    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.refused = 0
        self._free_at: dict[tuple[str, str], float] = {}  # link -> when all that was sent has left
        self._last: tuple[object, int] = (None, 0)

    def size(self, message: Message) -> int:
        """Bytes. The same message to many peers is encoded once. Raises CkptdError: it is longer than a message may be."""
        if message is not self._last[0]:
            self._last = message, len(encode(message))
        return self._last[1]

    def seconds(self, source: str, to: str, message: Message, now: float) -> float | None:
        """Until its last byte has left, behind what was sent there before. None: it is refused, as the real link refuses it."""
        try:
            size = self.size(message)
        except CkptdError:
            self.refused += 1
            return None
        if size < SMALL_BYTES:
            return size / self.bytes_s
        free_at = max(now, self._free_at.get((source, to), 0.0))
        if free_at > now and (free_at - now) * self.bytes_s + size > OUTBOX_BYTES_MAX:
            self.refused += 1
            return None
        self._free_at[source, to] = free_at + size / self.bytes_s
        return self._free_at[source, to] - now
