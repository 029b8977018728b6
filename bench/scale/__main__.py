"""How bytes, messages, processor time and memory of the control plane grow with nodes, ranks and tensors (P16).

    python -m bench.scale --nodes 64 --ranks-per-node 8 --tensors 10000 --mesh fsdp

The machine that ships, its codec, and real layouts. Steward, successor and four members are a process each; all other nodes share
one, and send and parse real bytes. Memory, storage and the ranks themselves are played. Without --nodes: small worlds of every
mesh, half an hour; with --all every world, hours. The status is 1 when a floor is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.scale.maps import Maps
from bench.scale.state import MESHES, State
from bench.scale.world import STEADY, WHOLE, Phase, World

MB = 1e6
SORTED = 10**7  # int64
MAPS = ((512, 1000), (512, 10_000), (2048, 1000), (2048, 10_000))  # the same, of which the map alone is looked at
FEW = 6  # nodes that a restore into a small world goes into
WORLDS = ((8, 1000), (8, 10_000), (64, 1000), (64, 10_000), (512, 1000), (512, 10_000))  # (nodes, tensors)
QUICK = ((8, 10_000), (64, 1000))  # minutes each; the largest ones take far longer
EACH = 8


@dataclass(frozen=True)
class Floor:
    """At most."""

    name: str
    most: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.most


def sort_s() -> float:
    """What one numpy sort takes here."""
    numbers = np.random.default_rng(0).integers(0, 1 << 62, SORTED)
    began = time.thread_time()
    np.sort(numbers, kind="stable")
    return time.thread_time() - began


def life(world: World, into: int) -> Iterator[Phase]:
    """Each phase begins when the one before has ended. The last node is lost; later the steward, while a snapshot is sealed and
    not yet certified."""
    state = world.state
    yield world.start("join", state, "a1")
    yield world.snapshot("first snapshot")
    for _ in range(STEADY):
        yield world.snapshot("steady snapshot")
    yield world.flush()
    world.lose({f"n{state.nodes - 1}"})
    yield world.start("restore", state.into(into), "a2")
    yield world.snapshot("first snapshot of it")
    yield world.seal()
    world.lose({world.steward})
    yield world.start("restore by the successor", state.into(min(into, state.nodes - 2), first=1), "a3")


def run(state: State, into: int, whole: int) -> tuple[list[Phase], int, list[dict[str, float]]]:
    """A life of the job; its restores go into so many nodes. Also the most bytes that a daemon's books took, and what plans did."""
    world = World(state, whole)
    phases: list[Phase] = []
    books = 0
    try:
        for phase in life(world, into):
            phases.append(phase)
            books = max(books, *world.books())
            if not phase.ended:
                break
        return phases, books, world.planned()
    finally:
        world.end()


def floors(phases: list[Phase], books: int, planned: list[dict[str, float]], each: int) -> Iterator[Floor]:
    yield Floor("phases that came to their end (missing)", 0, sum(not phase.ended for phase in phases))
    yield Floor("largest control message, MiB", 1, max(phase.largest[0] for phase in phases) / 2**20)
    longest = max(max(phase.steward.longest[0], phase.member.longest[0]) for phase in phases)
    yield Floor("longest handler, s", 0.1, longest)
    steady = [phase for phase in phases if phase.name == "steady snapshot"]
    for phase in steady[-1:]:
        yield Floor("steward's CPU for a steady snapshot, s", 0.2, _cpu(phase.steward.cpu))
        yield Floor("a member's CPU for a steady snapshot, s", 0.01, _cpu(phase.member.cpu))
    for phase in phases:
        if phase.name.startswith("restore"):
            yield Floor(f"steward's CPU for a {phase.name}, s", 3, _cpu(phase.steward.cpu))
    if planned:
        yield Floor("a restore's plan on one node, s", 1 if each <= EACH else 5, max(sum(found.values()) for found in planned))
    yield Floor("books of one daemon, MB", 200, books / MB)


def _cpu(cpu: dict[str, float]) -> float:
    """Without the ticks, which time brings."""
    return sum(seconds for what, seconds in cpu.items() if what != "Tick")


def show(state: State, phases: list[Phase], planned: list[dict[str, float]], sort: float) -> None:
    table = Table(title=f"{state.mesh}: {state.nodes} nodes x {state.each} ranks, {state.total} logical tensors")
    names = ("phase", "simulated s", "MB in all", "messages", "largest MB", "steward s", "tick ms", "member s", "longest ms")
    for name in names:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase in phases:
        seconds, what = max(phase.steward.longest, phase.member.longest)
        ticks = phase.steward.cpu.get("Tick", 0.0) / max(phase.seconds * 4, 1) * 1000
        row = (phase.name + ("" if phase.ended else " (never ended)"), f"{phase.seconds:.1f}",
               f"{phase.sent.total() / MB:.2f}", str(phase.messages), f"{phase.largest[0] / MB:.3f} {phase.largest[1]}",
               f"{_cpu(phase.steward.cpu):.3f}", f"{ticks:.2f}", f"{_cpu(phase.member.cpu):.4f}",
               f"{1000 * seconds:.1f} {what}")  # fmt: skip
        table.add_row(*row)
    Console(width=150).print(table)
    for phase in phases:
        if phase.fetched:
            print(f"{phase.name}: {phase.fetched / MB:.3f} MB of layouts fetched by the nodes that are whole")
        if phase.failed.total():
            print(f"{phase.name}: {dict(phase.failed)}")
    for found in planned[:1]:
        parts = ", ".join(f"{what} {seconds:.3f}" for what, seconds in found.items())
        print(f"a node's plan: {parts} s ({sum(found.values()) / sort:.1f} x sort)")


def map_floors(maps: Maps, took: dict[int, dict[str, float]]) -> Iterator[Floor]:
    """took: of a restore into so many nodes."""
    yield Floor("map, MiB", 16, maps.nbytes / 2**20)
    for nodes, found in took.items():
        yield Floor(f"a restore's plan on one node of {nodes}, s", 5 if nodes == FEW else 1, sum(found.values()))


def look_at_maps(state: State, sort: float) -> tuple[list[Floor], dict[str, Any]]:
    maps = Maps(state)
    print(f"{state.mesh}: {state.nodes} nodes x {state.each} ranks, {state.total} tensors: a map of {maps.nbytes / MB:.2f} MB")
    took = {"read": maps.read, "snapshot": maps.snapshot()}
    restores = {}
    for nodes in (state.nodes * 3 // 4, FEW):
        restores[nodes] = maps.restore(nodes)
        took[f"restore into {nodes} nodes, {maps.pieces} pieces"] = restores[nodes]
    for what, found in took.items():
        print(f"  {what}: {', '.join(f'{part} {s:.3f}' for part, s in found.items())} s ({sum(found.values()) / sort:.1f} x sort)")
    return list(map_floors(maps, restores)), took


def tell(floors: Iterable[Floor]) -> int:
    """How many are missed."""
    found = list(floors)
    for floor in found:
        print(f"  {'ok    ' if floor.met else 'MISSED'} {floor.name}: {floor.found:.4g}, at most {floor.most:g}")
    return sum(not floor.met for floor in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--ranks-per-node", type=int, default=EACH)
    parser.add_argument("--tensors", type=int, default=1000, help="of each rank")
    parser.add_argument("--mesh", choices=MESHES)
    parser.add_argument("--into", type=int, help="nodes that the restore goes into; default: one less")
    parser.add_argument("--whole", type=int, default=WHOLE, help="nodes that are a process each, the steward among them")
    parser.add_argument("--all", action="store_true", help="every world")
    parser.add_argument("--maps", action="store_true", help="no messages: what is computed of the map, of up to 2,048 nodes")
    parser.add_argument("--odd", action="store_true", help="20 ranks have another layout")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    every = MAPS if args.maps else WORLDS if args.all else QUICK
    worlds = [(args.nodes, args.tensors)] if args.nodes else list(every)
    meshes = [args.mesh] if args.mesh else list(MESHES)
    sort, missed = sort_s(), 0
    told: list[dict[str, Any]] = []
    print(f"{machine()}; a stable sort of 10^7 int64 takes {sort:.2f} s")
    for nodes, tensors in worlds:
        for mesh in meshes:
            state = State.of(mesh, nodes, args.ranks_per_node, tensors, args.odd)
            began = time.monotonic()
            if args.maps:
                found, took = look_at_maps(state, sort)
                missed += tell(found)
                told.append({"world": state, "took": took})
                continue
            phases, books, planned = run(state, args.into or nodes - 1, args.whole)
            show(state, phases, planned, sort)
            missed += tell(floors(phases, books, planned, args.ranks_per_node))
            print(f"  took {time.monotonic() - began:.0f} s")
            told.append({"world": state, "phases": phases, "planned": planned, "books": books})
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "worlds": told}, indent=1, default=vars))
    return int(missed > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
