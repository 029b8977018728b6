"""Messages of other nodes on their way to the machine: large layouts are decoded in a thread before, not on the event loop.

The machine decodes what it gets (core/protocol/machine/context.py remembers it); 10 000 fragments take some 50 ms, times the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ckptd.core.protocol.events import Received
from ckptd.core.protocol.machine.context import LAYOUTS_CACHED_MAX, decode_layout
from ckptd.core.protocol.messages import Message
from ckptd.daemon.services import Services

LARGE_BYTES = 32 * 1024  # of an encoded layout; smaller ones cost less than the detour


class InboundQueue:
    """What one sender says stays in its order."""

    def __init__(self, services: Services, job: str, feed: Callable[[Received], None]) -> None:
        self._services, self._job, self._feed = services, job, feed
        self._waiting: dict[str, deque[Message]] = {}  # sender -> behind the one that is being decoded
        self._known: dict[str, None] = {}  # names of layouts that were decoded

    def deliver(self, sender: str, message: Message) -> None:
        if sender in self._waiting:
            self._waiting[sender].append(message)
        elif self._large(message):
            self._waiting[sender] = deque([message])
            self._services.spawn(self._work_off(sender), f"layouts from {sender} for {self._job}")
        else:
            self._feed(Received(sender, message))

    async def _work_off(self, sender: str) -> None:
        queue = self._waiting[sender]
        try:
            while queue:
                large = self._large(queue[0])
                if large:
                    await self._services.in_work(_decode, list(large.values()))
                    self._remember(large)
                self._feed(Received(sender, queue.popleft()))
        finally:
            del self._waiting[sender]

    def _large(self, message: Message) -> dict[str, bytes]:
        layouts: dict[str, bytes] = getattr(message, "layouts", None) or {}
        return {
            name: data
            for name, data in layouts.items()
            if len(data) > LARGE_BYTES and name not in self._known
        }

    def _remember(self, names: dict[str, bytes]) -> None:
        self._known.update(dict.fromkeys(names))
        while len(self._known) > LAYOUTS_CACHED_MAX // 2:
            del self._known[next(iter(self._known))]


def _decode(layouts: list[bytes]) -> None:
    for data in layouts:
        try:
            decode_layout(data)
        except ValueError:
            continue  # the machine says what it thinks of it
