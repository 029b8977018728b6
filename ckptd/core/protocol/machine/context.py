"""What all parts of one job's machine share on a node: who we are, which epoch it is, who is up, what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ckptd.core.ids import EpochRecord, NodeInfo, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol.events import Computed
from ckptd.core.protocol.instructions import Compute, Connect, Instruction, Send
from ckptd.core.protocol.life import NO_TOMBSTONE, Tombstone
from ckptd.core.protocol.messages import Message
from ckptd.core.redundancy.policies import Redundancy
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout

T = TypeVar("T")

RESEND_S = 0.5  # what was not answered is said again after this
MEMBER_AWAY_S = 20.0  # beyond steward_timeout_s; a link that broke is back long before
LAYOUTS_CACHED_MAX = 512


@lru_cache(maxsize=LAYOUTS_CACHED_MAX)
def decode_layout(data: bytes) -> Layout:
    """Raises ValueError: not a well-formed layout."""
    return Layout.decode(data)


class Tables:
    """The tables of this job's layouts that this node knows, as long as somebody has them. What a user's ranks name is looked up
    nowhere else."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, Table] = WeakValueDictionary()

    def learn(self, layout: Layout) -> Layout:
        table = layout.fragments.table
        self._known[table.digest] = table
        return layout

    def read(self, data: bytes) -> Layout:
        """Of a layout or a leaf. Raises TableNotHere; ValueError: it is neither."""
        try:
            layout = decode_layout(data)
        except ValueError:
            layout = Layout.decode(data, self._known.get)
        return self.learn(layout)

    def alive(self) -> list[Table]:
        """Other threads may let go of tables meanwhile."""
        return [table for reference in self._known.valuerefs() if (table := reference()) is not None]


@dataclass
class Context:
    job: str
    me: NodeInfo
    policy: Policy
    now: float = 0.0
    out: list[Instruction] = field(default_factory=list)
    tables: Tables = field(default_factory=Tables)
    in_force: Redundancy | None = None  # what the steward says of this epoch; None: what the policy wants
    record: EpochRecord | None = None
    ran: EpochRecord | None = None  # the newest one before ``record`` that trained here
    done: bool = False  # all ranks of ``record`` have restored: its steps count
    never: bool = False  # they certainly have not
    sealed: int = 0  # newest epoch in which all ranks here had sealed a snapshot, as it is written down
    tombstone: Tombstone = NO_TOMBSTONE  # of an earlier life of the job, forgotten here
    ordered: int = 0  # newest epoch that was forgotten by order elsewhere, while ranks of ours may still come back to it
    leaving: frozenset[str] = frozenset()  # nodes that are about to go, as the steward says
    down: dict[str, float] = field(default_factory=dict)  # node -> since
    spoke_at: dict[str, float] = field(
        default_factory=dict
    )  # node whose link is down, as we were told last -> when it spoke
    nodes: dict[str, NodeInfo] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)  # node -> the epoch as of which it is where ``nodes`` says
    _computing: dict[int, Callable[[Any], None]] = field(default_factory=dict)  # by number: who goes on with what is computed
    _computes: int = 0

    @property
    def forgotten(self) -> Tombstone:
        """What a start is told: of what this node waits to forget, too."""
        return Tombstone(self.ordered, self.ordered).over(self.tombstone)

    def emit(self, *instructions: Instruction) -> None:
        self.out += instructions

    def send(self, to: str, message: Message) -> None:
        self.out.append(Send(to, message))

    def compute(self, call: Callable[[], T], then: Callable[[T], None]) -> None:
        """Elsewhere, and go on with what comes of it."""
        self._computes += 1
        self._computing[self._computes] = then
        self.emit(Compute(self._computes, call))

    def on_computed(self, event: Computed) -> None:
        """Raises what the call raised."""
        then = self._computing.pop(event.number)
        if event.error is not None:
            raise event.error
        then(event.value)

    def learn(self, nodes: Iterable[NodeInfo], number: int) -> None:
        """Keep links to these nodes; their domains count. ``number``: the epoch as of which they are there: a node may have moved
        since an older one."""
        newest = [node for node in nodes if number >= self.placed.get(node.node, number)]
        self.placed.update((node.node, number) for node in newest)
        new = tuple(node for node in newest if self.nodes.get(node.node) != node)
        if new:
            self.nodes.update((node.node, node) for node in new)
            self.emit(Connect(new))

    def learn_of(self, record: EpochRecord) -> None:
        """Its holders are where those who decided it knew them to be: as of an epoch before it."""
        self.learn(record.nodes, record.number)
        self.learn(record.holders, record.before[0])

    def trained_in(self, attempt: str) -> bool:
        """The epoch we know is the one that ranks of this attempt train in. It is an older one of the same attempt, whose restore
        was tried again, if they have sealed something since: the newer one could not be written down."""
        return self.record is not None and self.record.nonce == attempt and self.sealed <= self.record.number

    def is_up(self, node: str) -> bool:
        """Nobody has told us that it is gone. Our own daemon is always up."""
        return node not in self.down or node == self.me.node

    def lost(self, node: str, beyond_s: float = 0.0) -> bool:
        """Gone for so long that others take its place, or for some seconds more."""
        since = self.down.get(node)
        return since is not None and self.now - since >= self.policy.steward_timeout_s + beyond_s

    def domain(self, node: str) -> str:
        known = self.nodes.get(node)
        return known.domain if known is not None else node

    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of the newest epoch that live here."""
        return local_ranks(self.record, self.me.node)

    @property
    def redundancy(self) -> Redundancy:
        """How new snapshots are protected now."""
        return self.in_force or self.policy.redundancy

    @property
    def number(self) -> int:
        return self.record.number if self.record is not None else 0

    def is_candidate(self, snapshot: SnapshotId) -> bool:
        return self.record is not None and self.record.is_candidate(snapshot)


def local_ranks(record: EpochRecord | None, node: str) -> tuple[int, ...]:
    return ranks_by_node(record).get(node, ()) if record is not None else ()


@lru_cache(maxsize=64)
def ranks_by_node(record: EpochRecord) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(record.ranks):
        found.setdefault(node, []).append(rank)
    return {node: tuple(ranks) for node, ranks in found.items()}


@lru_cache(maxsize=64)
def audience(record: EpochRecord) -> tuple[str, ...]:
    """Whom an epoch concerns: its members and daemons outside that hold memory of an ancestor."""
    return tuple(
        dict.fromkeys([*(node.node for node in record.nodes), *(node.node for node in record.holders)])
    )


def is_told(record: EpochRecord, node: str, *, holds: bool) -> bool:
    """Does it hear what becomes of the job's snapshots? One without ranks in this epoch, that holds nothing of the job any more, is
    looked for by nobody: the next epoch may open without it."""
    return node in record.ranks or (holds and node in audience(record))


@lru_cache(maxsize=64)
def place_in_order(record: EpochRecord, node: str) -> int:
    """Place in the succession of the steward; outsiders come last."""
    names = succession(record)
    return names.index(node) if node in names else len(names)


@lru_cache(maxsize=64)
def succession(record: EpochRecord) -> tuple[str, ...]:
    """Members in the order in which they become steward: the node of rank 0, then the others as they sit."""
    return tuple(dict.fromkeys([*record.ranks[:1], *(member.node for member in record.nodes)]))
