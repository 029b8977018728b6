"""Where nodes are said to be, by which job, and who is dialed next (design D20). Pure; time is handed in.

Any user of this machine can name a node and an address in a Join. So that is a proposal: an address counts once its node has
greeted there, with the cluster key. A link that works stays, whatever is proposed; where none works, the address that worked
last and the proposals take turns. Nodes that never greeted are dialed a few at a time for each user. When no more fit, those that
have long been silent give way, and of him who named the most what nobody ever reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core.ids import NodeInfo

NODES_MAX = 4096  # that links are kept to
DIALS_MAX = 64  # of one user at a time, to nodes that have never greeted
TURN_S = 2.0  # that an address has to greet, where there is another one
DIAL_S = 6.0  # that a node has which never greeted, where others of its user wait
SILENT_S = 3600.0  # after which a node gives way to a new one, where there is no room for both
GIVE_WAY_MAX = 64  # nodes of one user at a time, for those of others


class Moves(NamedTuple):
    """Links to open (in place of one to the same node) and to close; nodes that nobody reached yet, that gave way to others."""

    open: list[NodeInfo]
    close: list[str]
    unreached: list[str]
    gone: list[str]


@dataclass(eq=False)
class _Entry:
    since: float
    worked_at: float  # or when it was first named
    proposals: dict[str, NodeInfo] = field(default_factory=dict)  # job -> what it said last, the newest word at the end
    proven: NodeInfo | None = None  # where it greeted last
    dialed: NodeInfo | None = None
    dialed_at: float = 0.0
    user: str = ""  # on whose account it is dialed
    told: bool = False  # that it is not reached, or by its link

    def addresses(self) -> list[NodeInfo]:
        """Distinct ones, the newest word first."""
        known = [*reversed(self.proposals.values()), *([self.proven] if self.proven is not None else [])]
        return list({info.control: info for info in reversed(known)}.values())[::-1]

    def users(self) -> set[str]:
        return set(map(user_of, self.proposals))

    def following(self) -> NodeInfo:
        """After the one that is dialed, in turn."""
        found = self.addresses()
        now = self.dialed.control if self.dialed is not None else ""
        at = next((index for index, info in enumerate(found) if info.control == now), -1)
        return found[(at + 1) % len(found)]


def user_of(job: str) -> str:
    """Jobs are keyed uid/name (wire.names)."""
    return job.partition("/")[0]


class AddressBook:
    """``works(node)``: has it greeted on the link that stands now?"""

    def __init__(self, works: Callable[[str], bool], unreached_after_s: float) -> None:
        self._works, self._unreached_after_s = works, unreached_after_s
        self._entries: dict[str, _Entry] = {}  # in the order in which those that wait get their turn
        self._gone: list[str] = []  # to be told at the next turn
        self._in_vain: set[str] = set()  # users for whom no room was found in this turn

    def propose(self, info: NodeInfo, job: str, now: float) -> bool:
        """False: there are too many nodes."""
        entry = self._entries.get(info.node)
        if entry is None:
            if len(self._entries) >= NODES_MAX and not self._make_room(user_of(job), now):
                return False
            entry = self._entries[info.node] = _Entry(now, now)
        entry.proposals.pop(job, None)
        entry.proposals[job] = info
        if entry.dialed is not None and entry.dialed.control != info.control and not self._works(info.node):
            entry.dialed, entry.dialed_at = None, now  # the newest word has the first turn
        return True

    def withdraw(self, job: str) -> list[str]:
        """Nodes that no job names any more: they are forgotten."""
        for entry in self._entries.values():
            entry.proposals.pop(job, None)
        gone = [node for node, entry in self._entries.items() if not entry.proposals]
        for node in gone:
            del self._entries[node]
        return gone

    def _make_room(self, user: str, now: float) -> bool:
        """Jobs of months meet more nodes than there is room for, and any user may name thousands. We look once a turn at most."""
        if user in self._in_vain:
            return False
        silent = [(node, entry) for node, entry in self._entries.items() if not self._works(node)]
        going = [node for node, entry in silent if now - entry.worked_at >= SILENT_S]
        if not going:
            named = Counter(one for entry in self._entries.values() for one in entry.users())
            most, count = named.most_common(1)[0]
            his = [node for node, entry in silent if entry.proven is None and entry.users() == {most}]
            going = his[-min(GIVE_WAY_MAX, (count - named[user]) // 2) :] if count - named[user] > 1 else []
        for node in going:
            del self._entries[node]
        self._gone += going
        if not going:
            self._in_vain.add(user)
        return bool(going)

    def turn(self, now: float) -> Moves:
        """What is to be done now. It counts as done."""
        moves = Moves([], [*self._gone], [], self._gone)
        self._gone = []
        self._in_vain.clear()
        for node, entry in self._entries.items():
            if self._works(node):
                entry.worked_at, entry.proven = now, entry.dialed or entry.proven
        dials = Counter(e.user for e in self._entries.values() if e.dialed is not None and e.proven is None)
        waiting = {user_of(job) for e in self._entries.values() if e.dialed is None for job in e.proposals}
        for node, entry in list(self._entries.items()):
            if self._works(node):
                continue
            if entry.dialed is not None and now - entry.dialed_at >= TURN_S and len(entry.addresses()) > 1:
                self._dial(entry, entry.following(), now, moves)
            elif self._gives_way(entry, waiting, now):
                dials[entry.user] -= 1
                entry.dialed = None
                moves.close.append(node)
                self._entries[node] = self._entries.pop(node)  # to the end
        for node, entry in self._entries.items():
            if entry.dialed is None and node not in moves.close and self._may_dial(entry, dials):
                self._dial(entry, entry.addresses()[0], now, moves)
            if entry.dialed is None and not entry.told and now - entry.since > self._unreached_after_s:
                entry.told = True
                moves.unreached.append(node)
        return moves

    @staticmethod
    def _gives_way(entry: _Entry, waiting: set[str], now: float) -> bool:
        return (
            entry.dialed is not None and entry.proven is None and entry.user in waiting and now - entry.dialed_at >= DIAL_S
        )

    @staticmethod
    def _may_dial(entry: _Entry, dials: Counter[str]) -> bool:
        if entry.proven is not None:
            return True
        for user in map(user_of, entry.proposals):
            if dials[user] < DIALS_MAX:
                dials[user] += 1
                entry.user = user
                return True
        return False

    @staticmethod
    def _dial(entry: _Entry, info: NodeInfo, now: float, moves: Moves) -> None:
        entry.dialed, entry.dialed_at, entry.told = info, now, True  # from now on its link tells
        moves.open.append(info)
