"""How layers that are parallel by hand cut their tensors: the rule language (design D18).

A rule says how a logical tensor became what each rank holds: a list of cuts, outermost first. What torch itself has cut needs
none. Numbers count elements of the logical tensor; ``over`` is a dimension's name of the mesh that was registered, a mesh of one
dimension, or a process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptd.core.errors import CkptdError
from ckptd_client.runs import Run, joined, within

EVEN = "even"
HOW = ("mean", "sum", "max", "first", "same")
Widths = str | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Axis:
    """Ranks side by side, of which this one is number ``at``."""

    ranks: tuple[int, ...]
    at: int


Axes = Callable[[Any], Axis]


@dataclass(frozen=True)
class Shard:
    dim: int
    over: Any
    parts: tuple[int, ...] | None = None
    widths: Any = None
    unit: int = 1
    order: tuple[tuple[int, ...], ...] | None = None

    def before(self, size: int, axis: Axis) -> int:
        """The dimension's size before this cut, of which this rank has ``size``."""
        if self.order is not None:
            return self.unit * sum(map(len, self.order))
        if self.parts is not None:
            return sum(self.parts)
        return size * len(axis.ranks) if self.widths in (None, EVEN) else sum(map(sum, self._rows(axis, 0)))

    def cut(self, size: int, axis: Axis) -> list[Run]:
        """What this rank has of that dimension. Raises ValueError: these numbers are of no such cut."""
        if self.order is not None:
            return joined((index * self.unit, self.unit) for index in self.order[axis.at])
        parts = (size,) if self.parts is None else self.parts
        rows, begin, found = self._rows(axis, size), 0, []
        for part, row in zip(parts, rows, strict=True):
            if sum(row) != part:
                raise ValueError(f"widths {list(row)} of a part of {part}")
            found.append((begin + sum(row[: axis.at]), row[axis.at]))
            begin += part
        return joined(run for run in found if run[1])

    def _rows(self, axis: Axis, size: int) -> list[Sequence[int]]:
        """Of each part what each rank has."""
        if self.widths not in (None, EVEN):
            rows = [self.widths] if self.widths and isinstance(self.widths[0], int) else list(self.widths)
            if any(len(row) != len(axis.ranks) for row in rows):
                raise ValueError(f"widths for {len(rows[0])} ranks, and {len(axis.ranks)} have a part each")
            return rows
        return [self._row(part, len(axis.ranks)) for part in ((size,) if self.parts is None else self.parts)]

    def _row(self, part: int, count: int) -> list[int]:
        units, rest = divmod(part, self.unit)
        if rest:
            raise ValueError(f"a part of {part} is no whole number of units of {self.unit}")
        if self.widths == EVEN:
            return [(units // count + (at < units % count)) * self.unit for at in range(count)]
        share = -(-units // count)
        return [max(0, min(share, units - at * share)) * self.unit for at in range(count)]


@dataclass(frozen=True)
class Copied:
    over: Any


@dataclass(frozen=True)
class Padded:
    dim: int
    size: int


@dataclass(frozen=True)
class Own:
    how: str


Cut = Shard | Copied | Padded
Rule = Cut | Sequence[Cut] | Own


def shard(
    dim: int, over: Any, *, parts: Sequence[int] | None = None, widths: Widths | None = None, unit: int = 1,
    order: Sequence[Sequence[int]] | None = None,
) -> Shard:  # fmt: skip
    """Dimension ``dim`` is cut over these ranks, as torch.chunk cuts.

    parts: sizes of what is cut each by itself (fused query, key and value; the two halves of SwiGLU); of one part that does not
    come out even its size. widths: what each rank has of each part, 0 allowed, or "even": one more for the first ranks. unit:
    cuts fall on multiples of it (heads). order: which units each rank has (experts).
    """
    rows = None if order is None else tuple(tuple(map(int, row)) for row in order)
    if unit < 1 or (rows is not None and (parts is not None or widths is not None)):
        raise ValueError("unit is at least 1, and order goes with neither parts nor widths")
    if rows is not None and sorted(index for row in rows for index in row) != list(range(sum(map(len, rows)))):
        raise ValueError("order names each unit once: 0, 1, ... in any order")
    frozen = widths
    if widths is not None and not isinstance(widths, str):
        frozen = tuple(row if isinstance(row, int) else tuple(map(int, row)) for row in widths)  # type: ignore[assignment]
    elif widths not in (None, EVEN):
        raise ValueError(f'widths is a list of numbers or "even", not {widths!r}')
    return Shard(int(dim), over, None if parts is None else tuple(map(int, parts)), frozen, int(unit), rows)


def copied(over: Any) -> Copied:
    """Equal on these ranks; a copy that differs voids the snapshot."""
    return Copied(over)


def padded(dim: int, size: int) -> Padded:
    """Dimension ``dim`` is ``size`` long in truth, and was made longer (a vocabulary that divides): what lies behind is not saved,
    and zero after a restore."""
    return Padded(int(dim), int(size))


def own(how: str) -> Own:
    """Each rank's own value (running statistics, counters), which comes back to its rank; into a world of another size as the mean
    of all (floats, in double precision, in the order of the ranks), their sum (on rank 0, zeros elsewhere), their max, the first
    rank's, or refused unless it was the same on all."""
    if how not in HOW:
        raise ValueError(f"own() takes one of {', '.join(HOW)}, not {how!r}")
    return Own(how)


def numbered(pattern: str, first: int) -> Callable[[str], str]:
    """For key_map=: ``numbered("model.layers.{}", 4)`` calls this stage's layer 0 layer 4, wherever that stands in a key."""
    before, braces, after = pattern.partition("{}")
    if not braces or (after and not after.startswith(".")):
        raise ValueError(f'"layers.{{}}" says where the number is, not {pattern!r}')

    def renamed(key: str) -> str:
        start = key.find(before)
        while start >= 0:
            end = start + len(before)
            digits = key[end:].partition(".")[0]
            rest = key[end + len(digits) :]
            if digits.isdecimal() and (start == 0 or before.startswith(".") or key[start - 1] == ".") and rest.startswith(after):
                return f"{key[:end]}{int(digits) + first}{rest}"
            start = key.find(before, end)
        return key

    return renamed


class Laid(NamedTuple):
    """``runs``: of each dimension what this rank has, in the padded logical tensor. ``cut``, ``copies``: over so many ranks."""

    shape: tuple[int, ...]
    runs: tuple[list[Run], ...]
    cut: int
    copies: int


def laid(key: str, rule: Cut | Sequence[Cut], local: tuple[int, ...], axes: Axes) -> Laid:
    """From what a rank holds, of the shape ``local``, to where it lies. Raises CkptdError naming the key and what does not fit."""
    cuts = list(rule) if isinstance(rule, Iterable) else [rule]
    if any(isinstance(one, Own) for one in cuts):
        raise CkptdError("own() is the only rule of a tensor: what is cut or copied is no rank's own", where=key)
    dims: list[list[tuple[Shard, Axis]]] = [[] for _ in local]
    shards = [(one, axes(one.over)) for one in cuts if isinstance(one, Shard)]
    try:
        for one, axis in shards:
            dims[_dim(one.dim, local)].append((one, axis))
        found = [_runs(size, of) for size, of in zip(local, dims, strict=True)]
        shape = [size for size, _ in found]
        for pad in (one for one in cuts if isinstance(one, Padded)):
            at = _dim(pad.dim, local)
            if pad.size > shape[at]:
                raise ValueError(f"padded to {shape[at]} in dimension {at}, which is {pad.size} long in truth")
            shape[at] = pad.size
    except ValueError as error:
        raise CkptdError(
            f"its rule does not fit a tensor of shape {list(local)}: {error}", where=key,
            hint="parts=(size,) says the whole size of a dimension that does not come out even",
        ) from error  # fmt: skip
    cut = math.prod(len(axis.ranks) for _, axis in shards)
    copies = math.prod(len(axes(one.over).ranks) for one in cuts if isinstance(one, Copied))
    return Laid(tuple(shape), tuple(runs for _, runs in found), cut, copies)


def _dim(dim: int, local: tuple[int, ...]) -> int:
    if not -len(local) <= dim < len(local):
        raise ValueError(f"there is no dimension {dim}")
    return dim % len(local)


def _runs(local: int, cuts: Sequence[tuple[Shard, Axis]]) -> tuple[int, list[Run]]:
    """(size of the logical dimension, what this rank has of it)."""
    size = local
    for one, axis in reversed(cuts):
        size = one.before(size, axis)
    runs: list[Run] = [(0, size)] if size else []
    for one, axis in cuts:
        runs = within(runs, one.cut(sum(length for _, length in runs), axis))
    have = sum(length for _, length in runs)
    if have != local:
        raise ValueError(f"this rank should have {have} of a dimension of {size}, and has {local}")
    return size, runs


def check_rules(rules: Mapping[str, Any]) -> None:
    """Raises CkptdError naming the pattern of what is no rule."""
    for pattern, rule in rules.items():
        cuts = list(rule) if isinstance(rule, Sequence) and not isinstance(rule, str) else [rule]
        if not cuts or not all(isinstance(one, Shard | Copied | Padded | Own) for one in cuts):
            said = "the function own" if rule is own else f"{rule!r}"
            hint = 'own("mean"), shard(0, over="tp"), copied("tp"), padded(0, size), or a list of the last three'
            raise CkptdError(f"{said} is no rule", where=pattern, hint=hint)


def text_of(rule: Rule) -> str:
    """As it was written, the same on all ranks: of groups and meshes only what they are."""
    if isinstance(rule, Own):
        return f'own("{rule.how}")'
    return " ".join(map(_text, rule if isinstance(rule, Iterable) else [rule]))


def _text(cut: Cut) -> str:
    if isinstance(cut, Padded):
        return f"padded({cut.dim}, {cut.size})"
    over = f'"{cut.over}"' if isinstance(cut.over, str) else type(cut.over).__name__
    if isinstance(cut, Copied):
        return f"copied({over})"
    told = {"parts": cut.parts, "widths": cut.widths, "unit": cut.unit if cut.unit > 1 else None, "order": cut.order}
    return f"shard({cut.dim}, {over}{''.join(f', {name}={value}' for name, value in told.items() if value is not None)})"


def rule_of(key: str, rules: Mapping[str, Rule], matches: Callable[[str, Sequence[str]], bool]) -> Rule | None:
    """Raises CkptdError: two patterns that fit say different things."""
    fitting = [pattern for pattern in rules if matches(key, [pattern])]
    if len({repr(rules[pattern]) for pattern in fitting}) > 1:
        raise CkptdError(f"two rules for it: {' and '.join(map(repr, fitting))}", where=key)
    return rules[fitting[0]] if fitting else None
