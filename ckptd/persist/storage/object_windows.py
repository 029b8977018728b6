"""What lies behind a small range of an object comes with it: a store answers a request for 4 MiB hardly later than one for 10 KB.

Tensors of a few KB lie side by side in a file, and whoever restores wants nearly all of them: each by a request of its own would be
thousands. One that lies between large ones, which another node may read, is wanted alone. So as much more is asked for as was read
without a gap before, as kernels read files ahead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

WINDOW_BYTES = 256 << 10  # on a grid of the object
AHEAD_MAX = 16  # windows of one request, unless more is wanted
WINDOWS_MAX = 256  # kept, of all objects that are open

Fetch = Callable[[int, int], memoryview]  # (first byte, how many)
Key = tuple[int, int]  # the reader's number, the window's


class Window(NamedTuple):
    """``together``: so many came, or come, with the same request."""

    content: Future[memoryview]
    together: int


class Windows:
    """Shared by all readers of a storage. Two threads that want the same window make one request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Key, Window] = OrderedDict()
        self._readers = 0

    def reader(self) -> int:
        """A number for one. What it reads is seen by nobody else: who opens a file anew reads it anew."""
        with self._lock:
            self._readers += 1
            return self._readers

    def read_into(self, reader: int, fetch: Fetch, size: int, at: int, dest: memoryview) -> None:
        """Raises what ``fetch`` raises."""
        end = at + len(dest)
        while dest:
            number, begin = divmod(at, WINDOW_BYTES)
            wanted = -(-end // WINDOW_BYTES) - number
            part = self._window((reader, number), wanted, fetch, size)[begin : begin + len(dest)]
            dest[: len(part)] = part
            at, dest = at + len(part), dest[len(part) :]

    def drop(self, reader: int) -> None:
        with self._lock:
            for key in [key for key in self._found if key[0] == reader]:
                del self._found[key]

    def _window(self, key: Key, wanted: int, fetch: Fetch, size: int) -> memoryview:
        """``wanted``: so many, from this one on."""
        with self._lock:
            found = self._found.get(key)
            made = {} if found is not None else self._made(key, wanted, size)
            found = found or made[key]
            self._found |= made
            self._found.move_to_end(key)
            while len(self._found) > WINDOWS_MAX:
                self._found.popitem(last=False)
        if made:
            self._fetch(made, fetch, size)
        return found.content.result()

    def _made(self, key: Key, wanted: int, size: int) -> dict[Key, Window]:
        """To be fetched, up to one that is there."""
        reader, first = key
        before = self._found.get((reader, first - 1))
        ahead = min(2 * before.together, AHEAD_MAX) if before is not None else 1
        last = min(first + max(wanted, ahead), -(-size // WINDOW_BYTES))
        count = next((at - first for at in range(first + 1, last) if (reader, at) in self._found), last - first)
        return {(reader, at): Window(Future(), count) for at in range(first, first + count)}

    def _fetch(self, made: dict[Key, Window], fetch: Fetch, size: int) -> None:
        start = next(iter(made))[1] * WINDOW_BYTES
        try:
            content = fetch(start, min(len(made) * WINDOW_BYTES, size - start))
        except BaseException as error:
            with self._lock:
                for key, window in made.items():
                    if self._found.get(key) is window:
                        del self._found[key]
            for window in made.values():
                window.content.set_exception(error)
            return
        for at, window in enumerate(made.values()):
            # A copy: what is left of a request in the end would keep all of it.
            window.content.set_result(memoryview(bytes(content[at * WINDOW_BYTES : (at + 1) * WINDOW_BYTES])))
