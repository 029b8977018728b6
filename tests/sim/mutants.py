"""Deliberate mistakes in the core or its shell. The simulator must find each: a test that never fails proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from ckptd.core.protocol.machine.machine import JobMachine

Mutant = Callable[[JobMachine], None]


def free_the_old_one_early(machine: JobMachine) -> None:
    """Any newer certificate releases everything older, whatever the levels are (P3)."""
    certify: Any = machine.steward.certify

    def release() -> None:
        newest = certify._newest_certified()
        if newest is not None:
            for snapshot in [s for s in certify._table.states if s < newest.snapshot]:
                certify._table.release(snapshot)
        certify.name_releases()

    certify._release = release


def skip_the_epoch_check(machine: JobMachine) -> None:
    """An older epoch is entered again (P12)."""
    opening: Any = machine.opening
    opening.refuses = lambda record: False


def obey_any_steward(machine: JobMachine) -> None:
    """Orders count whoever gives them and whatever they were based on (P2, P3)."""
    uplink: Any = machine.uplink
    uplink.is_from_steward = lambda sender, session: True
    machine._messages = machine._message_table()  # the one made before keeps the check that it was made with


def certify_before_everyone_told(machine: JobMachine) -> None:
    """A steward that has just begun takes what it does not know for lost (P3)."""
    sessions: Any = machine.steward.sessions
    sessions.settled = lambda: True


def trust_a_node_that_came_back(machine: JobMachine) -> None:
    """What a node held before it went still counts when it is back (P2)."""
    sessions: Any = machine.steward.sessions
    sessions.on_link = lambda node: None


def grant_while_voids_are_open(machine: JobMachine) -> None:
    """New grants although some ranks still hold a void one: they stay one step apart (P14)."""
    grants: Any = machine.steward.grants

    def act() -> None:
        if grants._everyone_is_here():
            progress = max(state.step for state in grants.ranks.values())
            while grants._room() > 0:
                grants._grant(max(progress + 1 + grants.margin.steps, grants._untaken()))

    grants.act = act


def never_make_a_copy_again(machine: JobMachine) -> None:
    """A copy that was lost, or refused, is not replaced (P14)."""
    replication: Any = machine.replication
    replication.on_holders = lambda message: None
    replication._count = lambda copies, number, event: copies.done.__setitem__(number, (event.to, 0.0))


def say_that_nothing_is_left(machine: JobMachine) -> None:
    """Whoever is to go hears it at once (P3)."""
    draining: Any = machine.steward.draining
    tell = draining._tell_remainder
    draining._tell_remainder = lambda node, needs, falls: tell(node, [], [])


def free_a_slot_while_it_is_written(machine: JobMachine) -> None:
    """Pins do not hold (P1)."""
    slots: Any = machine.slots
    slots.pinned = lambda snapshot: False


def give_a_doomed_slot_again(machine: JobMachine) -> None:
    """A slot taken back is FREE at once, although its rank may be writing into it (P6)."""
    capture: Any = machine.capture
    doom = capture._doom

    def free_at_once(slot: Any, reason: str) -> None:
        doom(slot, reason)
        machine.slots.free(slot)

    capture._doom = free_at_once


def wrong_level(wrong: Callable[..., int]) -> Mutant:
    """What ``level()`` of the core answers goes through this first, in this machine alone (P2, P3)."""

    def plant(machine: JobMachine) -> None:
        table: Any = machine.steward.table
        right = type(table).level_with
        mistaken = {**right.__globals__, "level": partial(wrong, right.__globals__["level"])}
        table.level_with = FunctionType(right.__code__, mistaken).__get__(table)

    return plant


def prefixes_are_whole(level: Any, classes: Any, holders: Any, spared: Any) -> int:
    """A copy counts for slices that it does not have."""
    whole = {rank: [(domain, 0) for domain, _ in found] for rank, found in holders.items()}
    return int(level(classes, whole, spared))


def copies_are_domains(level: Any, classes: Any, holders: Any, spared: Any) -> int:
    """Two copies in one rack count as if they were in two."""
    apart = {rank: [(f"{at} {d}", tier) for at, (d, tier) in enumerate(found)] for rank, found in holders.items()}
    return int(level(classes, apart, spared))


def the_best_rank_counts(level: Any, classes: Any, holders: Any, spared: Any) -> int:
    """Every rank is taken to be held where the one with the most holders is."""
    best = max(holders.values(), key=len, default=[])
    return int(level(classes, {rank: found and best for rank, found in holders.items()}, spared))


def parity_survives_all(level: Any, classes: Any, holders: Any, spared: Any) -> int:
    """A parity set is taken to survive one loss more than it does."""
    return int(level(classes, holders, {rank: count + 1 for rank, count in spared.items()}))


MUTANTS: dict[str, Mutant] = {
    "free early": free_the_old_one_early,
    "no epoch check": skip_the_epoch_check,
    "any steward": obey_any_steward,
    "hasty certificate": certify_before_everyone_told,
    "trust a return": trust_a_node_that_came_back,
    "grant over voids": grant_while_voids_are_open,
    "no second copy": never_make_a_copy_again,
    "no pins": free_a_slot_while_it_is_written,
    "nothing is left": say_that_nothing_is_left,
    "doomed slot": give_a_doomed_slot_again,
    "level: prefixes are whole": wrong_level(prefixes_are_whole),
    "level: copies are domains": wrong_level(copies_are_domains),
    "level: the best rank counts": wrong_level(the_best_rank_counts),
    "level: parity survives all": wrong_level(parity_survives_all),
    "level: one more": wrong_level(lambda level, *held: level(*held) + 1),
    # A writer reports before its files are synced (writes.py).
    "no file sync": lambda machine: None,
    # A commit is acknowledged before its manifest is synced (writes.py).
    "no manifest sync": lambda machine: None,
    # The shell takes in and uses what it did not verify (copies.py, fetch.py, parity.py).
    "no verify": lambda machine: None,
}

# Where they are rare, in the world as it is: the same promise is kept with fewer seeds. A wrong number here costs time and no more.
FIRST: dict[str, int] = {
    "doomed slot": 5,  # in the world of seed 0 it takes 50 s to show
    "level: copies are domains": 206, "level: parity survives all": 3, "level: prefixes are whole": 76,
    "level: the best rank counts": 3, "no epoch check": 35, "free early": 1, "no file sync": 634, "no manifest sync": 253,
    "no pins": 190, "no second copy": 69, "no verify": 3, "nothing is left": 11, "trust a return": 452,
}  # fmt: skip

# Worlds in which the mistake can make a difference; the others are not counted among the seeds that a test looks at.
MATTERS: dict[str, Callable[[list[str]], bool]] = {
    "level: copies are domains": lambda domains: len(set(domains)) < len(domains),  # of each node
}

# Too rare for a test that looks at 400 seeds, with what we believe to be the reason, and where it was found.
RARE = {
    "any steward": "stewards state facts that they rebuild from holdings, so two of them do no harm (design D9); 1 in 2 000 seeds",
    "grant over voids": "voiding a grant takes the later ones with it, which alone keeps ranks in step; 1 in 1 000 seeds",
    "hasty certificate": "what is certified too early is mostly weighed anew before it releases anything; seed 970",
}
