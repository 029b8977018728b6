"""What lies around a small range of an object comes with it: a store answers a request for 4 MiB hardly later than one for 10 KB.

Tensors of a few KB lie side by side in a file, and whoever restores wants nearly all of them: each by a request of its own would be
thousands.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

WINDOW_BYTES = 4 << 20  # on a grid of the object
WINDOWS_MAX = 16  # kept, of all objects that are open

Fetch = Callable[[int, int], memoryview]  # (first byte, how many)


class Windows:
    """Shared by all readers of a storage. Two threads that want the same window make one request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, int], Future[memoryview]] = OrderedDict()
        self._readers = 0

    def reader(self) -> int:
        """A number for one. What it reads is seen by nobody else: who opens a file anew reads it anew."""
        with self._lock:
            self._readers += 1
            return self._readers

    def read_into(self, reader: int, fetch: Fetch, size: int, at: int, dest: memoryview) -> None:
        """Raises what ``fetch`` raises."""
        while dest:
            number, begin = divmod(at, WINDOW_BYTES)
            part = self._window(reader, number, fetch, size)[begin : begin + len(dest)]
            dest[: len(part)] = part
            at, dest = at + len(part), dest[len(part) :]

    def drop(self, reader: int) -> None:
        with self._lock:
            for key in [key for key in self._found if key[0] == reader]:
                del self._found[key]

    def _window(self, reader: int, number: int, fetch: Fetch, size: int) -> memoryview:
        key = reader, number
        with self._lock:
            found = self._found.get(key)
            mine = found is None
            if found is None:
                found = self._found[key] = Future()
                while len(self._found) > WINDOWS_MAX:
                    self._found.popitem(last=False)
            self._found.move_to_end(key)
        if mine:
            start = number * WINDOW_BYTES
            try:
                found.set_result(fetch(start, min(WINDOW_BYTES, size - start)))
            except BaseException as error:
                with self._lock:
                    self._found.pop(key, None)
                found.set_exception(error)
        return found.result()
