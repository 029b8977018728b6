"""What waits to be sent to one peer, bounded in bytes; sending never blocks (P5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import zmq

from ckptd.wire.codec import CONTROL_MESSAGE_BYTES_MAX
from ckptd.wire.link_frames import Letter

OUTBOX_BYTES_MAX = 2 * CONTROL_MESSAGE_BYTES_MAX  # payload that waits for one peer; beyond it send() says False
URGENT_MAX = 64  # greetings and pings that wait; they are repeated anyway


class Outbox:
    """Nothing leaves before ``flush``. ``send(frame)`` hands one frame to zmq and raises zmq.Again when there is no room."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._urgent: deque[bytes] = deque(maxlen=URGENT_MAX)
        self._letters: deque[Letter] = deque()
        self._open: Iterator[bytes] | None = None  # rest of the first letter
        self._frame: bytes | None = None  # taken from it, not sent yet
        self._number = 0
        self.nbytes = 0

    def post(self, letter: Letter) -> bool:
        """False: too much waits already. A single letter always finds room."""
        if self._letters and self.nbytes + letter.nbytes > OUTBOX_BYTES_MAX:
            return False
        self._letters.append(letter)
        self.nbytes += letter.nbytes
        return True

    def urgent(self, frame: bytes) -> None:
        """Ahead of all letters."""
        self._urgent.append(frame)

    def flush(self) -> int:
        """Send what zmq takes, and say how many frames. Raises zmq.ZMQError other than Again: the peer is gone."""
        sent = 0
        try:
            while self._urgent:
                self._send(self._urgent[0])
                self._urgent.popleft()
                sent += 1
            while self._frame is not None or self._turn():
                assert self._frame is not None, "a frame was just taken"
                self._send(self._frame)
                self._frame = None
                sent += 1
        except zmq.Again:
            return sent
        return sent

    def _turn(self) -> bool:
        """The next frame. False: nothing waits."""
        while self._letters:
            if self._open is None:
                self._number += 1
                self._open = self._letters[0].frames(self._number)
            self._frame = next(self._open, None)
            if self._frame is not None:
                return True
            self._open = None
            self.nbytes -= self._letters.popleft().nbytes
        return False

    def clear(self) -> None:
        """The connection is gone, and with it whatever the peer had of a letter."""
        self._urgent.clear()
        self._letters.clear()
        self._open = self._frame = None
        self.nbytes = 0
