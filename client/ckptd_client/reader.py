"""Reading a job from a process that is none of its ranks: open(). Training hears nothing of it, and waits for nobody."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import msgpack
import torch
from torch import Tensor

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.dtypes import ITEMSIZE
from ckptd.core.state_map.pieces import Loads, Placed
from ckptd.wire import rank as wire
from ckptd.wire.names import job_key
from ckptd.wire.seqpacket import FrameError, RankSocket, close_all, memfd_object, read_memfd_object
from ckptd_client import sockets, tree
from ckptd_client.catalogue import Catalogue
from ckptd_client.explicit import Row, boxes_of, tensors_of
from ckptd_client.load import Memory, copy_pieces
from ckptd_client.wants import Target, Wanted

TIMEOUT_S = 60.0
ALL = -1  # in place of a rank
ROUND = 1  # of the one look that a connection is for
GONE = "what training has let go of is read from storage or not at all; open() again finds the newest step"


class Reading(Mapping[str, Any]):
    """One step of a job. ``tensors``: key -> (dtype, shape). As a mapping: what is no tensor, by name, bytes or what was registered
    under it; of what each rank had for itself {rank: that}. ``own``: keys and names of such; ``world``: so many ranks saved it;
    ``catalogue``: all that the daemon says of it, roles and aliases too."""

    def __init__(self, sock: RankSocket, job: str, timeout_s: float) -> None:
        self._socket, self._job, self._timeout_s = sock, job, timeout_s
        self.step, self.epoch = -1, -1
        self.catalogue = Catalogue({}, {}, frozenset())
        self._reads = threading.Lock()  # one at a time, whoever asks
        self._owed = False  # an answer, or what follows it

    def look(self, step: int | None, source: str | None, nodes: Sequence[Mapping[str, Any]]) -> Reading:
        self._say(wire.Hello(wire.PROTOCOL_VERSION, self._job, os.getpid()))
        self._hear(wire.Welcome)
        self._say(wire.Look(ROUND, step, source, [dict(node) for node in nodes]))
        opened, fds = self._hear(wire.Opened)
        try:
            self.epoch, self.step = opened.snapshot
            self.catalogue = Catalogue.decode(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), 0)
        finally:
            close_all(fds)
        self.tensors, self.world = tensors_of(self.catalogue), self.catalogue.world
        self.own = frozenset(name[2:] for name in self.catalogue.per_rank)
        self._names = {name for name in self.catalogue.objects if not name.startswith("$")}
        return self

    def read(self, rows: Iterable[Row], rank: int | None = None) -> None:
        """(key, offsets, sizes, out), out of that shape, on any device; another dtype is converted. rank: whose value, of what each
        rank had for itself. Raises CkptdError for rows that do not fit, and when what they name is not to be had any more."""
        boxes, converted = boxes_of(rows, self.catalogue, self.step)
        targets = []
        for box in boxes:
            own, had = self.catalogue.is_per_rank("t", box.key), self.catalogue.owners_of(box.key)
            if own and rank not in had:
                raise CkptdError(f"each rank had its own; rank={rank} is none of {had}", where=box.key, hint="read(rows, rank=)")
            extent = Box(tuple(map(int, box.offsets)), tuple(map(int, box.sizes or box.tensor.shape)))
            if extent.volume:
                dtype, shape, _ = self.catalogue.tensors[box.key]
                targets.append(Target(box.key, dtype, shape, extent, box.tensor, rank=rank if own else None))
        if targets:
            self._bring(Wanted(targets))
        with torch.no_grad():
            for out, found in converted:
                out.copy_(found)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        blobs = self.blobs(name)
        if not self.catalogue.is_per_rank("o", name):
            return tree.decode(blobs[ALL], partial(self._tensor, rank=None))
        return {rank: tree.decode(blob, partial(self._tensor, rank=rank)) for rank, blob in blobs.items() if rank != ALL}

    def blobs(self, name: str) -> dict[int, bytes]:
        """The same as it was saved, by rank where each had its own, and ALL for what is everybody's; the snapshot's "$meta" too."""
        return self._bring(Wanted(objects=[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def _tensor(self, key: str, *, rank: int | None) -> Tensor:
        """Inside of an object."""
        dtype, shape = self.tensors[key]
        found = torch.empty(shape, dtype=dtype)
        self.read([(key, (0,) * len(shape), shape, found)], rank if self.catalogue.is_per_rank("t", key) else None)
        return found

    def _bring(self, wanted: Wanted) -> dict[int, bytes]:
        """Fills the targets. Of the object that is wanted: by rank, and ALL the one of all."""
        with self._reads:
            if self._owed:  # an answer that comes late would be taken for the next one's
                raise CkptdError("a read of it did not come to its end", where=self._job, hint="open() the job again")
            self._owed = True
            blobs = self._brought(wanted)
            self._owed = False
            return blobs

    def _brought(self, wanted: Wanted) -> dict[int, bytes]:
        fd = memfd_object(wanted.encode())
        try:
            self._say(wire.Wants(ROUND), [fd])
        finally:
            os.close(fd)
        began, targets, blobs = time.monotonic(), wanted.targets, dict[int, bytes]()
        loads = Loads([(target.box, ITEMSIZE[target.dtype]) for target in targets])
        while True:
            message, fds = self._hear(wire.LoadPlan)
            plan = msgpack.unpackb(read_memfd_object(fds[0], wire.MEMFD_OBJECT_BYTES_MAX), strict_map_key=False, use_list=False)
            memory = Memory(fds[1:], message.segment_bytes)
            try:
                pieces = Placed.decode(plan["pieces"])
                loads.check(pieces, memory.sizes)
                copy_pieces(targets, loads, pieces, memory)
                blobs = {rank: memory.blob(at) for of in plan["objects_all"].values() for rank, at in of.items()}
                blobs |= dict.fromkeys([ALL], *map(memory.blob, plan["objects"].values())) if plan["objects"] else {}
            finally:
                memory.close()
                close_all(fds)
            if plan["last"]:
                break
            self._say(wire.LoadedPart(ROUND, plan["part"]))
        lacking = loads.lacking(len(targets))
        if lacking is not None:
            raise CkptdError(f"{lacking[1]} elements did not come", where=targets[lacking[0]].key)
        self._say(wire.Loaded(ROUND, True, "", time.monotonic() - began))
        return blobs

    # --- the daemon ---------------------------------------------------------------------------------------------
    def _say(self, message: object, fds: list[int] | None = None) -> None:
        try:
            if self._socket.send(message, fds or [], timeout_s=self._timeout_s):
                return
        except OSError:
            self._hear(wire.Failed)  # why it has closed the connection, if it has said so
            raise
        raise CkptdError(f"the daemon takes nothing for {self._timeout_s:g} s", where=self._job)

    def _hear(self, kind: type) -> tuple[Any, list[int]]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                got = self._socket.recv(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise CkptdError(f"no answer from the daemon within {self._timeout_s:g} s", where=self._job) from error
            except (OSError, FrameError) as error:
                raise CkptdError(f"the connection to the daemon is lost: {error}", where=self._job) from error
            if got is None:
                hint = GONE if self.step >= 0 else "is it of an older release?"
                raise CkptdError("the daemon has closed the connection", where=self._job, hint=hint)
            message, fds = got
            if isinstance(message, wire.Refused):
                raise CkptdError(message.what, where=message.where, hint=message.hint)
            if isinstance(message, wire.Failed):
                self._owed = False
                raise CkptdError(message.reason, where=self._job, hint=message.hint or GONE)
            if isinstance(message, kind):
                return message, fds
            close_all(fds)

    def close(self) -> None:
        """Waits for a read of another thread."""
        with self._reads:
            if self._socket.fileno() >= 0:
                with contextlib.suppress(OSError):  # the daemon is gone
                    self._socket.send(wire.Goodbye(True))  # a closed socket alone may be the beginning of a process's death
                self._socket.close()

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_job(
    job: str, step: int | None = None, source: str | None = None, *, socket: str | os.PathLike[str] | None = None,
    nodes: Sequence[Mapping[str, Any]] = (), timeout_s: float = TIMEOUT_S,
) -> Reading:  # fmt: skip
    """The newest step of a job that memory or storage has whole, or ``step``: read only, from any process of the job's user, beside
    its training. ``with ckptd_client.open("run") as found: found.read([("model.head.weight", offsets, sizes, out)])``.

    The daemon at ``socket``, CKPTD_SOCKET or where `ckptd run` listens is asked: one of a node that the job runs on, or one that
    sees its storage; any other takes ``nodes``, some that the job runs on (``Client.node`` there). source: "memory" or "durable"
    alone. A step that training has replaced meanwhile, and that is not on storage, cannot be read to its end. timeout_s: of each
    answer. Raises CkptdError: no daemon, no such job or step.
    """
    if source not in (None, "memory", "durable"):
        raise ValueError(f'source is None, "memory" or "durable", not {source!r}')
    job_key(os.geteuid(), job)
    path = os.fspath(socket) if socket is not None else sockets.default(to_start=False)
    try:
        sock = RankSocket.connect(path)
    except OSError as error:
        hint = "start `ckptd run` on this node"
        raise CkptdError(f"no daemon at {path}: {error.strerror or error}", where=job, hint=hint) from error
    reading = Reading(sock, job, timeout_s)
    try:
        return reading.look(step, source, nodes)
    except BaseException:
        reading.close()
        raise
