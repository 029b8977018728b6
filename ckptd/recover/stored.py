"""The durable copy of the snapshot to restore, in threads of its own: storage that hangs holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.box_index import BoxIndex
from ckptd.core.state_map.pieces import Piece
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import NotFound, StorageError
from ckptd.recover.passing import Passing, Read
from ckptd.recover.shared import Shared
from ckptd.recover.threads import Threads, all_ended
from ckptd.thread_pool import ThreadPool

READERS_MAX = 4  # threads reading storage for one restore on this node; the reader splits long runs again

T = TypeVar("T")


class Came(NamedTuple):
    """Bytes, by where they came from: ``durable`` from storage itself, ``peer`` from a node that had read them there, ``own`` from
    this node."""

    durable: int
    peer: int
    own: int


class Stored:
    """``ok``: may be used. False from the first failure on: ``why``. ``failed`` hears of each. ``away``: it was no damage, and
    may do later. ``passing``: from and to other nodes."""

    def __init__(
        self, ok: bool, opens: Callable[[], Checkpoint], failed: Callable[[Exception], None], passing: Passing | None = None
    ) -> None:
        self.ok, self.why, self.away = ok, "", False
        self._opens, self._failed = opens, failed
        self._pool = ThreadPool(READERS_MAX, "restore")
        self._threads, self._shared, self._passing = Threads(self._pool), Shared(self._pool), passing
        self._checkpoint: Checkpoint | None = None
        self._opening = asyncio.Lock()

    async def call(self, do: Callable[[Checkpoint], T]) -> T:
        """``do`` in a thread, with the open checkpoint. Raises CkptdError, OSError; then it is not ``ok`` any more."""
        try:
            checkpoint = await self._open()
            return await self._threads.run(do, checkpoint)
        except (CkptdError, OSError) as error:
            if self.ok:
                self._failed(error)
            self.away = is_away(error) and (self.ok or self.away)  # whoever else failed may have found damage
            self.ok = False
            self.why = f"{error.what} [{error.where}]" if isinstance(error, CkptdError) else str(error)
            raise

    def ask_again(self) -> None:
        """It may be back."""
        self.ok, self.away, self.why = self.ok or self.away, False, ""

    async def boxes(self, rank: int) -> BoxIndex | None:
        """What is stored, of what is each rank's own that of ``rank``; None when it cannot be used."""
        if not self.ok:
            return None
        try:
            return await self.call(lambda checkpoint: checkpoint.boxes_for(rank))
        except (CkptdError, OSError):
            return None

    async def read(self, pieces: Iterable[Piece], into: memoryview, *, shared: bool = False) -> Came | None:
        """The pieces one after the other into ``into``. None: something was unreadable, or damaged. shared: what others want, too,
        is read once; ``into`` is not written again before ``forget()``."""
        wanted, at, fills = [*pieces], 0, []
        known: list[int] = []  # bytes that the cache had
        passed: list[int] = []  # and other nodes
        try:
            whose = await self.call(lambda checkpoint: [checkpoint.owner(piece.key, piece.rank) for piece in wanted])
            for piece, owner in zip(wanted, whose, strict=True):
                dest, key = into[at : at + piece.nbytes], (piece.key, owner, piece.box)
                read = partial(self._read, piece, dest, known)
                fills.append(self._fill(key, dest, read, passed) if shared else _alone(read))
                at += piece.nbytes
            first = self._passing.first_of(len(fills)) if self._passing is not None else 0
            own = sum(await all_ended(fills[first:] + fills[:first]))
        except (CkptdError, OSError):
            return None
        own, peer = own + sum(known), sum(passed)
        return Came(at - own - peer, peer, own)

    async def forget(self) -> None:
        """What was read into is going to be written."""
        await self._shared.forget()
        if self._passing is not None:
            await self._passing.forget()

    async def ended(self) -> None:
        await self._threads.ended()
        await self._shared.ended()

    async def close(self) -> None:
        """After they have ended. Storage may hang on the lease as well."""
        if self._checkpoint is not None:
            await self._threads.run(self._checkpoint.close)
        self._pool.shutdown(wait=False)

    async def _open(self) -> Checkpoint:
        async with self._opening:
            if self._checkpoint is None:
                await self._threads.run(self._open_now)
            assert self._checkpoint is not None, "opened, or raised"
            return self._checkpoint

    def _open_now(self) -> None:
        self._checkpoint = self._opens()  # here, so that one is closed even when nobody waits for it any more

    async def _fill(self, key: Hashable, dest: memoryview, read: Read, passed: list[int]) -> int:
        """So many bytes were copied from another rank's memory here."""
        return len(dest) if await self._shared.fill(key, dest, partial(self._bring, key, dest, read, passed)) else 0

    async def _bring(self, key: Hashable, dest: memoryview, read: Read, passed: list[int]) -> None:
        if self._passing is None:
            await read()
        elif await self._passing.fill(key, dest, read):
            passed.append(len(dest))

    async def _read(self, piece: Piece, dest: memoryview, known: list[int]) -> None:
        known.append(await self.call(lambda checkpoint: checkpoint.read(piece.key, piece.box, dest, piece.rank)))


async def _alone(read: Read) -> int:
    await read()
    return 0


def is_away(error: Exception) -> bool:
    """Does this say what the system refused, as long as storage is away or our process lacks something, and nothing of what was to
    be read?"""
    if isinstance(error, StorageError):
        return error.errno > 0 and not isinstance(error, NotFound)
    return isinstance(error, OSError)


def stored_objects(rank: int, checkpoint: Checkpoint) -> dict[str, bytes]:
    """The non-tensor values of this rank, by name."""
    names = [name for name, owners in checkpoint.catalogue().objects.items() if rank in owners]
    return {name: checkpoint.object_bytes(name, rank) for name in names}
