"""The storage of this node: probed at start, and checked against the peers: all must see the same directory (D13)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.core.errors import CkptdError
from ckptd.observe.health import Health
from ckptd.persist.preflight import place_token, probe, read_token
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.factory import storage_at
from ckptd.wire.peer import StorageToken

if TYPE_CHECKING:
    from ckptd.daemon.services import Services

NOT_SHARED = "storage_not_shared"


def open_storage(root: str, node: str, health: Health, *, fresh: bool) -> tuple[Storage | None, str]:
    """The storage and this node's token in it.

    Storage that cannot be used is refused at a fresh start (CkptdError with the remedy). A daemon that comes back to memory
    it must serve goes on without, and says so: peers and their replicas matter more than the disk.
    """
    if not root:
        return None, ""
    storage = storage_at(root, create=fresh, marked=True)
    try:
        probe(storage)
        return storage, place_token(storage, node)
    except (CkptdError, OSError) as error:
        if fresh:
            raise
        health.report("storage", str(error))
        return storage, ""


class SharedCheck:
    """Tells each peer our token when its link comes up, and looks for theirs through our own mount."""

    def __init__(self, services: Services, token: str) -> None:
        self._services, self._token = services, token

    def peer_up(self, node: str) -> None:
        if self._token:
            self._services.send(node, "", StorageToken(self._token))

    def on_message(self, node: str, message: object) -> bool:
        if not isinstance(message, StorageToken):
            return False
        self._services.spawn(self._look(node, message.token), f"storage token of {node}")
        return True

    async def _look(self, node: str, token: str) -> None:
        storage, health = self._services.storage, self._services.health
        if storage is None:
            health.report(
                NOT_SHARED, f"{node} has a storage root, this node has none: set storage_root", which=node
            )
            return
        try:
            seen = await self._services.on_disk(read_token, storage, node)
        except (CkptdError, OSError) as error:
            health.report("storage", str(error))
            return
        if seen == token:
            health.clear(NOT_SHARED, which=node)
        else:
            text = (
                f"{node} writes to another storage than this node: storage_root must be one shared directory"
            )
            health.report(NOT_SHARED, text, which=node)
