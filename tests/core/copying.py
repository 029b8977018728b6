"""A node that copies what its rank captures; the test plays the peers."""

from __future__ import annotations

from ckptd.core.ids import EpochRecord
from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from tests.core.machines import EPOCH, Member, at, only, record_of

FOUR = record_of("abcd")


def member(record: EpochRecord = FOUR, replicas: int = 1, name: str = "b", **more: float) -> Member:
    """Its rank has slots 1 to 4. In four nodes a and b hold each other's copies, c and d stand in."""
    policy = Policy(replicas=replicas, durable=False, **more)  # type: ignore[arg-type]
    node = Member(record, policy, name=name)
    node.slots(1, 1, 2, 3, 4)
    return node


def copies(done: list[ins.Instruction]) -> list[tuple[int, int, str]]:
    """(step, tier, to) of each that began."""
    return [(do.snapshot.step, do.tier, do.to) for do in only(done, ins.Replicate)]


def sent(
    node: Member, step: int, to: str, ok: bool = True, *, tier: int = 1, rank: int = 1, why: str = "full"
) -> list[ins.Instruction]:
    return node.feed(ev.ReplicaSent(at(step), rank, tier, to, ok, "" if ok else why))


def holders(
    node: Member, step: int, *nodes: tuple[str, int], rank: int = 1, tier: int = -1
) -> list[ins.Instruction]:
    return node.order(msg.Holders(EPOCH, "", at(step), rank, nodes, tier))
