"""Values that each rank had for itself (running statistics, counters), into a world of another size (design D18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ckptd_client import dtypes
from ckptd_client.catalogue import Catalogue
from ckptd_client.entries import Owner, matches
from ckptd_client.rules import Own, rule_of

REMEDY = 'restore(rules={pattern: own("mean")}), or "first", "max", "sum"'
FIRST, MEAN, SUM, MAX, SAME = "first", "mean", "sum", "max", "same"


class Pooled(NamedTuple):
    """``values``: of the ranks that had one, in their order, or of the first alone. ``dest``: what becomes of them, here."""

    key: str
    how: str
    values: list[Tensor]
    dest: Tensor

    @staticmethod
    def of(key: str, how: str, owners: Sequence[int], like: Tensor, dest: Tensor) -> Pooled:
        """With room for what these ranks had."""
        return Pooled(key, how, [torch.empty_like(like) for _ in (owners[:1] if how == FIRST else owners)], dest)


def rule_for(keys: Sequence[str], owner: Owner, rules: Mapping[str, Own]) -> Own | None:
    """Of the first of these keys that one fits: what restore() was told, else register(). Raises CkptdError: two say different
    things."""
    for of in (rules, owner.rules):
        for key in keys:
            found = rule_of(key, of, matches)
            if isinstance(found, Own):
                return found
    return None


def cannot(how: str, dtype: torch.dtype, catalogue: Catalogue, source: str, *, here: bool, alike: bool) -> str:
    """Why this cannot be made of these values; "": it can. ``here``: this rank has the tensor whole. ``alike``: all ranks
    registered the same names."""
    if not catalogue.owners_of(source):
        return "this daemon is older and brings no other rank's"
    if source in catalogue.odd:
        return "the ranks' own values differ in shape or kind"
    if not here:
        return "own() is for what a rank has whole, and this is cut here"
    if how == SUM and not alike:
        return 'own("sum") goes to rank 0, and the ranks registered different names here'
    if how == MEAN and not dtype.is_floating_point:
        return f'there is no mean of {dtypes.NAME.get(dtype, str(dtype))}: own("first"), "max" or "sum"'
    if how in (MAX, SUM) and (dtype.is_complex or (how == SUM and dtype == torch.bool)):
        return f'{dtypes.NAME.get(dtype, str(dtype))} have no {how}: own("first")'
    return ""


def unequal(several: Sequence[Pooled]) -> list[str]:
    """Those that were to be the same, and are not. Call it when all values have come."""
    found = []
    for key, how, values, _ in several:
        bits = [dtypes.as_bits(value) for value in values]
        if how == SAME and not all(torch.equal(bits[0], other) for other in bits[1:]):
            found.append(f'{key}: own("same"), and the ranks had different values')
    return found


def give(several: Sequence[Pooled], rank: int) -> None:
    """Write what becomes of them. A sum goes to rank 0, the others have zeros, so that the sum over ranks stays what it was."""
    with torch.no_grad():
        for _, how, values, dest in several:
            if how == SUM and rank != 0:
                dest.zero_()
            else:
                dest.copy_(_made(how, values))


def _made(how: str, values: Sequence[Tensor]) -> Tensor:
    """In the order of the ranks, and in double precision, where numbers are added: the same on all ranks."""
    made = values[0]
    if how in (MEAN, SUM):
        wide = torch.float64 if made.is_floating_point() else torch.int64
        made = made.to(wide)
        for value in values[1:]:
            made = made + value.to(wide)
        made = made / len(values) if how == MEAN else made
    elif how == MAX:
        for value in values[1:]:
            made = torch.maximum(made, value)
    return made
