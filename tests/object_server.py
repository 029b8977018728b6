"""Servers of objects with faults: moto's S3 in this process, and the way to one in a process of its own.

moto looks whether a condition holds before it writes, and another request may come in between: a lock makes it what S3 is.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from http.client import HTTPConnection
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import boto3
from moto.server import create_backend_app
from werkzeug.serving import make_server

REGION = "us-east-1"
FORWARDED_WITHIN_S = 60.0
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}


@dataclass
class Fault:
    """What becomes of one request. status: this instead of an answer, and nothing is done; done: it is carried out all the same.
    lost: it is carried out, and the connection breaks before the answer. cut: so many bytes of the answer's body arrive. blind: its
    conditions are not looked at. flip: the bit of the answer's body that is another one, counted from its middle on. slow_s: the
    answer's body comes in so many ``pieces``, with this pause before each. late: a list does not know yet what was put."""

    status: int = 0
    code: str = ""
    done: bool = False
    lost: bool = False
    blind: bool = False
    cut: int | None = None
    flip: int | None = None
    slow_s: float = 0.0
    pieces: int = 4
    late: bool = False


@dataclass
class Request:
    """span: of the object, as it was asked for; "": all of it. sent: so many bytes of the answer's body were given to the
    connection."""

    number: int
    method: str
    path: str
    query: str
    span: str = ""
    sent: int = 0

    @property
    def writes(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")


Faults = Callable[[Request], Fault | None]


class FaultyServer:
    """``requests``: all that came. ``faults``: asked for each before it is carried out, by ``app``; ``together``: many at once."""

    def __init__(self, app: Callable[..., Iterable[bytes]], *, together: bool = False) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = app
        self._lock = threading.Lock()
        self._turn: AbstractContextManager[object] = nullcontext() if together else threading.Lock()
        self.requests: list[Request] = []
        self.faults: Faults | None = None
        self._closing = threading.Event()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="object-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def failing(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        try:
            yield
        finally:
            self.faults = None

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            request = Request(len(self.requests) + 1, environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
            request.span = environ.get("HTTP_RANGE", "")
            self.requests.append(request)
            fault = (self.faults(request) if self.faults is not None else None) or Fault()
        if fault.status and not fault.done:
            return _refusal(fault, start)
        if fault.blind:
            environ.pop("HTTP_IF_NONE_MATCH", None)
            environ.pop("HTTP_IF_MATCH", None)
        if fault.late:
            environ["QUERY_STRING"] = re.sub(r"\bprefix=[^&]*", "prefix=nothing/", environ["QUERY_STRING"])
        said: list[Any] = []
        environ["wsgi.input"] = BytesIO(body)
        with self._turn:
            answer = b"".join(self._app(environ, lambda *args: said.extend(args)))
        if fault.status:
            return _refusal(fault, start)
        if fault.lost:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        start(*said[:2])
        return self._body(request, fault, answer, environ["werkzeug.socket"])

    def _body(self, request: Request, fault: Fault, answer: bytes, connection: socket.socket) -> Iterator[bytes]:
        """Counted piece by piece: of what breaks off the rest is not."""
        if fault.flip is not None and answer:
            answer = _bent(answer, fault.flip)
        cut = fault.cut is not None and len(answer) > fault.cut
        answer = answer[: fault.cut] if cut else answer
        step = -(-len(answer) // fault.pieces) if fault.slow_s else len(answer)
        for at in range(0, len(answer), step or 1):
            if fault.slow_s:
                self._closing.wait(fault.slow_s)
            piece = answer[at : at + step]
            request.sent += len(piece)  # before it goes: whoever has it may look at once
            yield piece
        if cut:
            connection.shutdown(socket.SHUT_RDWR)


class S3Server(FaultyServer):
    """What speaks S3. ``reader``: of boto3, the stock reader, at ``url``, and of whoever shall use it: access key and secret."""

    scheme = "s3://"

    def __init__(
        self, app: Callable[..., Iterable[bytes]], reader: tuple[str, str], url: str = "", *, together: bool = False
    ) -> None:
        super().__init__(app, together=together)
        self._access, self._secret = reader
        keys = {"aws_access_key_id": self._access, "aws_secret_access_key": self._secret}
        self.client: Any = boto3.client("s3", endpoint_url=url or self.url, region_name=REGION, **keys)

    def close(self) -> None:
        super().close()
        self.client.close()

    def environment(self) -> dict[str, str]:
        """Of whoever shall use it."""
        keys = {"AWS_ACCESS_KEY_ID": self._access, "AWS_SECRET_ACCESS_KEY": self._secret, "AWS_REGION": REGION}
        return {"AWS_ENDPOINT_URL": self.url, **keys}

    def new_bucket(self) -> str:
        """Its name. Requests are counted from here on."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.client.create_bucket(Bucket=name)
        self.requests.clear()
        return name

    def keys(self, root: str) -> list[str]:
        """Of all objects below a storage root, relative to it."""
        name, _, prefix = root.removeprefix("s3://").partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=f"{prefix}/")
        return [item["Key"].removeprefix(f"{prefix}/") for page in pages for item in page.get("Contents", ())]

    def read(self, root: str, key: str) -> bytes:
        """As a stock reader has it. key: one of ``keys``."""
        name, _, prefix = root.removeprefix("s3://").partition("/")
        found: bytes = self.client.get_object(Bucket=name, Key=f"{prefix}/{key}")["Body"].read()
        return found


class ObjectServer(S3Server):
    """S3, by moto."""

    def __init__(self) -> None:
        super().__init__(create_backend_app("s3"), ("ckptd", "secret"))


class Forward:
    """The app that a server elsewhere is. Headers go on as they came: signatures are made over them."""

    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
        body = environ["wsgi.input"].read()
        headers |= {"Content-Length": str(len(body)), "Connection": "close"}
        if environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = environ["CONTENT_TYPE"]
        target = environ["RAW_URI"].partition("?")[0] + (f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else "")
        link = HTTPConnection(self._netloc, timeout=FORWARDED_WITHIN_S)
        try:
            link.request(environ["REQUEST_METHOD"], target, body, headers)
            answer = link.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP]
            start(f"{answer.status} {answer.reason}", kept)
            return [answer.read()]
        finally:
            link.close()


def _bent(answer: bytes, flip: int) -> bytes:
    bent = bytearray(answer)
    bit = (4 * len(bent) + flip) % (8 * len(bent))
    bent[bit // 8] ^= 1 << bit % 8
    return bytes(bent)


def _refusal(fault: Fault, start: Callable[..., Any]) -> list[bytes]:
    body = f"<Error><Code>{fault.code or 'InternalError'}</Code><Message>as the test asks</Message></Error>".encode()
    start(f"{fault.status} refused", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]
