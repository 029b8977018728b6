"""Some bytes of each frozen tensor, looked at again at every snapshot (design D6).

A write through ``.data`` or numpy moves no version counter. One of a whole tensor changes its samples, and so does one of
``1/each`` of it in one piece; a smaller one may pass between them, and is for the audit to find.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ckptd_client.copying import Copy
from ckptd_client.dtypes import as_bits

SAMPLE_BYTES = 64
# At one snapshot, of all tensors together, unless there are more tensors than that: each has one. Three of each of 10,000 tensors
# are read in 1.5 ms, or in 6 when training has filled the caches with other things.
SAMPLES_MAX = 32_768
OF_A_TENSOR_MAX = 64


def each_of(tensors: int) -> int:
    """How many samples each of so many tensors has."""
    return max(1, min(OF_A_TENSOR_MAX, SAMPLES_MAX // max(1, tensors)))


class Samples:
    """Of these boxes, where they lie now; of one on a device nothing. Valid while their storages are where they were."""

    def __init__(self, boxes: Sequence[Tensor]) -> None:
        each = each_of(len(boxes))
        of_each = [_runs(box, each) if box.is_cpu else [] for box in boxes]
        self._runs = [run for runs in of_each for run in runs]
        sizes = (sum(map(ctypes.sizeof, runs)) for runs in of_each)
        self._spans = list(itertools.pairwise([0, *itertools.accumulate(sizes)]))

    def read(self) -> bytes:
        """Of all boxes, one behind the other: twenty times as quick as one by one."""
        return b"".join(self._runs)

    def differing(self, then: bytes, now: bytes) -> list[int]:
        """Of which boxes."""
        if then == now:
            return []
        return [i for i, (begin, end) in enumerate(self._spans) if then[begin:end] != now[begin:end]]


def _runs(box: Tensor, each: int) -> list[Any]:
    address, size = box.data_ptr(), box.element_size()
    if box.is_contiguous():
        run = ctypes.c_char * min(SAMPLE_BYTES, box.nbytes)
        return [run.from_address(address + at) for at in _spread(box.nbytes - ctypes.sizeof(run), each)]
    element = ctypes.c_char * size
    return [element.from_address(address + size * _offset(box, at)) for at in _spread(box.numel() - 1, each)]


def _spread(last: int, each: int) -> list[int]:
    """From 0 to ``last``."""
    return [last * index // max(1, each - 1) for index in range(each)]


def _offset(box: Tensor, index: int) -> int:
    """In elements, of the one with this number in the order of the dimensions."""
    offset = 0
    for size, stride in zip(reversed(box.shape), reversed(box.stride()), strict=True):
        index, at = divmod(index, size)
        offset += at * stride
    return offset


class OnDevice:
    """The same of tensors on one device: compared there with the slot, which has them already. The host waits for nothing."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        """Brings the slot's samples to the device."""
        by_type: dict[torch.dtype, list[Copy]] = {}
        for copy in copies:
            by_type.setdefault(copy.source.dtype, []).append(copy)
        self._each = each_of(len(copies))
        self._groups = list(by_type.values())
        self._then = [self._picked([copy.target_tensor() for copy in group]) for group in self._groups]
        devices = [group[0].source.device for group in self._groups]
        self._then = [then.to(device, non_blocking=True) for then, device in zip(self._then, devices, strict=True)]
        self._differ: list[Tensor] = []

    def compare(self) -> None:
        """On the stream that is current."""
        now = [self._picked([as_bits(copy.source) for copy in group]) for group in self._groups]
        self._differ = [then != picked for then, picked in zip(self._then, now, strict=True)]

    def differing(self) -> list[Copy]:
        """Waits for the comparison."""
        found: list[Copy] = []
        for group, differ in zip(self._groups, self._differ, strict=True):
            rows = differ.view(len(group), self._each).any(1).tolist()
            found += [copy for copy, differs in zip(group, rows, strict=True) if differs]
        return found

    def _picked(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([_picked(tensor, self._each) for tensor in tensors])


def _picked(tensor: Tensor, each: int) -> Tensor:
    """The same elements of slot and source, however each lies in memory."""
    step = max(1, (tensor.numel() - 1) // max(1, each - 1))
    if tensor.is_contiguous():
        return tensor.as_strided((each,), (step,))
    offsets = [tensor.storage_offset() + _offset(tensor, step * at) for at in range(each)]
    return torch.stack([tensor.as_strided((), (), offset) for offset in offsets])
