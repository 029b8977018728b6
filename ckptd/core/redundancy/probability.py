"""How likely a snapshot survives when k units (nodes, or whole failure domains) are lost at once, all k-subsets alike.

GEMINI (SOSP '23, section 4) bounds it from below by the union bound of corollary 1, which counts a loss that kills two
groups twice. Here it is exact: sets of nodes that share no node fail independently of each other once the number of
losses in each is fixed, so the surviving subsets of each connected part are counted alone (for one group in closed form,
for overlapping ones by enumeration) and their generating functions multiplied, which for equal groups is inclusion and
exclusion. Where a part is too large for that, random subsets are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

SUBSETS_MAX = 200_000  # of one connected part are enumerated: about a second
TRIALS = 20_000  # random subsets otherwise: the interval is at most 0.014 wide
Z95 = 1.959964  # standard normal quantile of a two-sided 95 % interval

Sample = Callable[[int, int], Iterable[int]]  # (n, k) -> k different numbers below n, each k-subset alike


@dataclass(frozen=True, slots=True)
class Fatal:
    """Something is lost as soon as more than ``survives`` of ``members`` are."""

    members: tuple[str, ...]
    survives: int


@dataclass(frozen=True, slots=True)
class Chance:
    """Probability of recovery after ``losses`` simultaneous losses; ``low`` to ``high`` holds it (equal when ``exact``,
    else a 95 % Wilson interval of so many ``trials``). ``bound``: GEMINI's, never above it."""

    losses: int
    value: float
    low: float
    high: float
    bound: float
    trials: int = 0

    @property
    def exact(self) -> bool:
        return self.trials == 0


def recovery(
    fatal: Sequence[Fatal], units: Mapping[str, str], losses: int, sample: Sample, trials: int = TRIALS
) -> list[Chance]:
    """Chances for 1..losses units. units: node -> the unit it is lost with (itself, or its failure domain)."""
    names = list(dict.fromkeys(units.values()))
    most = min(losses, len(names))
    weighted = _in_units(fatal, units, names)
    bounds = [_bound(weighted, len(names), k) for k in range(most + 1)]
    survivors = _survivors(weighted, len(names), most)
    result = []
    for k in range(1, most + 1):
        if k < len(survivors):
            exact = survivors[k] / math.comb(len(names), k)
            result.append(Chance(k, exact, exact, exact, bounds[k]))
        else:
            alive = _trials(weighted, len(names), k, sample, trials)
            result.append(Chance(k, alive / trials, *wilson(alive, trials), bounds[k], trials))
    return result


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927); it also holds near 0 and 1, where recovery probabilities lie."""
    share, z2 = hits / trials, Z95 * Z95 / trials
    middle = share + z2 / 2
    half = Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


# --- sets in units -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Set:
    weights: tuple[tuple[int, int], ...]  # (unit, members in it)
    survives: int


def _in_units(fatal: Iterable[Fatal], units: Mapping[str, str], names: Sequence[str]) -> list[_Set]:
    number = {name: at for at, name in enumerate(names)}
    result: dict[_Set, None] = {}
    for one in fatal:
        weights: dict[int, int] = {}
        for member in one.members:
            unit = number[units[member]]
            weights[unit] = weights.get(unit, 0) + 1
        if len(one.members) > one.survives:
            result[_Set(tuple(sorted(weights.items())), one.survives)] = None
    return list(result)


def _bound(sets: Iterable[_Set], count: int, k: int) -> float:
    """Corollary 1: one minus the sum over all sets of the chance that this one is lost."""
    lost = 0
    ways = math.comb(count, k)
    for one in sets:
        alive = _alive(tuple(sorted(weight for _, weight in one.weights)), one.survives)
        rest = count - len(one.weights)
        lost += ways - sum(n * math.comb(rest, k - j) for j, n in enumerate(alive) if j <= k)
    return max(0.0, 1 - lost / ways)


@lru_cache(maxsize=1024)
def _alive(weights: tuple[int, ...], survives: int) -> tuple[int, ...]:
    """For each j the number of j-subsets of the weights whose sum is at most ``survives``."""
    if set(weights) <= {1}:
        return tuple(math.comb(len(weights), j) for j in range(min(survives, len(weights)) + 1))
    table = {(0, 0): 1}  # (how many, their sum) -> ways
    for weight in weights:
        more = dict(table)
        for (j, total), ways in table.items():
            if total + weight <= survives:
                more[j + 1, total + weight] = more.get((j + 1, total + weight), 0) + ways
        table = more
    most = max(j for j, _ in table)
    return tuple(sum(ways for (j, _), ways in table.items() if j == at) for at in range(most + 1))


# --- exactly -----------------------------------------------------------------------------------------------------
def _survivors(sets: Sequence[_Set], count: int, most: int) -> list[int]:
    """For k = 0.. the number of k-subsets of all units that leave everything recoverable; as far as it can be counted."""
    parts = _parts(sets)
    for part in parts:
        if len(part) > 1:
            size = len({unit for one in part for unit, _ in one.weights})
            while sum(math.comb(size, j) for j in range(most + 1)) > SUBSETS_MAX:
                most -= 1
    total = [1] + [0] * most
    for part in parts:
        total = _product(total, _of_part(part, most), most)
    free = count - len({unit for one in sets for unit, _ in one.weights})
    return _product(total, [math.comb(free, j) for j in range(most + 1)], most)


def _parts(sets: Sequence[_Set]) -> list[list[_Set]]:
    """Sets that share units, directly or through others, together."""
    parent: dict[int, int] = {}

    def root(unit: int) -> int:
        parent.setdefault(unit, unit)
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    for one in sets:
        first = root(one.weights[0][0])
        for unit, _ in one.weights:
            parent[root(unit)] = first
            first = root(first)
    parts: dict[int, list[_Set]] = {}
    for one in sets:
        parts.setdefault(root(one.weights[0][0]), []).append(one)
    return list(parts.values())


def _of_part(part: list[_Set], most: int) -> Sequence[int]:
    if len(part) == 1:
        return _alive(tuple(sorted(weight for _, weight in part[0].weights)), part[0].survives)
    number = {unit: at for at, unit in enumerate(sorted({unit for one in part for unit, _ in one.weights}))}
    touches: list[list[tuple[int, int]]] = [[] for _ in number]
    for at, one in enumerate(part):
        for unit, weight in one.weights:
            touches[number[unit]].append((at, weight))
    return _enumerated(touches, [one.survives for one in part], most)


def _enumerated(
    touches: Sequence[Sequence[tuple[int, int]]], survives: Sequence[int], most: int
) -> list[int]:
    """Depth first over the units; what is lost already stays lost whatever else is, so nothing below it is looked at."""
    counts, left = [0] * (most + 1), list(survives)

    def descend(at: int, chosen: int) -> None:
        counts[chosen] += 1
        if chosen == most:
            return
        for unit in range(at, len(touches)):
            for number, weight in touches[unit]:
                left[number] -= weight
            if all(left[number] >= 0 for number, _ in touches[unit]):
                descend(unit + 1, chosen + 1)
            for number, weight in touches[unit]:
                left[number] += weight

    descend(0, 0)
    return counts


def _product(a: Sequence[int], b: Sequence[int], most: int) -> list[int]:
    return [
        sum(a[i] * b[k - i] for i in range(max(0, k - len(b) + 1), min(k, len(a) - 1) + 1))
        for k in range(most + 1)
    ]


# --- by chance ---------------------------------------------------------------------------------------------------
def _trials(sets: Sequence[_Set], count: int, k: int, sample: Sample, trials: int) -> int:
    """How many of so many random k-subsets leave everything recoverable."""
    touches: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for at, one in enumerate(sets):
        for unit, weight in one.weights:
            touches[unit].append((at, weight))
    alive = 0
    for _ in range(trials):
        lost: dict[int, int] = {}
        for unit in sample(count, k):
            for at, weight in touches[unit]:
                lost[at] = lost.get(at, 0) + weight
        alive += all(total <= sets[at].survives for at, total in lost.items())
    return alive
