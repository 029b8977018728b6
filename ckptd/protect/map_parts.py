"""Layouts by their ids, asked of the daemons that hold snapshots with them (design D17): no message names more than one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.fragments import Table
from ckptd.core.state_map.layout import Layout
from ckptd.protect.fetched import Away
from ckptd.protect.settle import Answers, Tasks
from ckptd.wire.peer import MapAsk, MapPart

ASK_TIMEOUT_S = 30.0
TABLES_MAX = 256  # named in one question: a job has as many shapes of ranks as pipeline stages, or a few more
NOT_HELD = "nothing with this layout is held here"

Send = Callable[[str, str, object], bool]


class MapParts:
    """``held(job)``: of what this daemon holds of the job, by id."""

    def __init__(self, send: Send, work: Executor) -> None:
        self._send, self._work = send, work
        self._answers: Answers[MapPart] = Answers()
        self._tasks = Tasks()
        self._serving: set[tuple[str, str]] = set()
        self.held: Callable[[str], Mapping[str, Layout]] = lambda job: {}

    def on_message(self, node: str, job: str, message: object) -> bool:
        """True: it was for us."""
        if isinstance(message, MapAsk):
            if (node, message.transfer) not in self._serving:  # it says it again until it has an answer
                self._serving.add((node, message.transfer))
                self._tasks.spawn(self._serve(node, job, message))
        elif isinstance(message, MapPart):
            self._answers.came(message.transfer, message)
        else:
            return False
        return True

    async def ask(self, job: str, node: str, layout_id: str, tables: Collection[Table] = ()) -> Layout:
        """``tables``: those that are here, and stay here until the answer has come. Raises CkptdError: it is not there, or not what
        was asked for; Away when nobody answers."""
        known = {table.digest: table for table in tables}  # others add to them meanwhile
        request = MapAsk(secrets.token_hex(16), layout_id, tuple(known)[:TABLES_MAX])
        part = await self._answers.ask(request.transfer, lambda: self._send(node, job, request), ASK_TIMEOUT_S)
        if part is None:
            raise Away("a layout was asked for: no answer", where=node)
        if not part.data:
            raise CkptdError(NOT_HELD, where=node)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._work, _decode, layout_id, part.data, known)
        except ValueError as error:
            raise CkptdError(f"what was sent for a layout is none: {error}", where=node) from error

    async def _serve(self, node: str, job: str, request: MapAsk) -> None:
        try:
            found, data = self.held(job).get(request.layout_id), b""
            if found is not None:
                data = await asyncio.get_running_loop().run_in_executor(self._work, _encode, found, request.tables)
            self._send(node, job, MapPart(request.transfer, data))
        finally:
            self._serving.discard((node, request.transfer))


def _encode(layout: Layout, tables: Collection[str]) -> bytes:
    return layout.leaf if layout.fragments.table.digest in tables else layout.encoded


def _decode(layout_id: str, data: bytes, tables: Mapping[str, Table]) -> Layout:
    layout = Layout.decode(data, tables.get)
    if layout.layout_id != layout_id:
        raise ValueError("another layout")
    return layout
