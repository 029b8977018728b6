"""From a plan's sources to copies: what cannot wait is copied here and now, the rest is the capture's work (design D6)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import and_, attrgetter, not_
from typing import Any

from torch import Tensor

from ckptd_client import device, libc
from ckptd_client.copying import Copy
from ckptd_client.entries import Mode
from ckptd_client.job import Job
from ckptd_client.plan import AT_ONCE, Source
from ckptd_client.races import LARGE_BYTES, Races
from ckptd_client.statics import Statics, mark_of

_on_cpu = attrgetter("is_cpu")


def gather(tensors: Sequence[Tensor], job: Job, statics: Statics, races: Races) -> None:
    """Fill the job. ``tensors``: what each entry of the plan is now, plain or DTensor. Raises CkptdError naming what another
    thread goes on writing."""
    noted = races.begin(job.plan, tensors)
    early: list[Copy] = []
    late: list[Copy] = []
    large: list[tuple[int, Copy]] = []
    address = job.slot.address
    frozen = 0 if job.frozen is None else job.frozen.address - job.plan.layout.frozen_at
    proven = job.frozen is not None and statics.trusts(job.frozen)
    for source in _copy_small(job, tensors):
        local = local_tensor(source, tensors)
        copy = _copy_of(source, local, frozen if source.mode is Mode.STATIC else address)
        if not copy.source.is_cpu:
            _sort(copy, tensors[source.entry], source.mode, job, proven, late, early)
        elif source.mode in (Mode.FENCED, Mode.STATIC):
            _sort(copy, tensors[source.entry], source.mode, job, proven, job.copies, [])
        else:
            copy.run_at_once()
            if copy.nbytes >= LARGE_BYTES:
                large.append((source.entry, copy))
    races.end(noted, tensors, large, lambda entries: _again(entries, tensors, job))
    held = [copy for copy in job.held if not copy.source.is_cpu]
    unproven = [copy for copy, _, _ in job.unproven if not copy.source.is_cpu]
    job.device = device.Batch.of(early, late, held, job.slots, late if job.audit else (), unproven)


def _copy_small(job: Job, tensors: Sequence[Tensor]) -> list[Source]:
    """What is left to copy: all that is not small, or lies on a device, or is not contiguous."""
    small = job.plan.small
    found = [tensors[entry] for entry in small.entries]
    for at in small.sharded:
        found[at] = found[at]._local_tensor  # type: ignore[attr-defined]
    here = list(map(and_, map(_on_cpu, found), map(Tensor.is_contiguous, found)))
    targets = [job.slot.address + offset for offset in small.offsets]
    libc.copy_all(compress(targets, here), map(Tensor.data_ptr, compress(found, here)), compress(small.nbytes, here))
    if all(here):
        return small.others
    return sorted((*small.others, *compress(small.sources, map(not_, here))), key=attrgetter("offset"))


def _again(entries: Collection[int], tensors: Sequence[Tensor], job: Job) -> list[tuple[int, Copy]]:
    """What is copied at once of these, once more."""
    copied = [
        (source.entry, _copy_of(source, local_tensor(source, tensors), job.slot.address))
        for source in job.plan.sources
        if source.entry in entries and source.mode in AT_ONCE
    ]
    for _, copy in copied:
        copy.run_at_once()
    return copied


def local_tensor(source: Source, tensors: Sequence[Tensor]) -> Tensor:
    """What this rank has of it."""
    tensor: Any = tensors[source.entry]
    local: Tensor = tensor._local_tensor if source.sharded else tensor
    return local


def _copy_of(source: Source, local: Tensor, address: int) -> Copy:
    """Detached: it keeps the storage alive even when ``.data`` is replaced meanwhile."""
    box = local.detach() if source.whole else source.part.view(local.detach())
    return Copy(source.key, source.owner, box, address + source.offset, source.nbytes, source.fragment)


def _sort(
    copy: Copy, tensor: Tensor, mode: Mode, job: Job, proven: bool, later: list[Copy], now: list[Copy]
) -> None:
    if mode is Mode.FENCED:
        job.fenced.append(copy)
        later.append(copy)
    elif mode is Mode.STATIC and job.fills:
        job.static.append((copy, tensor, mark_of(tensor, copy.source)))
        later.append(copy)
    elif mode is Mode.STATIC and proven:
        job.held.append(copy)
    elif mode is Mode.STATIC:
        job.unproven.append((copy, tensor, mark_of(tensor, copy.source)))
    else:
        now.append(copy)
