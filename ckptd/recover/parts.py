"""Direct mode (design D11): a rank's slices in parts that fit, one after the other, into one bounded scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptd.core.state_map.box import split
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.recovery import OWN, Plan, Want

SCRATCH_BYTES_MAX = 64 << 20  # for one rank: larger parts save no time worth its memory
SCRATCH_BYTES_MIN = 1 << 20  # taken even beyond the budget: a full arena is no reason to lose a run
PIECE_ALIGN_BYTES = 64


def aligned(nbytes: int) -> int:
    return -(-nbytes // PIECE_ALIGN_BYTES) * PIECE_ALIGN_BYTES


def usable_bytes(capacity: int, sources: int) -> int:
    """Of a scratch memory, when each source's bytes begin aligned."""
    return capacity - PIECE_ALIGN_BYTES * sources


def parts_of(plan: Plan, asked: Sequence[Want], first: int, usable: int) -> list[list[Want]]:
    """What ``plan`` brings as wants of its own, in parts: of each at most ``usable`` bytes are to be fetched, what lies in own
    memory costs nothing. The wants below ``first`` come before all others. The cut stays good when a source fails later: what a
    part needs does not depend on where it comes from."""
    wants = {want.index: want for want in asked}
    parts: list[list[Want]] = [[]]
    used = 0
    order = sorted(plan.pieces, key=lambda p: (p.want >= first, p.source != OWN, p.want, p.box.offsets))
    for piece in order:
        want = wants[piece.want]
        itemsize = ITEMSIZE[want.dtype]
        boxes = [piece.box] if piece.source == OWN else split(piece.box, max(1, usable // itemsize))
        for box in boxes:
            nbytes = 0 if piece.source == OWN else box.volume * itemsize
            if used + nbytes > usable:
                parts.append([])
                used = 0
            parts[-1].append(replace(want, box=box))
            used += nbytes
    return parts
