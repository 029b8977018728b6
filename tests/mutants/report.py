"""The table, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.mutants.by_hand import BY_HAND
from tests.mutants.generate import Mutant
from tests.mutants.run import SEED, Outcome
from tests.mutants.worker import ENDLESS

KILLED_MIN = 0.95
COLUMNS = ("mutants", "by tests", "by seeds", "endless", "survived", "explained", "killed")


def row_name(mutant: Mutant) -> str:
    return BY_HAND if mutant.function == BY_HAND else mutant.path


def kind(mutant: Mutant, outcome: Outcome, why: Mapping[str, str]) -> list[str]:
    """The columns that this one counts in."""
    if not outcome.killed:
        return ["mutants", "survived", *(["explained"] if mutant.id in why else [])]
    if outcome.how == ENDLESS:
        return ["mutants", "endless"]
    return ["mutants", "by seeds" if outcome.by.startswith(SEED) else "by tests"]


def table(mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome], why: Mapping[str, str]) -> str:
    rows: dict[str, Counter[str]] = {}
    for mutant in mutants:
        rows.setdefault(row_name(mutant), Counter()).update(kind(mutant, outcomes[mutant.id], why))
    rows["all"] = sum(rows.values(), Counter())
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{name:>11}" for name in COLUMNS)]
    for name, count in rows.items():
        share = 100 * (count["mutants"] - count["survived"]) / count["mutants"]
        lines.append(
            f"{name:<{width}}"
            + "".join(f"{count[column]:11d}" for column in COLUMNS[:-1])
            + f"{share:9.1f} %"
        )
    return "\n".join(lines)


def complaints(
    mutants: Sequence[Mutant], outcomes: Mapping[str, Outcome], why: Mapping[str, str], stale: Sequence[str]
) -> list[str]:
    """Empty when the bar is met."""
    found = [f"its entry in survivors.toml is not needed: {name}" for name in stale]
    alive = [mutant for mutant in mutants if not outcomes[mutant.id].killed]
    for mutant in alive:
        outcome = outcomes[mutant.id]
        if mutant.id not in why:
            tried = f"{outcome.tried} killers run it" if outcome.tried else "nothing runs it"
            found.append(f"it lives: {mutant.title}\n    id = {mutant.id!r} ({tried}) {outcome.error}")
    share = 1 - len(alive) / max(1, len(mutants))
    if share < KILLED_MIN:
        found.append(f"{share:.1%} are killed, {KILLED_MIN:.0%} are wanted")
    return found
