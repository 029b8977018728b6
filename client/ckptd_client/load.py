"""From the load plan's pieces in mapped memory to tensors, bit by bit (design D11)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.pieces import Loads, Placed
from ckptd_client import accelerator, dtypes, libc
from ckptd_client.segments import Segment, bytes_tensor
from ckptd_client.wants import Target

SMALL_BYTES_MAX = 16 * 1024
AT_ONCE = 4096  # moves of small ones: a millisecond, in which no other thread runs
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

    @property
    def addresses(self) -> list[int]:
        return [address for address, _ in self._maps]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self._maps]

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


def copy_pieces(targets: Sequence[Target], loads: Loads, pieces: Placed, memory: Memory) -> None:
    """Write the pieces, which were checked, into their tensors, bit by bit. Nearly all go by moves of bytes, thousands in one call,
    since as many small tensors would take longer by any other way."""
    starts = [0] * len(targets)
    moved: list[Tensor] = []
    for want in set(pieces.want.tolist()):
        dest = targets[want].dest
        if dest.is_cpu and dest.is_contiguous() and not (dest.is_conj() or dest.is_neg()):
            starts[want] = dest.data_ptr()
            moved.append(dest)
    moves, others = loads.moves(pieces, starts, memory.addresses)
    devices: dict[torch.device, Callable[[Tensor, Tensor], object]] = {}
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(torch.autograd.graph.increment_version, moved)  # also of what was moved before something failed
        small, large = moves[:, moves[2] <= SMALL_BYTES_MAX], moves[:, moves[2] > SMALL_BYTES_MAX]
        for first in range(0, len(small[0]), AT_ONCE):
            libc.copy_all(*small[:, first : first + AT_ONCE].tolist())
        for move in large.T.tolist():
            libc.copy(*move)
        for want, (box, stored), segment, at in others:
            target = targets[want]
            source = _narrow(_source(target, memory, segment, at, stored.sizes), box, stored.offsets)
            dest = _narrow(_dest(target), box, target.box.offsets)
            if dest.device.type in accelerator.WITHOUT_MEMORY:
                dest.copy_(source)
                continue
            if dest.device not in devices:
                devices[dest.device] = stack.enter_context(accelerator.of(dest.device).bringing())
            devices[dest.device](source, dest)


def _source(target: Target, memory: Memory, segment: int, at: int, sizes: Sequence[int]) -> Tensor:
    nbytes = Box((0,) * len(sizes), tuple(sizes)).volume * dtypes.TORCH[target.dtype].itemsize
    data = bytes_tensor(memory.at(segment, at, nbytes), nbytes)
    return data.view(dtypes.as_bits(target.dest).dtype).view(tuple(sizes))


def _dest(target: Target) -> Tensor:
    dest = dtypes.as_bits(target.dest)
    return dest.unsqueeze(0) if dest.dim() < len(target.box.sizes) else dest  # a stacked Partial


def _narrow(tensor: Tensor, box: Box, base: Sequence[int]) -> Tensor:
    for dim, (offset, size, start) in enumerate(zip(*box, base, strict=True)):
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
