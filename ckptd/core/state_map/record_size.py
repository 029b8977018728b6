"""How much memory the record of a slot needs. It names and sums every tensor, so it grows with their number, not with their bytes
(design D1, P15)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ckptd.core.state_map.agreement import DIGEST_BYTES
from ckptd.core.state_map.layout import BLOCK_BYTES, UNIQUE, Layout

SUM_BYTES = 16  # of one integrity block
PACKING_BYTES = 16  # around the name and the digest of one tensor or object
HEAD_BYTES = 64 * 1024  # job, snapshot, parity set, and the digests of a usual number of objects


def predicted_record(layout: Layout) -> int:
    """Bytes of the record of a slot that is captured under this layout, before its sums exist. What more than a few hundred objects
    (non-tensor entries) add is not in it: the layout does not name them."""
    blocks = -(-layout.objects_capacity // BLOCK_BYTES) + int((-(-layout.fragments.nbytes // BLOCK_BYTES)).sum())
    compared = DIGEST_BYTES * int(np.count_nonzero(~layout.fragments.shared_as(UNIQUE)))
    return HEAD_BYTES + len(layout.encoded) + SUM_BYTES * blocks + compared


def record_bytes(layout_bytes: int, sums_bytes: int, digests: Iterable[tuple[str, bytes]] = ()) -> int:
    """Bytes that a record needs at most: of an encoded layout of this length, with so many bytes of sums."""
    named = sum(len(name.encode()) + len(value) + PACKING_BYTES for name, value in digests)
    return HEAD_BYTES + layout_bytes + sums_bytes + named
