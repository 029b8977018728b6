"""What goes wrong often in one world, so that what is rare meets its like: each season is dense in a few kinds of faults."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SEASON_OF = 0.25  # of the worlds that are not large
RATES = (0.3, 0.45, 0.8)  # faults per second
AIMED_OF = 0.6  # of the worlds that have a season


@dataclass(frozen=True)
class Season:
    """How often what happens at one instant of a start or of a snapshot. The defaults are those of most worlds."""

    kinds: tuple[tuple[str, int], ...] = ()  # methods of Faults that strike, and their weights; (): Faults' own choice
    aimed_of: float = 0.1  # of the snapshots that have just become complete, where the world aims at the steward
    written_of: float = 0.05  # of the starts: a daemon dies while it writes its epoch down
    unheard_of: float = 0.3  # of the claims of an epoch: a node that holds something newer does not hear of it
    again_of: float = 0.05  # of the claims: a rank comes again as one of another world
    struck_of: float = 0.0  # of the claims: what the decision is about is damaged, or its holder dies or is cut off
    away_of: float = 0.0  # of the claims: storage goes away
    denied_of: float = 0.02  # of the commits: it is done, and whoever did it is told that it failed
    twice_of: float = 0.06  # of the starts: two schedulers, each on half of the nodes
    over_itself_of: float = 0.15  # of the starts: a second one on the same nodes, before the first has restored
    confused_of: float = 0.02  # of the starts: a rank asks for another restore, or for another world, than the others
    misfit_of: float = 0.03  # of the ranks that restore: the model does not fit, bytes do not come, or cannot be taken
    torn_of: float = 0.003  # of the captures: a write past the fence
    in_use_of: float = 0.002  # of the slots that are given: they are read, or mapped by somebody else


ORDINARY = Season()
SEASONS = {
    "links": Season(
        (("_slow_link", 4), ("_clog", 4), ("_deaf", 3), ("_pause", 3), ("_storage", 3), ("_squeeze", 2), ("_flush_asked", 2),
         ("_two_nodes", 1), ("_daemon", 1)),
        0.35, 0.05, 0.3, 0.05, 0.2, 0.1, 0.1, 0.03, 0.15,
    ),
    "ranks": Season(
        (("_rank", 4), ("_job", 3), ("_daemon", 2), ("_trap", 2), ("_pause", 2), ("_squeeze", 2), ("_damage", 1), ("_node", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.02, 0.12, 0.35, 0.15, 0.12, 0.05, 0.05,
    ),
    "starts": Season(
        (("_job", 5), ("_storage", 3), ("_trap", 3), ("_daemon", 2), ("_deaf", 2), ("_state_dir", 2), ("_keeper", 1),
         ("_partition", 1)),
        0.35, 0.25, 0.3, 0.15, 0.5, 0.3, 0.1, 0.12, 0.35,
    ),
    "disks": Season(
        (("_state_dir", 6), ("_daemon", 4), ("_job", 3), ("_partition", 2), ("_deaf", 1), ("_steward", 2), ("_node", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.1, 0.03, 0.35,
    ),
    "stewards": Season(
        (("_steward", 4), ("_trap", 3), ("_deaf", 3), ("_clog", 2), ("_pause", 2), ("_squeeze", 2), ("_rank", 1), ("_damage", 1),
         ("_partition", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.1, 0.03, 0.35,
    ),
    "memories": Season(
        (("_damage", 4), ("_squeeze", 3), ("_deaf", 3), ("_clog", 3), ("_partition", 3), ("_pause", 3), ("_rank", 1),
         ("_daemon", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.1, 0.03, 0.35,
    ),
    "orders": Season(
        (("_forget", 6), ("_job", 4), ("_deaf", 2), ("_daemon", 2), ("_partition", 2), ("_storage", 1), ("_trap", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.1, 0.03, 0.35,
    ),
    "parts": Season(
        (("_squeeze", 3), ("_damage", 3), ("_node", 2), ("_daemon", 2), ("_deaf", 2), ("_clog", 2), ("_rank", 1)),
        0.35, 0.25, 0.3, 0.15, 0.2, 0.0, 0.1, 0.03, 0.35,
    ),
    "all": Season(
        (("_daemon", 3), ("_trap", 3), ("_deaf", 2), ("_partition", 2), ("_storage", 2), ("_job", 2), ("_steward", 2),
         ("_damage", 1), ("_rank", 1), ("_keeper", 1), ("_state_dir", 1), ("_clog", 1), ("_squeeze", 1)),
        0.35, 0.25, 0.3, 0.15, 0.5, 0.0, 0.1, 0.12, 0.35,
    ),
}  # fmt: skip


def draw_season(seed: int, large: bool) -> Season:
    """Drawn apart, so that a seed without one shows what it showed before there were seasons."""
    rng = Random(f"season {seed}")
    return SEASONS[rng.choice(sorted(SEASONS))] if not large and rng.random() < SEASON_OF else ORDINARY
