"""The storage of this node: probed at start, and checked against the peers: all must see the same one (D13)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root
from ckptd.daemon.state import StateDir
from ckptd.observe.health import Health
from ckptd.persist.cache import Cache
from ckptd.persist.preflight import place_token, probe, read_token
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.factory import storage_at
from ckptd.wire.peer import StorageToken

if TYPE_CHECKING:
    from ckptd.config import Config
    from ckptd.daemon.services import Services

log = logging.getLogger("ckptd.daemon")
NOT_SHARED = "storage_not_shared"
IDENTITIES = "storage.json"  # in the state directory


def open_storage(root: str, node: str, health: Health, state: StateDir, *, fresh: bool) -> tuple[Storage | None, str]:
    """The storage and this node's token in it.

    Storage that cannot be used is refused at a fresh start (CkptdError with the remedy). A daemon that comes back to memory
    it must serve goes on without, and says so: peers and their replicas matter more than the disk.
    """
    if not root:
        return None, ""
    storage = known_storage(root, state.path, create=False)
    was_there = in_bucket(root) or os.path.lexists(root)  # a bucket is never made
    try:
        storage = known_storage(root, state.path, create=True)
        probe(storage)
        token = place_token(storage, node)
    except (CkptdError, OSError) as error:
        if fresh:
            raise
        health.report("storage", str(error))
        return storage, ""
    if not was_there:
        log.warning("storage root %s was not there and was made: is it the one that was meant, and mounted?", storage.locate(""))
    known = identities(state.path)
    if storage.locate("") not in known:
        if known:
            others = ", ".join(sorted(known))
            log.warning("storage root %s is another one than this node has used: what lies in %s is not found here", root, others)
        state.keep(IDENTITIES, msgspec.json.encode(known | {storage.locate(""): storage.identity}))
    return storage, token


def open_cache(config: Config, health: Health) -> Cache | None:
    """Nothing needs it: where it cannot be, health says so, and restores read storage."""
    if config.cache_dir is None:
        return None
    try:
        return Cache(config.cache_dir, config.cache_budget_bytes)
    except CkptdError as error:
        health.report("cache", str(error), serious=False)
        return None


def known_storage(root: str, state: Path, *, create: bool) -> Storage:
    """The one that this node has known below ``root``, and no other. create: it is made where none was known."""
    known, place = identities(state), storage_root(root)
    place = place if in_bucket(place) else os.path.abspath(place)
    if_new = f"if it really is a new one, remove {state / IDENTITIES} and restart ckptd, on every node: it keeps its memory"
    return storage_at(root, create=create and place not in known, marked=True, identity=known.get(place, ""), if_new=if_new)


def identities(state: Path) -> dict[str, str]:
    """Of each storage that this node has used, by its root ("": it has none). Raises CkptdError when the file does not parse."""
    path = state / IDENTITIES
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CkptdError(f"the storage's identity does not parse: {error}", where=str(path), hint="remove the file") from error


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
                f"{node} writes to another storage than this node: storage_root must be one shared directory, or one bucket"
            )
            health.report(NOT_SHARED, text, which=node)
