"""Layouts as daemons wrote them before there were columns (versions 1 to 3): their memory may be found."""

from __future__ import annotations

import msgpack

from ckptd.core.state_map.layout import Layout


def in_rows(layout: Layout) -> bytes:
    rows = [[f.key, f.dtype, f.shape, *f.box, f.offset, f.nbytes, f.role, f.sharing, f.tier] for f in layout.fragments]
    head = [layout.rank, layout.world, layout.objects_capacity, layout.payload_bytes, layout.plan_id, layout.aliases, rows]
    tail = [3, layout.frozen_bytes, layout.without] if layout.without else [2, layout.frozen_bytes]
    packed: bytes = msgpack.packb([tail[0], *head, *tail[1:]] if tail[1] or layout.without else [1, *head])
    return packed
