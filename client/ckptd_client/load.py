"""From the load plan's pieces in mapped memory to tensors, bit by bit (design D11)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box, contains
from ckptd_client import accelerator, dtypes, libc
from ckptd_client.segments import Segment, bytes_tensor
from ckptd_client.wants import Target

Known = Callable[[int, int], Segment | None]


class Memory:
    """The plan's segments, mapped for reading while they are copied from. Takes no fd.

    ``known(fd, nbytes)``: the segment, pinned, if this process has that memory mapped already (its own slots): those pages
    are in the page table, a new mapping would fault on each (0.5 of a memcpy's speed against 0.9).
    """

    def __init__(
        self, fds: Sequence[int], sizes: Sequence[int], known: Known = lambda fd, nbytes: None
    ) -> None:
        self._maps: list[tuple[int, int]] = []
        self._borrowed: dict[int, Segment] = {}  # address -> segment of ours
        if len(fds) != len(sizes):
            raise CkptdError(f"load plan names {len(sizes)} segments and brings {len(fds)}")
        for fd, nbytes in zip(fds, sizes, strict=True):
            self._maps.append((self._map(fd, nbytes, known), nbytes))

    def _map(self, fd: int, nbytes: int, known: Known) -> int:
        if not nbytes:
            return 0
        segment = known(fd, nbytes)
        if segment is None:
            return libc.map_readonly(fd, nbytes)
        self._borrowed[segment.address] = segment
        return segment.address

    def at(self, segment: int, offset: int, nbytes: int) -> int:
        """Address of a span. Raises CkptdError outside of the segment."""
        address, size = self._maps[segment]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise CkptdError(f"load plan leaves its segment {segment}")
        return address + offset

    def blob(self, place: Sequence[int]) -> bytes:
        segment, offset, nbytes = place
        return ctypes.string_at(self.at(segment, offset, nbytes), nbytes) if nbytes else b""

    def close(self) -> None:
        for address, nbytes in self._maps:
            if address in self._borrowed:
                self._borrowed.pop(address).unpin()
            elif nbytes:
                libc.unmap(address, nbytes)
        self._maps.clear()


def check_pieces(targets: Sequence[Target], pieces: Iterable[Sequence[Any]], volumes: list[int]) -> None:
    """Every piece inside its target and its source. Adds their elements to ``volumes``. Raises CkptdError."""
    for want, offsets, sizes, _, _, source_offsets, source_sizes in pieces:
        if 0 <= want < len(targets) and _is_whole(targets[want], offsets, sizes, source_offsets, source_sizes):
            volumes[want] += targets[want].box.volume
            continue
        box = Box(tuple(offsets), tuple(sizes))
        source = Box(tuple(source_offsets), tuple(source_sizes))
        if not 0 <= want < len(targets) or not contains(targets[want].box, box) or not contains(source, box):
            raise CkptdError("load plan holds a piece outside of what was wanted")
        volumes[want] += box.volume


def check_volumes(targets: Sequence[Target], volumes: Sequence[int], which: Iterable[int]) -> None:
    """Every target of ``which`` wholly. Raises CkptdError."""
    for index in which:
        target, volume = targets[index], volumes[index]
        if volume != target.box.volume:
            raise CkptdError(f"load plan brings {volume} of {target.box.volume} elements", where=target.key)


def copy_pieces(
    targets: Sequence[Target], pieces: Iterable[Sequence[Any]], memory: Memory, which: set[int]
) -> None:
    """Write the pieces of the targets in ``which`` into their tensors, bit by bit. Most are all of a tensor that lies in memory as
    here: that is a move of bytes, since thousands of small tensors would take longer by any other way."""
    devices: dict[torch.device, Callable[[Tensor, Tensor], object]] = {}
    moved: list[Tensor] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(torch.autograd.graph.increment_version, moved)  # also of what was moved before something failed
        for want, offsets, sizes, segment, at, source_offsets, source_sizes in pieces:
            if want in which:
                target = targets[want]
                dest = target.dest
                if (
                    dest.is_cpu and dest.is_contiguous() and not (dest.is_conj() or dest.is_neg())
                    and _is_whole(target, offsets, sizes, source_offsets, source_sizes)
                ):  # fmt: skip
                    libc.copy(dest.data_ptr(), memory.at(segment, at, dest.nbytes), dest.nbytes)
                    moved.append(dest)
                    continue
                source = _narrow(_source(target, memory, segment, at, source_sizes), offsets, sizes, source_offsets)
                dest = _narrow(_dest(target), offsets, sizes, target.box.offsets)
                if dest.device.type in accelerator.WITHOUT_MEMORY:
                    dest.copy_(source)
                    continue
                if dest.device not in devices:
                    devices[dest.device] = stack.enter_context(accelerator.of(dest.device).bringing())
                devices[dest.device](source, dest)


def _is_whole(
    target: Target, offsets: Sequence[int], sizes: Sequence[int], source_offsets: Sequence[int], source_sizes: Sequence[int]
) -> bool:
    """All that is wanted, stored as a box of its own."""
    box = target.box
    return sizes == box.sizes == source_sizes and offsets == box.offsets == source_offsets


def _source(target: Target, memory: Memory, segment: int, at: int, sizes: Sequence[int]) -> Tensor:
    nbytes = Box((0,) * len(sizes), tuple(sizes)).volume * dtypes.TORCH[target.dtype].itemsize
    data = bytes_tensor(memory.at(segment, at, nbytes), nbytes)
    return data.view(dtypes.as_bits(target.dest).dtype).view(tuple(sizes))


def _dest(target: Target) -> Tensor:
    dest = dtypes.as_bits(target.dest)
    return dest.unsqueeze(0) if dest.dim() < len(target.box.sizes) else dest  # a stacked Partial


def _narrow(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int], base: Sequence[int]) -> Tensor:
    for dim, (offset, size, start) in enumerate(zip(offsets, sizes, base, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def unequal(targets: Sequence[Target]) -> list[str]:
    """Tied tensors for which two different values were saved. Call it when the comparing targets have been copied."""
    found = []
    first: dict[tuple[int, Box], Target] = {}
    for target in targets:
        if target.check is not None:
            other = first.setdefault((target.check.data_ptr(), target.box), target)
            if not torch.equal(dtypes.as_bits(other.dest), dtypes.as_bits(target.dest)):
                found.append(f"{other.key} and {target.key}: tied here, but saved with different values")
    return found
