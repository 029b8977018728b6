"""Who captures what of the state that several ranks hold alike (design D8): only as many copies as protection needs.

Longest processing time first (Graham 1969): the largest item to the ranks with the least so far, within 4/3 of the best.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping, Sequence

import msgpack


def balanced_plan(
    items: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    domain_of: Mapping[int, str],
    copies: int,
    loads: Mapping[int, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """item key -> the ranks that capture it, ascending: ``copies`` of them, in different failure domains.

    items: (key, bytes), every key once; ranks: those that hold all of these items. Fewer copies when ``ranks`` span fewer
    domains. ``loads``: bytes these ranks capture anyway. The same arguments give the same plan on every rank.
    """
    by_domain: dict[str, list[tuple[int, int, int]]] = {}
    for rank in sorted(set(ranks)):
        entry = ((loads or {}).get(rank, 0), 0, rank)
        by_domain.setdefault(domain_of[rank], []).append(entry)
    for heap in by_domain.values():
        heapq.heapify(heap)
    domains = [(heap[0], domain) for domain, heap in by_domain.items()]
    heapq.heapify(domains)
    wanted = min(max(copies, 1), len(domains))
    plan: dict[str, tuple[int, ...]] = {}
    for key, nbytes in sorted(items, key=lambda item: (-item[1], item[0])):
        taken = [heapq.heappop(domains) for _ in range(wanted)]
        plan[key] = tuple(sorted(entry[2] for entry, _ in taken))
        for (load, count, rank), domain in taken:
            heapq.heapreplace(by_domain[domain], (load + nbytes, count + 1, rank))
            heapq.heappush(domains, (by_domain[domain][0], domain))
    return plan


def plan_id(*plans: Mapping[str, Sequence[int]]) -> str:
    """A name for these plans, equal on two ranks exactly when the plans are."""
    rows = [sorted((key, list(ranks)) for key, ranks in plan.items()) for plan in plans]
    return hashlib.blake2b(msgpack.packb(rows), digest_size=16).hexdigest()


def plan_id_apart(common: str, ranks: Sequence[int], own: str) -> str:
    """The id of a plan of which ``own`` is planned by these ranks alone; all ranks of the job share ``common``."""
    return f"{common}|{min(ranks)}:{own}"


def plans_in(plan_id: str) -> Iterator[tuple[str, str]]:
    """(who, plan): what two ranks both name must be the same plan. Who: "" the whole job, else a part of the ranks."""
    for part in plan_id.split("|"):
        who, _, plan = part.rpartition(":")
        yield who, plan
