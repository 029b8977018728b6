"""An S3 server that does as little as one can: objects in memory, no signatures and no sums looked at. What ckptd and plain obstore
are measured against; in a process of its own. ``python -m bench.object_server`` prints its port.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

HEAD_BYTES_MAX = 64 << 10
BUCKET = "bench"
SPARE_BYTES_MAX = 6 << 30  # of deleted objects, whose memory is warm


class Stored(NamedTuple):
    parts: list[memoryview]
    e_tag: str
    meta: dict[str, str]
    at_s: float

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def spans(self, start: int, stop: int) -> Iterator[memoryview]:
        at = 0
        for part in self.parts:
            if max(start, at) < min(stop, at + len(part)):
                yield part[max(start - at, 0) : stop - at]
            at += len(part)


class Store:
    """Memory of what is deleted is used again: its first touch takes longer than all that is measured here."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, dict[int, memoryview]] = {}
        self.numbers = itertools.count(1)
        self._spare: dict[int, list[memoryview]] = {}
        self._spare_bytes = 0

    def room(self, nbytes: int) -> memoryview:
        with self.lock:
            spare = self._spare.get(nbytes)
            if spare:
                self._spare_bytes -= nbytes
                return spare.pop()
        return memoryview(bytearray(nbytes))

    def put(self, key: str, parts: list[memoryview], meta: dict[str, str], absent: bool, match: str) -> str | None:
        """Its entity tag; None: the condition does not hold."""
        with self.lock:
            old = self.objects.get(key)
            if (absent and old is not None) or (match and (old is None or old.e_tag != match)):
                return None
            self._free(old)
            self.objects[key] = Stored(parts, f'"{next(self.numbers)}"', meta, time.time())
            return self.objects[key].e_tag

    def delete(self, key: str) -> None:
        with self.lock:
            self._free(self.objects.pop(key, None))

    def _free(self, gone: Stored | None) -> None:
        for part in gone.parts if gone is not None else ():
            if self._spare_bytes + len(part) <= SPARE_BYTES_MAX:
                self._spare.setdefault(len(part), []).append(part)
                self._spare_bytes += len(part)


STORE = Store()


class Connection(socketserver.BaseRequestHandler):
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        while self._one():
            pass

    def _one(self) -> bool:
        while b"\r\n\r\n" not in self._rest:
            more = self.request.recv(HEAD_BYTES_MAX)
            if not more:
                return False
            self._rest += more
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = self._body(int(headers.get("content-length", 0)))
        url = urlsplit(target)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        self._answer(method, key, parse_qs(url.query, keep_blank_values=True), headers, body)
        return True

    def _body(self, nbytes: int) -> memoryview:
        room = STORE.room(nbytes)
        have = min(nbytes, len(self._rest))
        room[:have], self._rest = self._rest[:have], self._rest[have:]
        while have < nbytes:
            have += self.request.recv_into(room[have:])
        return room

    def _answer(
        self, method: str, key: str, query: dict[str, list[str]], headers: dict[str, str], body: memoryview
    ) -> None:
        if method == "PUT" and "uploadId" in query:
            number = int(query["partNumber"][0])
            STORE.uploads[query["uploadId"][0]][number] = body
            self._say(200, {"ETag": f'"part-{number}"'})
        elif method == "PUT" or (method == "POST" and "uploadId" in query):
            upload = STORE.uploads.pop(query["uploadId"][0]) if "uploadId" in query else {1: body}
            meta = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
            parts = [upload[number] for number in sorted(upload)]
            e_tag = STORE.put(key, parts, meta, headers.get("if-none-match") == "*", headers.get("if-match", ""))
            if e_tag is None:
                self._say(412)
            else:
                done = f"<CompleteMultipartUploadResult><ETag>{escape(e_tag)}</ETag></CompleteMultipartUploadResult>"
                self._say(200, {"ETag": e_tag}, done if method == "POST" else "")
        elif method == "POST" and "uploads" in query:
            name = f"upload-{next(STORE.numbers)}"
            STORE.uploads[name] = {}
            self._say(200, {}, f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>")
        elif method == "POST":  # ?delete
            gone = re.findall(r"<Key>(.*?)</Key>", bytes(body).decode())
            for found in map(unescape, gone):
                STORE.delete(found)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in gone)
            self._say(200, {}, f"<DeleteResult>{rows}</DeleteResult>")
        elif method == "DELETE":
            STORE.uploads.pop(query.get("uploadId", [""])[0], None)
            STORE.delete(key)
            self._say(204)
        elif "list-type" in query:
            self._list(query.get("prefix", [""])[0], "delimiter" in query)
        else:
            self._get(key, headers.get("range", ""), with_body=method == "GET")

    def _get(self, key: str, span: str, *, with_body: bool) -> None:
        found = STORE.objects.get(key)
        if found is None:
            self._say(404, {}, "<Error><Code>NoSuchKey</Code></Error>" if with_body else "")
            return
        start, stop, status = 0, found.size, 200
        told = {"ETag": found.e_tag, "Last-Modified": formatdate(found.at_s, usegmt=True), **found.meta}
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(found.size, int(last) + 1), 206
            told["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size}"
        self._say(status, told, nbytes=stop - start)
        for part in found.spans(start, stop) if with_body else ():
            self.request.sendall(part)

    def _list(self, prefix: str, folded: bool) -> None:
        with STORE.lock:
            objects = sorted((key, found) for key, found in STORE.objects.items() if key.startswith(prefix))
        lines, folders = [], dict[str, None]()
        for key, found in objects:
            name, slash, _ = key[len(prefix) :].partition("/")
            if folded and slash:
                folders[f"{prefix}{name}/"] = None
                continue
            at = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.at_s))
            facts = f"<LastModified>{at}</LastModified><ETag>{escape(found.e_tag)}</ETag><Size>{found.size}</Size>"
            lines.append(f"<Contents><Key>{escape(key)}</Key>{facts}</Contents>")
        lines += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
        self._say(200, {}, f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(lines)}</ListBucketResult>")

    def _say(self, status: int, headers: dict[str, str] | None = None, body: str = "", nbytes: int | None = None) -> None:
        data = body.encode()
        told = {"Content-Length": str(len(data) if nbytes is None else nbytes), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        self.request.sendall(f"HTTP/1.1 {status} .\r\n{lines}\r\n".encode("latin-1") + data)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 128


@contextmanager
def running() -> Iterator[None]:
    """A server of one's own, unless the environment names an endpoint already."""
    if "AWS_ENDPOINT_URL" in os.environ:
        yield
        return
    process = subprocess.Popen([sys.executable, "-m", "bench.object_server"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        own = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1"}
        os.environ.update(own | {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"})
        yield
    finally:
        os.environ.pop("AWS_ENDPOINT_URL", None)
        process.kill()
        process.wait()


def main() -> None:
    with Server(("127.0.0.1", 0), Connection) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
