"""A steward that flushes, and what the nodes of its epoch say of it."""

from __future__ import annotations

from typing import Any

from ckptd.core.policy import Policy
from ckptd.core.protocol import events as ev
from ckptd.core.protocol import instructions as ins
from ckptd.core.protocol import messages as msg
from ckptd.core.protocol.machine.steward.flush import (
    Flush,
)
from tests.core.machines import EPOCH, Steward, only, record_of, sent

OLD = EPOCH - 1


def steward(**policy: Any) -> Steward:
    return Steward(
        record_of(), Policy(**{"replicas": 1, "durable": True, "breakpoint_grace_s": 3.0, **policy})
    )


def flushing(node: Steward) -> Flush | None:
    return node.machine.steward.flushing.flush


def step_of(node: Steward) -> int | None:
    flush = flushing(node)
    return flush.snapshot.step if flush is not None else None


def ask(node: Steward, step: int | None = None) -> list[ins.Instruction]:
    """And the tick that looks at it."""
    return node.hear("b", msg.FlushAsk(EPOCH, step)) + node.tick()


def orders(done: list[ins.Instruction], to: str = "") -> list[msg.WriteOrder]:
    return sent(done, msg.WriteOrder, to)


def wrote(
    node: Steward, who: str, ok: bool = True, attempt: str = "", reason: str = ""
) -> list[ins.Instruction]:
    flush = flushing(node)
    assert flush is not None
    return node.hear(
        who, msg.Wrote(EPOCH, flush.snapshot, attempt or flush.attempt, ok, reason, who.encode())
    )


def written(node: Steward) -> list[ins.Commit]:
    """Both nodes report; this node's own shell too."""
    flush = flushing(node)
    assert flush is not None
    done = wrote(node, "b")
    done += node.feed(ev.FilesWritten(flush.snapshot, flush.attempt, True, "", b"a"))
    return only(done, ins.Commit)


def committed(node: Steward, ok: bool = True, attempt: str = "", reason: str = "") -> list[ins.Instruction]:
    flush = flushing(node)
    assert flush is not None
    return node.feed(ev.CommitDone(flush.snapshot, attempt or flush.attempt, ok, reason))


def flush_now(node: Steward, step: int) -> None:
    ask(node, step)
    written(node)
    committed(node)


def alarms(node: Steward, kind: str) -> list[str]:
    return [do.text for do in only(node.done, ins.Alarm) if do.kind == kind]
