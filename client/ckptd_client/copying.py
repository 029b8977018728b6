"""Bytes from tensors into mapped memory: memmoves without the GIL, cut so that they can be stopped (design D6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ckptd_client import libc
from ckptd_client.dtypes import as_bits
from ckptd_client.entries import Owner
from ckptd_client.segments import bytes_tensor

CHUNK_BYTES = 8 * 1024 * 1024  # about a millisecond: how long a cancelled capture may still run


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """``source``: this rank's box, detached; it keeps its storage alive. ``target``: address in the slot."""

    key: str
    owner: Owner
    source: Tensor
    target: int
    nbytes: int
    fragment: int

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(begin, length); a source that is not contiguous goes in one piece."""
        if not self.source.is_contiguous():
            yield 0, self.nbytes
            return
        for begin in range(0, self.nbytes, CHUNK_BYTES):
            yield begin, min(CHUNK_BYTES, self.nbytes - begin)

    def run(self, begin: int, length: int) -> None:
        if self.source.is_contiguous():
            libc.copy(self.target + begin, self.source.data_ptr() + begin, length)
        else:
            self.target_tensor().copy_(as_bits(self.source))

    def run_at_once(self) -> None:
        """In the caller's thread with torch's threads to help: for what must be copied before snapshot() returns."""
        if self.nbytes <= CHUNK_BYTES and self.source.is_contiguous():
            libc.copy(self.target, self.source.data_ptr(), self.nbytes)
        else:
            self.target_tensor().copy_(as_bits(self.source))

    def target_tensor(self) -> Tensor:
        bits = as_bits(self.source)
        return bytes_tensor(self.target, self.nbytes).view(bits.dtype).view(self.source.shape)

    def differs(self, begin: int, length: int) -> bool:
        """Does the slot hold other bytes than the source has now? (audit)"""
        if not self.source.is_contiguous():
            return not torch.equal(self.target_tensor().to(self.source.device), as_bits(self.source))
        if self.source.device.type == "cpu":
            return libc.differ(self.target + begin, self.source.data_ptr() + begin, length)
        now = self.source.view(-1).view(torch.uint8)[begin : begin + length]
        return not torch.equal(bytes_tensor(self.target + begin, length).to(now.device), now)

    def difference(self) -> Tensor:
        """The same of all of it, as a bool on the source's device, for which the host does not wait."""
        now, slot = as_bits(self.source), self.target_tensor()
        if not now.is_contiguous():
            return torch.ne(slot.to(now.device, non_blocking=True), now).any()
        now, slot = now.view(-1), slot.view(-1)
        found = torch.zeros((), dtype=torch.bool, device=now.device)
        for begin in range(0, now.numel(), CHUNK_BYTES):  # so that little memory of the device is taken
            part = slice(begin, begin + CHUNK_BYTES)
            found |= torch.ne(slot[part].to(now.device, non_blocking=True), now[part]).any()
        return found
