"""The load plan, part by part, into the registered tensors; most restores have one part (design D11).

Whatever can be refused is looked at before the first registered tensor changes: the values that are only compared or that lie
inside of objects come first, into memory of their own, and the objects are decoded with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.core.errors import CkptdError
from ckptd.core.grouped import grouped
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.pieces import Loads, Placed
from ckptd_client import pooled
from ckptd_client.apply import Objects
from ckptd_client.load import Memory, copy_pieces, unequal
from ckptd_client.wants import Wanted

Decode = Callable[[dict[str, Any], Memory], Objects]
UNTIE = "untie them until after restore(), as they were when the snapshot was taken, or say with only= whose value counts"


class Loading:
    """``decode``: the plan's objects, checked. ``dirty``: registered tensors were written to. ``objects``: there when
    everything before the first write was found good."""

    def __init__(self, wanted: Wanted, decode: Decode, *, dirty: bool = False) -> None:
        self._targets, self._pooled, self._decode = wanted.targets, wanted.pooled, decode
        self._aside = wanted.first
        self._loads = Loads([(target.box, ITEMSIZE[target.dtype]) for target in wanted.targets])
        self._part = 0
        self.objects: Objects | None = None
        self.dirty = dirty
        self.mode = "verified"
        self.bytes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.load_s = 0.0

    def take(self, plan: dict[str, Any], memory: Memory) -> bool:
        """Copy one part out of ``memory``. True when it was the last. Raises CkptdError."""
        pieces, last = Placed.decode(plan["pieces"]), bool(plan.get("last", True))
        if plan.get("part", 0) != self._part:
            raise CkptdError(f"load plan: part {plan.get('part')} came instead of part {self._part}")
        self._part += 1
        self._loads.check(pieces, memory.sizes)
        if last:
            self._require(len(self._targets))
        copy_pieces(self._targets, self._loads, pieces.take(pieces.want < self._aside), memory)
        rest = pieces.take(pieces.want >= self._aside)
        if last or len(rest):
            self._admit(plan, memory)
            self.dirty = True
            copy_pieces(self._targets, self._loads, rest, memory)
        self._note(plan)
        return last

    def _require(self, count: int) -> None:
        """All of the first so many targets have come."""
        lacking = self._loads.lacking(count)
        if lacking is not None:
            target, missing = self._targets[lacking[0]], lacking[1]
            raise CkptdError(
                f"load plan brings {target.box.volume - missing} of {target.box.volume} elements", where=target.key
            )

    def _admit(self, plan: dict[str, Any], memory: Memory) -> None:
        """Before the first write, once."""
        if self.objects is not None:
            return
        self._require(self._aside)
        problems = unequal(self._targets)
        differing = pooled.unequal(self._pooled)
        if differing:
            raise CkptdError(grouped(differing), hint=pooled.REMEDY)
        if problems:
            raise CkptdError(grouped(problems), hint=UNTIE)
        self.objects = self._decode(plan, memory)

    def _note(self, plan: dict[str, Any]) -> None:
        self.mode = str(plan.get("mode", self.mode))
        self.seconds = dict(plan.get("seconds", {}))
        for source, nbytes in plan.get("bytes", {}).items():
            self.bytes[source] = self.bytes.get(source, 0) + nbytes
