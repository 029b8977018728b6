"""Values that turn out to be each rank's own, told to a rank as soon as a snapshot shows it (design D7, D18).

Else nobody would hear of them before a restore into a world of another size, which is refused without a rule for them. The steward
finds them, so its node tells: what one rank has in its log is enough for a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckptd.wire.rank import OWN_VALUES, Health

if TYPE_CHECKING:
    from ckptd.daemon.local_slots import LocalSlots

KEYS_TOLD_MAX, BYTES_TOLD_MAX = 512, 32 * 1024  # in one frame; the others follow with the next snapshots
TENSOR = "t:"  # what a key begins with; an object has a method that divides it, or none, and takes no rule


def tell_own_values(all_slots: LocalSlots, names: Iterable[str]) -> None:
    """``names``: "t:key" and "o:name" that differed in a snapshot. The lowest rank of this node hears of each key once, and again
    when it joins anew; nobody in its place when it has left, as the end of a job is no time for that."""
    tensors = [name for name in names if name.startswith(TENSOR)]
    here = [rank for rank, own in all_slots.by_rank.items() if not own.left]
    own = all_slots.by_rank[min(here)] if here and tensors else None
    if own is not None and own.session is not None:
        new = list(_fitting(name for name in tensors if name not in own.told_own))
        if new and own.session.send(Health(0, True, [], {OWN_VALUES: [name[len(TENSOR) :] for name in new]})):
            own.told_own.update(new)


def _fitting(names: Iterable[str]) -> Iterator[str]:
    """As many as a frame has room for; the first one always fits."""
    room = BYTES_TOLD_MAX
    for number, name in enumerate(names):
        room -= len(name.encode())
        if number == KEYS_TOLD_MAX or room < 0:
            return
        yield name
