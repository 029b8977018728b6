"""The newest snapshot that can be restored from what was found, and why newer ones cannot (design D9, D11)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.protocol.messages import HoldingFact, RestoreAsk, Source
from ckptd.core.redundancy.parity_sets import ParitySet, decodable, member_digests
from ckptd.core.redundancy.protection import level, slice_classes
from ckptd.core.state_map.agreement import agree
from ckptd.core.state_map.balance import plans_in
from ckptd.core.state_map.layout import Layout

NOTHING_OF_IT = "memory holds nothing of it"
REASONS_MAX = 8  # missing ranks or slices named per snapshot; the rest is counted


@dataclass(frozen=True)
class Candidate:
    """One restorable snapshot.

    memory: the sources alone hold all of it. durable: a commit may fill gaps.
    per_rank is decided here only when ``memory``; otherwise the manifest says it.
    """

    snapshot: SnapshotId
    memory: bool
    durable: bool
    sources: tuple[Source, ...] = ()
    per_rank: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassedOver:
    """certified: the level someone was told of, -1: none. At 0 or more the snapshot did exist and is lost by now."""

    snapshot: SnapshotId
    reason: str
    certified: int = -1


@dataclass(frozen=True)
class Candidates:
    """passed_over: the newest first, and none that is older than ``best``: of thousands of ranks each one that is judged takes a
    while."""

    best: Candidate | None
    passed_over: tuple[PassedOver, ...]


def find_candidates(
    record: EpochRecord | None,
    holdings: Mapping[str, Sequence[HoldingFact]],
    layouts: Mapping[str, Layout],
    commits: Iterable[SnapshotId] = (),
    certified: Iterable[tuple[SnapshotId, int, bool]] = (),
    ask: RestoreAsk | None = None,
    excluded: Collection[SnapshotId] = (),
) -> Candidates:
    """record: the newest epoch known (None: then only the newest epoch found counts); holdings: node -> what its memory
    holds; layouts: by layout id, decoded; commits: durable ones (none when storage did not answer).

    A snapshot is whole in memory when every rank of its world has a holding of any tier (layout and objects) and every
    fragment is in a full enough holding of its rank or, for copies by contract, of another rank. One that damaged copies
    or differing plans make doubtful is not used. ``ask`` narrows by step and source; ``excluded`` are not
    looked at.
    """
    ask = ask or RestoreAsk()
    durable = {commit for commit in commits if _related(record, commit)}
    found = _by_snapshot(holdings, layouts, record)
    levels = _certified(certified)
    everything = {*durable, *found, *(snapshot for snapshot in levels if _related(record, snapshot))}
    if record is None and everything:
        newest = max(snapshot.epoch for snapshot in everything)
        everything = {snapshot for snapshot in everything if snapshot.epoch == newest}
    if ask.step is not None:
        everything = {snapshot for snapshot in everything if snapshot.step == ask.step}
    passed: list[PassedOver] = []
    for snapshot in sorted(everything.difference(excluded), reverse=True):
        outcome = _judge(snapshot, found.get(snapshot, _Held()), layouts, snapshot in durable, ask.source)
        if isinstance(outcome, Candidate):
            return Candidates(outcome, tuple(passed))
        passed.append(PassedOver(snapshot, outcome, levels.get(snapshot, -1)))
    return Candidates(None, tuple(passed))


@dataclass
class _Held:
    """Of one snapshot: rank -> (node, holding), and the parity with its (node, holding)."""

    ranks: dict[int, list[tuple[str, HoldingFact]]] = field(default_factory=dict)
    shards: list[tuple[str, HoldingFact]] = field(default_factory=list)

    def parity_sets(self) -> dict[ParitySet, dict[int, set[str]]]:
        """parity set -> position -> nodes with its parity"""
        found: dict[ParitySet, dict[int, set[str]]] = {}
        for node, fact in self.shards:
            if fact.shard is not None:
                found.setdefault(fact.shard.parity_set, {}).setdefault(fact.shard.position, set()).add(node)
        return found

    def spared(self) -> dict[int, ParitySet]:
        """The ranks that parity can bring now."""
        found: dict[int, ParitySet] = {}
        for parity_set, shards in self.parity_sets().items():
            data = {
                at
                for rank, at in parity_set.ranks().items()
                if any(f.tier <= 1 for _, f in self.ranks.get(rank, ()))
            }
            if decodable(parity_set, data, shards):
                found.update(dict.fromkeys(parity_set.ranks(), parity_set))
        return found


def _related(record: EpochRecord | None, snapshot: SnapshotId) -> bool:
    return record is None or record.is_candidate(snapshot)


def _certified(facts: Iterable[tuple[SnapshotId, int, bool]]) -> dict[SnapshotId, int]:
    """The highest level anyone was told; durable counts as at least sealed. Level -1 (incomplete) proves nothing."""
    best: dict[SnapshotId, int] = {}
    for snapshot, told, durable in facts:
        told = max(told, 0) if durable else told
        if told >= 0:
            best[snapshot] = max(told, best.get(snapshot, 0))
    return best


def _by_snapshot(
    holdings: Mapping[str, Sequence[HoldingFact]], layouts: Mapping[str, Layout], record: EpochRecord | None
) -> dict[SnapshotId, _Held]:
    found: dict[SnapshotId, _Held] = {}
    for node, facts in sorted(holdings.items()):
        for fact in facts:
            known = layouts.get(fact.layout_id)
            if known is None or known.rank != fact.rank or not _related(record, fact.snapshot):
                continue
            held = found.setdefault(fact.snapshot, _Held())
            if fact.shard is not None:
                held.shards.append((node, fact))
            else:
                held.ranks.setdefault(fact.rank, []).append((node, fact))
    return found


def _judge(
    snapshot: SnapshotId, held: _Held, layouts: Mapping[str, Layout], durable: bool, source: str | None
) -> Candidate | str:
    """A candidate, or why not."""
    if source == "durable":
        return Candidate(snapshot, False, True) if durable else "not on durable storage"
    durable = durable and source != "memory"
    doubt = _doubt(held, layouts)
    if doubt:
        return Candidate(snapshot, False, True) if durable else doubt
    own = {rank: layouts[found[0][1].layout_id] for rank, found in sorted(held.ranks.items())}
    own |= _by_parity(held, layouts, own)
    sources = tuple(
        Source(node, rank, fact.tier, fact.layout_id)
        for rank, found in sorted(held.ranks.items())
        for node, fact in sorted(found, key=lambda entry: (entry[1].tier, entry[0]))
    ) + tuple(Source(node, fact.rank, 0, fact.layout_id, fact.shard) for node, fact in held.shards)
    per_rank: tuple[str, ...] = ()
    lacking = _lacking(own, held)
    if not lacking:
        verdict = agree(own, _all_digests(held))
        if verdict.errors:
            lacking = "; ".join(verdict.errors[:REASONS_MAX])
            sources = ()
        else:
            per_rank = verdict.per_rank
    if lacking and not durable:
        return lacking
    return Candidate(snapshot, not lacking, durable, sources, per_rank)


def _by_parity(held: _Held, layouts: Mapping[str, Layout], own: Mapping[int, Layout]) -> dict[int, Layout]:
    """The layouts of ranks that no slot is left of, but parity."""
    found: dict[int, Layout] = {}
    for rank, parity_set in held.spared().items():
        layout = layouts.get(parity_set.members[parity_set.ranks()[rank]].layout_id)
        if rank not in own and layout is not None and layout.rank == rank:
            found[rank] = layout
    return dict(sorted(found.items()))


def _doubt(held: _Held, layouts: Mapping[str, Layout]) -> str:
    """Holders must not contradict each other about the same rank, nor ranks about the world and the plan."""
    worlds: dict[int, int] = {}  # -> the first rank that has it
    plans: dict[str, dict[str, int]] = {}  # who plans -> plan -> the same
    told = {member.rank: member.layout_id for parity_set in held.parity_sets() for member in parity_set.members}
    for rank, found in sorted(held.ranks.items()):
        if len({fact.layout_id for _, fact in found} | {told.get(rank, found[0][1].layout_id)}) > 1:
            return f"rank {rank} is held with different layouts"
        sums: dict[str, bytes] = {}
        for node, fact in found:
            if any(sums.setdefault(name, value) != value for name, value in fact.digests):
                return f"holders of rank {rank} differ in content ({node})"
        layout = layouts[found[0][1].layout_id]
        worlds.setdefault(layout.world, rank)
        for who, plan in plans_in(layout.plan_id):
            plans.setdefault(who, {}).setdefault(plan, rank)
    for ranks in map(list, (worlds.values(), *(found.values() for found in plans.values()))):
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} differ in world or capture plan"
    return ""


def _lacking(own: Mapping[int, Layout], held: _Held) -> str:
    """What memory lacks of this snapshot, in words; "" when it is whole."""
    if not own:
        return NOTHING_OF_IT
    world = next(iter(own.values())).world
    missing = [rank for rank in range(world) if rank not in own]
    if missing:
        return f"memory of those who answered holds nothing of {_some('rank', missing)}"
    holders = {rank: [(node, fact.tier) for node, fact in found] for rank, found in held.ranks.items()}
    if level(slice_classes(own), holders, dict.fromkeys(held.spared(), 0)) >= 0:
        return ""
    return f"memory of those who answered lacks {_some('slice', _missing_slices(own, held))}"


def _missing_slices(own: Mapping[int, Layout], held: _Held) -> list[str]:
    """The slow look that names them; level() has said that there are some."""
    here: set[tuple[str, object]] = set()
    wanted: dict[tuple[str, object], str] = {}
    for rank, layout in own.items():
        tier = min((fact.tier for _, fact in held.ranks.get(rank, ())), default=1)
        for fragment in layout.fragments:
            alone = rank if fragment.sharing != "replica" else -1
            name = (fragment.key, (fragment.box, alone))
            wanted.setdefault(name, f"{fragment.key} of rank {rank}")
            if tier <= fragment.tier:
                here.add(name)
    return [text for name, text in wanted.items() if name not in here]


def _all_digests(held: _Held) -> dict[int, list[tuple[str, bytes]]]:
    """rank -> digests, from its own slots or from parity that protects it"""
    found = {
        rank: list(pairs) for _, fact in held.shards for rank, pairs in member_digests(fact.digests).items()
    }
    return found | {rank: _digests(holders) for rank, holders in held.ranks.items()}


def _digests(found: Sequence[tuple[str, HoldingFact]]) -> list[tuple[str, bytes]]:
    return list({name: value for _, fact in found for name, value in fact.digests}.items())


def _some(noun: str, what: Sequence[object]) -> str:
    named = ", ".join(map(str, what[:REASONS_MAX]))
    more = f" and {len(what) - REASONS_MAX} more" if len(what) > REASONS_MAX else ""
    return f"{noun}{'s' if len(what) > 1 else ''} {named}{more}"
