"""The daemon's page on loopback: GET /metrics, /healthz, /status, /ls (starlette on uvicorn, in the daemon's own loop)."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ckptd.core.errors import CkptdError
from ckptd.observe.sight import NOBODY, Sight, sight_of
from ckptd.thread_pool import ThreadPool

log = logging.getLogger("ckptd.observe")

CONNECTIONS_MAX = 256  # at once; more are answered 503
REQUEST_S = 5.0  # from the connection to the end of its first request's headers
KEEP_ALIVE_S = 5
STOP_GRACE_S = 1  # open answers may end within this
LOOKS_MAX = 2  # threads that find out who asks
ANSWER_TIMEOUT_S = 10.0  # /status asks other nodes; it must not hang on a dead one
START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Routes:
    """What the daemon answers, given what the caller may see. metrics: Prometheus text; the others: JSON values."""

    metrics: Callable[[Sight], bytes]
    health: Callable[[Sight], Mapping[str, Any]]  # "ok" decides between 200 and 503
    status: Callable[[Sight], Awaitable[Mapping[str, Any]]]
    ls: Callable[[Sight], Awaitable[Mapping[str, Any]]]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the daemon."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class HttpServer:
    """``start()`` binds (port 0: any free one) and serves; ``stop()`` ends it. ``announce`` is the file in which
    ``ckptd status`` finds ``host:port``. ``trusted``: uids beside root and our own that see every user's jobs.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: Routes,
        *,
        announce: Path | None = None,
        trusted: Iterable[int] = (),
    ) -> None:
        if not ipaddress.IPv4Address(host).is_loopback:
            raise CkptdError(
                "the status page is for loopback only", where=host, hint="set http_address to 127.0.0.1"
            )
        self._wanted = (host, port)
        self._routes, self._announce, self._trusted = routes, announce, tuple(trusted)
        self._server: _Server | None = None
        self._looks = ThreadPool(LOOKS_MAX, "sight", ready=LOOKS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._unannounced = ""  # why the address does not stand in its file yet
        self.address: tuple[str, int] = self._wanted

    async def start(self) -> None:
        """Raises CkptdError when the port is taken."""
        listener = self._bind()
        self.address = listener.getsockname()
        self._server = _Server(self._config())
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="ckptd-http")
        await asyncio.wait_for(self._server.up.wait(), START_TIMEOUT_S)
        self._unannounced = self._write_announcement()
        if self._unannounced:
            text = "no `ckptd status` finds this daemon until its address is written down: %s [%s]"
            log.warning(text, self._unannounced, self._announce)
        self._sweeping = asyncio.create_task(self._sweep(self._server.server_state.connections), name="ckptd-http-sweep")

    async def _sweep(self, connections: Collection[Any]) -> None:
        """uvicorn waits for ever for a request that was begun, and counts who began one."""
        begun: dict[Any, float] = {}
        while True:
            self._unannounced = self._unannounced and self._write_announcement()
            now = asyncio.get_running_loop().time()
            begun = {one: begun.get(one, now) for one in connections if getattr(one, "cycle", None) is None}
            for one, since in begun.items():
                if now - since > REQUEST_S and one.transport is not None:
                    one.transport.close()
            await asyncio.sleep(REQUEST_S / 5)

    async def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._announce is not None:
            self._announce.unlink(missing_ok=True)
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        self._server = self._task = None
        self._looks.shutdown(wait=False)

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(self._wanted)
        except OSError as error:
            listener.close()
            where = "{}:{}".format(*self._wanted)
            raise CkptdError(
                f"the status page cannot bind: {error}", where=where, hint="set http_port to 0"
            ) from error
        return listener

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app(),
            log_config=None,
            log_level="error",  # below it comes a line for each request of garbage, as many as anybody likes
            access_log=False,
            lifespan="off",
            ws="none",
            http="h11",
            server_header=False,
            proxy_headers=False,  # the caller is who the kernel says, not who a header says
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )

    def _app(self) -> Starlette:
        # Names of this machine only: a web page that makes its own name resolve to 127.0.0.1 reads nothing.
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[self._wanted[0], "127.0.0.1", "localhost"])
        paths = {
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/status": self._status,
            "/ls": self._ls,
        }
        return Starlette(routes=[Route(path, answer) for path, answer in paths.items()], middleware=[hosts])

    def _write_announcement(self) -> str:
        """Why it failed, "": it did not. A full disk is no reason not to serve: the memory may be nowhere else."""
        if self._announce is None:
            return ""
        fresh = self._announce.with_name(self._announce.name + f".{os.getpid()}")
        try:
            fresh.write_text("{}:{}\n".format(*self.address))
            fresh.chmod(0o644)
            fresh.replace(self._announce)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            return str(error)
        return ""

    async def _sight(self, request: Request) -> Sight:
        if request.client is None:
            return NOBODY
        caller = (request.client.host, request.client.port)
        with suppress(OSError):  # no /proc, or no thread for it: a stranger
            looking = self._looks.submit(sight_of, caller, self.address, self._trusted)
            return await asyncio.wrap_future(looking)
        return NOBODY

    async def _metrics(self, request: Request) -> Response:
        return Response(self._routes.metrics(await self._sight(request)), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        body = self._routes.health(await self._sight(request))
        return JSONResponse(dict(body), status_code=200 if body["ok"] else 503)

    async def _status(self, request: Request) -> Response:
        return await self._answer(self._routes.status(await self._sight(request)))

    async def _ls(self, request: Request) -> Response:
        return await self._answer(self._routes.ls(await self._sight(request)))

    async def _answer(self, body: Awaitable[Mapping[str, Any]]) -> Response:
        try:
            return JSONResponse(dict(await asyncio.wait_for(body, ANSWER_TIMEOUT_S)))
        except (TimeoutError, asyncio.TimeoutError):
            return JSONResponse({"error": f"no answer within {ANSWER_TIMEOUT_S:g} s"}, status_code=504)
        except CkptdError as error:
            return JSONResponse(
                {"error": error.what, "where": error.where, "hint": error.hint}, status_code=500
            )
