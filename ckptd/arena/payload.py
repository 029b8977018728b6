"""A slot's payload where its frozen part lies elsewhere: two memories under one range of offsets (design D6)."""

from __future__ import annotations


class Joined:
    """Reads as one ``memoryview`` would, by slices that lie in one part. The live part may be a prefix (a lower tier's)."""

    def __init__(self, live: memoryview, frozen_at: int, frozen: memoryview) -> None:
        assert frozen_at > 0, "a payload begins with its live part"
        self._live, self._frozen_at, self._frozen = live, frozen_at, frozen

    def __len__(self) -> int:
        return self._frozen_at + len(self._frozen)

    def __getitem__(self, where: slice) -> memoryview:
        """Shorter than asked for where there is nothing. Raises ValueError for a range that lies in both parts."""
        start, stop, _ = where.indices(len(self))
        if start >= self._frozen_at:
            return self._frozen[start - self._frozen_at : stop - self._frozen_at]
        if stop > self._frozen_at:
            raise ValueError(f"bytes {start} to {stop} lie in both parts, which meet at {self._frozen_at}")
        return self._live[start:stop]


Payload = memoryview | Joined
