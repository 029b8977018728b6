"""What the daemons of a job hold of it, for one who reads it and is no rank (design D11): nobody decides, nothing is frozen."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace

from ckptd.core.ids import SnapshotId
from ckptd.protect.settle import Answers
from ckptd.wire.peer import HoldingsAsk, HoldingsTold, ReadBy

ASK_TIMEOUT_S = 5.0

Send = Callable[[str, str, object], bool]


class Holdings:
    """``here(job, ask)``: this daemon's own answer. ``read(job, reader, snapshots)``: who reads what of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._answers: Answers[HoldingsTold] = Answers()
        self.here: Callable[[str, HoldingsAsk], HoldingsTold] = lambda job, ask: HoldingsTold(ask.transfer)
        self.read: Callable[[str, str, Collection[SnapshotId]], None] = lambda job, reader, snapshots: None

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, HoldingsAsk):
            self._send(node, job, self.here(job, replace(message, reader=f"{node}/{message.reader}")))
        elif isinstance(message, HoldingsTold):
            self._answers.came(message.transfer, message)
        elif isinstance(message, ReadBy):
            self.read(job, f"{node}/{message.reader}", message.snapshots)
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
