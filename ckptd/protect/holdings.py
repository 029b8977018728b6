"""What the daemons of a job hold of it, for one who reads it and is no rank (design D11): nobody decides, nothing is frozen."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

from ckptd.core.ids import SnapshotId
from ckptd.protect.settle import Answers
from ckptd.wire.peer import HoldingsAsk, HoldingsTold, ReadBy

ASK_TIMEOUT_S = 5.0

Send = Callable[[str, str, object], bool]


class Reads(Protocol):
    """Of one job, on this node."""

    def told(self, ask: HoldingsAsk) -> HoldingsTold: ...
    def read(self, reader: str, snapshots: Collection[SnapshotId]) -> None: ...


class Holdings:
    """``reads(job)``: None where nothing is known of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._answers: Answers[HoldingsTold] = Answers()
        self.reads: Callable[[str], Reads | None] = lambda job: None

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        reads = self.reads(job)
        if isinstance(message, HoldingsAsk):
            ask = replace(message, reader=f"{node}/{message.reader}")
            self._send(node, job, reads.told(ask) if reads is not None else HoldingsTold(message.transfer))
        elif isinstance(message, HoldingsTold):
            self._answers.came(message.transfer, message)
        elif isinstance(message, ReadBy):
            if reads is not None:
                reads.read(f"{node}/{message.reader}", message.snapshots)
        else:
            return False
        return True

    async def ask(self, job: str, nodes: Collection[str], reader: str) -> dict[str, HoldingsTold]:
        """By node, of those that answer in time."""
        told = await asyncio.gather(*(self._ask(job, node, reader) for node in nodes))
        return {node: answer for node, answer in zip(nodes, told, strict=True) if answer is not None}

    async def _ask(self, job: str, node: str, reader: str) -> HoldingsTold | None:
        request = HoldingsAsk(secrets.token_hex(16), reader)
        return await self._answers.ask(request.transfer, lambda: self._send(node, job, request), ASK_TIMEOUT_S)

    def tell(self, job: str, nodes: Collection[str], reader: str, snapshots: tuple[SnapshotId, ...]) -> None:
        for node in nodes:
            self._send(node, job, ReadBy(reader, snapshots))
