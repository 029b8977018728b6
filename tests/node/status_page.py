"""The daemon's page with answers of a test, for commands that ask it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptd.observe.http import HttpServer, Routes
from ckptd.observe.sight import Sight


class Page:
    """A real HttpServer in a thread of its own, announced where ``--socket`` of this folder says."""

    def __init__(self, folder: Path, answers: Mapping[str, dict[str, Any]]) -> None:
        self._answers, self._announce = answers, folder / "ckptd.http"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = HttpServer("127.0.0.1", 0, self._routes(), announce=self._announce)
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(10)

    def _routes(self) -> Routes:
        async def status(sight: Sight) -> dict[str, Any]:
            return self._answers["status"]

        async def listed(sight: Sight) -> dict[str, Any]:
            return self._answers["ls"]

        return Routes(lambda sight: b"", lambda sight: {"ok": True}, status, listed)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
