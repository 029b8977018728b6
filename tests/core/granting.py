"""A steward whose ranks are granted steps."""

from __future__ import annotations

from ckptd.core.policy import Policy
from ckptd.core.protocol import messages as msg
from tests.core.machines import Steward, record_of

POLICY = Policy(replicas=1, durable=False)


def steward(ranks: str = "ab") -> Steward:
    return Steward(record_of(ranks), POLICY)


def granted(node: Steward, to: str = "b", since: int = 0) -> list[int]:
    return [grant.from_step for grant in node.said(msg.Grant, to, since)]
