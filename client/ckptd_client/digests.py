"""Few numbers of a device's tensor, made there: whether it was written in between is told without its bytes (design D6)."""

from __future__ import annotations

import torch
from torch import Tensor

from ckptd_client.dtypes import as_bits

CHUNK_ITEMS = 2 * 1024**2  # room on the device meanwhile: 16 bytes of each


def digest(tensor: Tensor) -> Tensor:
    """int64 [chunks, 2] on its device, for which the host does not wait: a sum of its elements' bits, and one in which each
    place has another weight."""
    bits = as_bits(tensor)
    flat = bits.reshape(-1) if bits.is_contiguous() else bits.contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    found = []
    weights = torch.arange(1, min(CHUNK_ITEMS, max(1, flat.numel())) + 1, device=flat.device)
    for at in range(0, flat.numel(), CHUNK_ITEMS):
        part = flat[at : at + CHUNK_ITEMS].to(torch.int64)
        found.append(torch.stack([part.sum(), (part * weights[: part.numel()]).sum()]))
    return torch.stack(found) if found else torch.zeros(1, 2, dtype=torch.int64, device=flat.device)


def differing(one: Tensor, other: Tensor) -> Tensor:
    """A bool on the device."""
    return torch.ne(one, other).any()
