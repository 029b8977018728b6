"""A member of an epoch that is being opened: node b, with ranks 1 and 2; the test plays the steward-elect, node a."""

from __future__ import annotations

from typing import Any

from ckptd.core.ids import EpochRecord, SnapshotId
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from tests.core.machines import EPOCH, Node, at, layout, record_of, sent

POLICY = Policy(replicas=1, durable=False, restore_timeout_s=10.0, join_timeout_s=20.0, inventory_timeout_s=2.0)
BEFORE = record_of("abb", number=EPOCH - 1, nonce="before")
RECORD = record_of("abb", ancestry=(at(5, EPOCH - 1),))
WHOLE = at(5, EPOCH - 1)
ASK = msg.RestoreAsk()


def member(policy: Policy = POLICY) -> Node:
    """Node b, with ranks 1 and 2, in the epoch before; it holds a snapshot of it."""
    made = Node("b", BEFORE, policy)
    for rank in (1, 2):
        made.feed(ev.HoldingFound(rank, WHOLE, rank, 0, True, layout(rank, 3), ()))
    return made


def join(node: Node, *ranks: int, attempt: str = "now", ask: Any = ASK, **more: Any) -> list[ins.Instruction]:
    done: list[ins.Instruction] = []
    for rank in ranks:
        done += node.feed(ev.RankJoined(rank, attempt, RECORD.ranks, RECORD.nodes, ask, **{"running": False, **more}))
    return done


def opened(node: Node, record: EpochRecord = RECORD, snapshot: SnapshotId | None = WHOLE) -> list[ins.Instruction]:
    return node.hear("a", msg.EpochOpen(record.nonce, record, record.number, snapshot, False, errors=("why",)))


def votes(done: list[ins.Instruction]) -> list[tuple[int, str, bool, str]]:
    return [(v.rank, v.phase, v.ok, v.code) for v in sent(done, msg.Vote, "a")]


def restoring(node: Node) -> Node:
    """Both ranks stand there, the epoch is open, they fetch."""
    join(node, 1, 2)
    opened(node)
    return node


def fetched(node: Node, *ranks: int, ok: bool = True, code: str = "") -> list[ins.Instruction]:
    return node.feed(*(ev.RankFetched(rank, EPOCH, ok, code) for rank in ranks))


def loaded(node: Node, *ranks: int, ok: bool = True) -> list[ins.Instruction]:
    return node.feed(*(ev.RankLoaded(rank, EPOCH, ok) for rank in ranks))


def go(node: Node, round_: int = EPOCH, epoch: int = EPOCH) -> list[ins.Instruction]:
    return node.hear("a", msg.RestoreGo(epoch, round_))
