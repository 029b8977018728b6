"""Which boxes this rank captures, and where they lie in its slot; kept until the structure changes (design D7, D8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.balance import balanced_plan, plan_id, plan_id_apart
from ckptd.core.state_map.fragments import Fragment
from ckptd.core.state_map.layout import REPLICA, Layout
from ckptd.core.state_map.layout_build import LayoutItem, build_layout, place
from ckptd.core.state_map.record_size import predicted_record
from ckptd_client import _switches, apart, gradients, nested, optim
from ckptd_client.entries import Entry, Mode, Owner, State
from ckptd_client.garbage import searched_later
from ckptd_client.naming import is_dtensor, local_of, uncounted
from ckptd_client.registry import Registry
from ckptd_client.slices import Slice, placed_name, plain_slice, slices_of
from ckptd_client.versions import Watched
from ckptd_client.world import World

_COUNTER = torch.zeros(())  # stands for a step counter that is not born yet

# Of the objects region; a power of two, so that its growth rarely changes the layout.
OBJECTS_BYTES_MIN = 64 * 1024
# CPU tensors up to this are copied at once: a loop over tiny copies in the background slows Python down.
SMALL_BYTES_MAX = 16 * 1024
AT_ONCE = (Mode.SMALL, Mode.SYNC)
WORD_BYTES = 8  # copied in one move


class Source(NamedTuple):
    """Fragment ``fragment`` of the layout is the box ``part`` of entry number ``entry``."""

    entry: int
    key: str
    owner: Owner
    part: Slice
    fragment: int
    offset: int  # bytes in the payload
    nbytes: int
    mode: Mode
    sharded: bool  # a DTensor
    whole: bool  # the box is all of the local tensor


class Small(NamedTuple):
    """Column by column the sources that are copied in one call, and the others. A single one of them costs more to look at than to
    copy, and there may be 20,000."""

    sources: list[Source]
    sharded: list[int]  # which of them are DTensors
    entries: list[int]
    offsets: list[int]
    nbytes: list[int]
    others: list[Source]


@dataclass(frozen=True)
class Plan:
    layout: Layout
    sources: tuple[Source, ...]
    signature: tuple[Any, ...]
    objects_max: int
    world: World
    watched: tuple[Watched, ...]
    watched_state: tuple[Watched, ...]  # of optimizers
    stepped: dict[str, frozenset[str]]  # optimizer -> keys of the parameters that it steps

    @cached_property
    def copies_behind(self) -> bool:
        """Is anything copied in the background whose counters are watched?"""
        return bool(self.watched_state) or any(one.behind for one in self.watched)

    @cached_property
    def at_once(self) -> tuple[Watched, ...]:
        """What this rank copies on the CPU before snapshot() returns; not a single number, which no other thread can tear."""
        rows = self.signature[1:]
        found = {
            source.entry: Watched(source.entry, source.key, source.owner, source.sharded, False, False)
            for source in self.sources
            if source.mode in AT_ONCE and rows[source.entry][4].type == "cpu"
            if source.nbytes > min(rows[source.entry][2].itemsize, WORD_BYTES)
        }
        return tuple(found.values())

    @cached_property
    def small(self) -> Small:
        found = [source for source in self.sources if source.mode is Mode.SMALL and source.whole]
        others = [source for source in self.sources if source.mode is not Mode.SMALL or not source.whole]
        sharded = [at for at, source in enumerate(found) if source.sharded]
        rows = [(source.entry, source.offset, source.nbytes) for source in found]
        entries, offsets, nbytes = ([row[column] for row in rows] for column in range(3))
        return Small(found, sharded, entries, offsets, nbytes, others)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Of its entries."""
        return tuple(row[0] for row in self.signature[1:])

    @cached_property
    def sharded(self) -> frozenset[int]:
        """Entries that are DTensors."""
        return frozenset(at for at, row in enumerate(self.signature[1:]) if row[5] is not None)

    @cached_property
    def of_models(self) -> tuple[int, ...]:
        """Entries that are no optimizer's."""
        return tuple(at for at, row in enumerate(self.signature[1:]) if row[7] != "optim")

    @cached_property
    def record_bytes(self) -> int:
        return predicted_record(self.layout)


def signature_of(state: State) -> tuple[Any, ...]:
    """Equal when the same plan fits: names, dtypes, shapes, placements and modes, of the same owners. Those that are registered
    again are others, and a plan that names the old ones would note of them what it finds out."""
    rows: list[Any] = [(tuple(state.aliases), state.without)]
    for entry in state.entries:
        tensor = entry.tensor
        spec: Any = getattr(tensor, "_spec", None) if is_dtensor(tensor) else None
        placing = None if spec is None else (id(spec.mesh), spec.placements)
        kind = tensor.dtype, tensor.shape, tensor.device
        shown = tensor.layout, tensor.is_conj(), tensor.is_neg()  # what lies in memory may be read otherwise from now on
        rows.append((entry.key, entry.mode, *kind, placing, entry.copies, entry.role, entry.owner, entry.placed, shown))
    return tuple(rows)


def make_plan(state: State, world: World, replicas: int, objects_bytes: int, old: Plan | None) -> Plan:
    """``old`` again when it still fits. Raises CkptdError for what cannot be captured."""
    signature = signature_of(state)
    if (
        old is not None
        and old.world is world
        and old.signature == signature
        and objects_bytes <= old.objects_max
    ):
        return old
    # Boxes that came since the ranks met are no copies of what others hold.
    known = world if placed_name(state) == world.placed else replace(world, together=(world.rank,))
    parts = [(index, part) for index, entry in enumerate(state.entries) for part in slices_of(entry, known)]
    tiers, plan = _assign([part for _, part in parts], known, replicas)
    mine = [
        (index, part, tier)
        for (index, part), tier in zip(parts, tiers, strict=True)
        if tier is not None and part.stored
    ]
    rows = [(index, part, _item(state.entries[index], part, tier)) for index, part, tier in mine]
    rows.sort(key=lambda row: place(row[2]))  # as the layout sorts, so that fragments[i] is rows[i]
    items = [item for _, _, item in rows]
    objects_max = objects_capacity(objects_bytes)
    layout = build_layout(world.rank, world.size, items, objects_max, plan, state.aliases, state.without)
    sources = tuple(
        _source(state.entries[index], index, part, at, fragment)
        for at, ((index, part, _), fragment) in enumerate(zip(rows, layout.fragments, strict=True))
        if fragment.nbytes
    )
    watched, of_state = _watched(state, sources)
    return Plan(layout, sources, signature, objects_max, world, watched, of_state, _stepped(state))


def _stepped(state: State) -> dict[str, frozenset[str]]:
    """Of those that are watched."""
    watched = {entry.key for entry in state.entries if entry.role != "optim"}
    return {name: frozenset(of) & watched for name, of in state.groups.items()}


def _watched(state: State, sources: Sequence[Source]) -> tuple[tuple[Watched, ...], tuple[Watched, ...]]:
    """Whose version counters say that it was written: parameters, and the optimizer state that this rank copies in the
    background. Those of inference tensors do not exist."""
    behind = {source.entry for source in sources if source.mode is Mode.FENCED}
    found = [
        Watched(
            index, entry.key, entry.owner, is_dtensor(entry.tensor), entry.mode is Mode.FENCED, index in behind
        )
        for index, entry in enumerate(state.entries)
        if entry.role == "param" or entry.owner.kind == "tensor" or (entry.role == "optim" and index in behind)
        if not uncounted(entry.tensor)
    ]
    of_state = tuple(one for one in found if state.entries[one.entry].role == "optim")
    return tuple(one for one in found if state.entries[one.entry].role != "optim"), of_state


def _item(entry: Entry | None, part: Slice, tier: int) -> LayoutItem:
    """``entry``: whose part it is; None: of state that is not born yet."""
    frozen = entry is not None and entry.mode is Mode.STATIC and _mode(entry, part.nbytes) is Mode.STATIC
    return LayoutItem(part.key, part.dtype, part.shape, part.box, part.role, part.sharing, tier, frozen, part.cuts)


def _source(entry: Entry, index: int, part: Slice, at: int, fragment: Fragment) -> Source:
    sharded = is_dtensor(entry.tensor)
    local = local_of(entry.tensor) if sharded else entry.tensor
    if local.is_meta:
        raise CkptdError("still on the meta device", where=entry.key, hint="materialise it first (to_empty())")
    mode = _mode(entry, fragment.nbytes)
    whole = part.view(local) is local
    return Source(
        index, entry.key, entry.owner, part, at, fragment.offset, fragment.nbytes, mode, sharded, whole
    )


def objects_capacity(nbytes: int) -> int:
    """Twice what is needed now, rounded up to a power of two."""
    return max(OBJECTS_BYTES_MIN, 1 << (2 * nbytes - 1).bit_length()) if nbytes else OBJECTS_BYTES_MIN


def _mode(entry: Entry, nbytes: int) -> Mode:
    if not _switches.SYNC_COPIES:
        return Mode.FENCED
    return entry.mode if nbytes > SMALL_BYTES_MAX else Mode.SMALL


def _assign(parts: Sequence[Slice], world: World, replicas: int) -> tuple[list[int | None], str]:
    """Per part its tier, None when other ranks capture it; and the plan's id, the same on all ranks.

    Only copies by structure or declaration are split. Their groups (HSDP has one per shard) are planned alike on all their
    ranks; the id names what all groups are planned from, so that ranks of different groups can compare it. What is declared
    on a part of the ranks only (pipeline stages), or is in boxes that a part of them has, is planned and compared among those.
    """
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    facts: dict[str, tuple[int, ...]] = {}
    apart: dict[str, tuple[int, ...]] = {} if world.declaring != world.everyone else facts
    placed: dict[str, tuple[int, ...]] = {}
    for part in parts:
        if part.sharing == REPLICA:
            groups.setdefault(part.holders, []).append((_name(part), part.nbytes))
            if part.holders == (world.rank,):
                continue  # there is nothing to be agreed upon
            known = placed if part.placed else apart if part.declared else facts
            known[f"{part.key} {part.dtype} {part.shape} {len(part.holders)} {replicas}"] = world.everyone
    captors: dict[str, tuple[int, ...]] = {}
    for holders, items in groups.items():
        captors.update(balanced_plan(items, holders, world.domains, replicas + 1))
    tiers = [_tier(part, captors, world, replicas) for part in parts]
    name = plan_id(facts, {str(rank): list(domain.encode()) for rank, domain in world.domains.items()})
    if apart is not facts:
        name = plan_id_apart(name, world.declaring, plan_id(apart))
    return tiers, f"{name}|boxes {min(world.together)}:{plan_id(placed)}" if placed else name


def _name(part: Slice) -> str:
    return f"{part.key}|{','.join(map(str, part.box.offsets))}"


def _tier(part: Slice, captors: dict[str, tuple[int, ...]], world: World, replicas: int) -> int | None:
    if part.sharing != REPLICA:
        return replicas if part.captured else None
    ranks = captors[_name(part)]
    if world.rank not in ranks:
        return None
    return max(0, replicas + 1 - len({world.domains[rank] for rank in ranks}))


@searched_later()
def predicted_bytes(registry: Registry, state: State, world: World, replicas: int) -> tuple[int, int, int]:
    """(live part, frozen part, record) of one snapshot once the optimizers' state is born, which it is at the first step.
    ``state`` with its objects; its slices are kept for the restore that begins like this."""
    state.slices[:] = [slices_of(entry, world) for entry in state.entries]
    found = {id(entry.tensor): parts for entry, parts in zip(state.entries, state.slices, strict=True)}
    rows: list[tuple[Entry | None, Slice]] = [
        (entry, part) for entry, parts in zip(state.entries, state.slices, strict=True) for part in parts
    ]
    rows += [(None, part) for part in _unborn(registry, state, world, found)]
    tiers, _ = _assign([part for _, part in rows], world, replicas)
    items = [
        _item(entry, part, tier) for (entry, part), tier in zip(rows, tiers, strict=True) if tier is not None
    ]
    objects_bytes = sum(map(len, state.objects.values()))
    layout = build_layout(world.rank, world.size, items, objects_capacity(objects_bytes))
    return layout.frozen_at, layout.frozen_bytes, predicted_record(layout)


def _unborn(registry: Registry, state: State, world: World, known: dict[int, list[Slice]]) -> list[Slice]:
    """Of each parameter's innermost optimizer; what a wrapper will add nobody knows. ``known``: id(parameter) -> its slices."""
    missing = [entry for entry in gradients.parameters(state) if entry.tensor.requires_grad]
    born = [_like(entry)._replace(key=gradients.key_of(entry), role="extra", copies=None) for entry in missing]
    found = [part for entry in born for part in slices_of(entry, world)]
    for owner in registry.of_kind("optimizer"):
        held = nested.holders(owner.value)
        counts: dict[int, int] = {}  # of each group
        for parameter in optim.parameters(owner):
            optimizer, group, _ = held[id(parameter)][0]
            if id(group) not in counts:
                counts[id(group)] = optim.lazy_tensors(optimizer, group)
            if parameter.requires_grad and not optimizer.state.get(parameter):
                entry = state.params[id(parameter)]
                parts = known.get(id(entry.tensor), ()) if not apart.is_apart(entry.tensor) else ()
                found += _unborn_of(owner, counts[id(group)], entry, parts, world)
    return found


def _unborn_of(owner: Owner, count: int, entry: Entry, parts: Sequence[Slice], world: World) -> list[Slice]:
    """``parts``: of the parameter, whose states lie as it does; nothing: they are to be found out."""
    parts = parts or (slices_of(_like(entry), world) if count else ())
    found = [part.of_state(f"{owner.name}.{part.key}.{n}") for n in range(count) for part in parts]
    copies = None if is_dtensor(entry.tensor) else entry.copies
    return [*found, plain_slice(entry, f"{owner.name}.{entry.key}.step", _COUNTER, "optim", copies, world)]


def _like(entry: Entry) -> Entry:
    """A plain tensor in the place of a subclass."""
    if not apart.is_apart(entry.tensor):
        return entry
    return entry._replace(tensor=apart.plain_like(entry.tensor, entry.tensor.dtype, "meta"))
