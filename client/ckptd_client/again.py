"""What the newest snapshot captured, for a second call under the same step: it is the same snapshot, or is refused in words (P15).

Nothing is held but counters, places and hashes. A write that none of them shows (through ``.data``, or by a kernel of one's own) is
not seen here either. Random generators do not count: an evaluation draws from them, and the snapshot is none the worse for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ckptd.core.state_map.catalogue import META
from ckptd_client import gradients, naming, resolve, rng
from ckptd_client.entries import Entry
from ckptd_client.registry import Registry
from ckptd_client.versions import Seen

APART = (rng.NAME, META)  # objects that are no state of what is registered


@dataclass(frozen=True)
class Look:
    """At everything registered, at one moment. ``objects``: hashes by name, of large tensors inside of them where these lie."""

    seen: Seen
    objects: dict[str, int]

    def other_in(self, now: Look) -> list[str]:
        """Names of what is another one ``now``, or is only in one of the two."""
        names = dict.fromkeys((*self.objects, *now.objects))
        objects = [name for name in names if self.objects.get(name) != now.objects.get(name)]
        return list(dict.fromkeys((*self.seen.other_in(now.seen), *now.seen.other_in(self.seen), *objects)))


@dataclass(frozen=True)
class Captured:
    """``meta``: as encoded."""

    step: int
    meta: bytes
    look: Look

    def lacks(self, meta: bytes | None) -> list[str]:
        """Was there another ``meta`` in the first call?"""
        return ["meta="] * (meta is not None and meta != self.meta)


def look_at(registry: Registry) -> Look:
    """A full look. Raises what a snapshot fails with."""
    state = resolve.tensors(registry)
    state.entries += gradients.entries(state)
    hanging = len(state.entries)
    resolve.objects(registry, state, 0, {})
    keys, tensors = [entry.key for entry in state.entries], [entry.tensor for entry in state.entries]
    sharded = [at for at, tensor in enumerate(tensors[:hanging]) if naming.is_dtensor(tensor)]
    placed = [at for at, entry in enumerate(state.entries[:hanging]) if entry.role != "optim"]
    seen = Seen(keys[:hanging], tensors[:hanging], sharded, placed)
    return Look(seen, hashes(state.objects, state.entries[hanging:]))


def hashes(objects: Mapping[str, bytes], inside: Iterable[Entry]) -> dict[str, int]:
    """``inside``: the large tensors in them, each time another tensor of the same memory."""
    found = {name: hash(packed) for name, packed in objects.items() if name not in APART}
    for entry in inside:
        local = naming.local_of(entry.tensor)
        plain = type(local) is torch.Tensor and local.layout == torch.strided
        counter = -1 if local.is_inference() else local._version
        found[entry.key] = hash((counter, local.data_ptr() if plain else 0))
    return found
