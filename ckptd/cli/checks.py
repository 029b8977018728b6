"""Each check of `ckptd preflight` about this node alone."""

from __future__ import annotations

import os
import resource
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptd.config import Config, loopback_key_file
from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket
from ckptd.units import format_bytes

if TYPE_CHECKING:
    from ckptd.persist.storage.base import Storage

FILES_SPARE = 256  # descriptors beside connections: segments, files being written, the library's own
CONNECT_TIMEOUT_S = 1.0
SKEW_MAX_S = 300.0  # between this node's clock and a store's; S3 refuses what is signed 900 s apart


@dataclass(frozen=True, slots=True)
class Check:
    """``ok`` None: worth knowing, not wrong."""

    name: str
    ok: bool | None
    text: str
    hint: str = ""

    def report(self) -> dict[str, object]:
        return asdict(self)


def identity(config: Config) -> Check:
    node = config.node_id or "made at the first start"
    return Check("identity", True, f"node {node}, failure domain {config.domain or 'the node itself'}")


def key(config: Config) -> Check:
    from ckptd.wire.keys import ClusterKey

    if config.key_file is not None:
        found = ClusterKey.load(config.key_file)
        return Check(
            "key", True, f"{config.key_file}, fingerprint {found.fingerprint}: compare it on every node"
        )
    if config.plain_loopback:
        return Check("key", True, f"{loopback_key_file()}, this user's own for loopback, by plain_loopback")
    hint = "`ckptd keygen FILE`, copy it to every node, set key_file; or plain_loopback on a single machine"
    return Check("key", False, "neither key_file nor plain_loopback is set", hint)


def addresses(config: Config) -> Check:
    """Binds each port for a moment."""
    wanted = {
        "control": (config.bind_address, config.control_port),
        "bulk": (config.bind_address, config.bulk_port),
        "page": (config.http_address, config.http_port),
    }
    for name, address in wanted.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                running = "a daemon already runs here; " if _answers(config.socket) else ""
                return Check("addresses", False, f"{name} cannot bind {address[0]}:{address[1]}: {running}{error.strerror}",
                             "stop what holds the port, set it to 0 (any), or name an address of this machine")  # fmt: skip
    told = f"others reach this node at {config.advertise()}, bulk mode {config.bulk_mode_in_force()}"
    return Check("addresses", True, f"{config.bind_address} can be bound; {told}")


def rank_socket(config: Config) -> Check:
    if _answers(config.socket):
        return Check("socket", None, f"a daemon already answers at {config.socket}")
    place = _nearest(config.socket.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(
            "socket", False, f"{place} is not writable", "set socket, and CKPTD_SOCKET for the ranks"
        )
    return Check("socket", True, f"{config.socket} can be made")


def state(config: Config) -> Check:
    place = _nearest(config.state_dir)
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(
            "state_dir",
            False,
            f"{place} is not writable",
            "set state_dir to a directory of the daemon's user",
        )
    if config.state_dir.exists() and config.state_dir.stat().st_mode & stat.S_IWOTH:
        return Check(
            "state_dir", False, f"{config.state_dir} is writable by everyone", f"chmod 700 {config.state_dir}"
        )
    return Check("state_dir", True, str(config.state_dir))


def memory(config: Config) -> Check:
    from ckptd.arena.budget import headroom

    budget, room = config.memory_budget_bytes(), headroom()
    text = f"budget {format_bytes(budget)} ({config.memory_budget}), "
    text += f"available now {format_bytes(room.nbytes)} ({room.limited_by})"
    if budget > room.nbytes and not _answers(config.socket):
        return Check("memory", False, text, "lower memory_budget, or raise the limit named here")
    if room.kills_group:
        return Check("memory", None, f"{text}; memory.oom.group is set: an OOM kill takes the daemon along")
    return Check("memory", True, text)


def storage(config: Config) -> Check:
    """Rights and exclusive names, tried out. Whether all nodes see one storage, the daemons find out."""
    if config.storage_root is None:
        return Check(
            "storage",
            None,
            "no storage_root: snapshots live in memory only",
            "set storage_root to a shared directory to s3://bucket/prefix or to az://container/prefix",
        )
    from ckptd.daemon.storage import known_storage
    from ckptd.persist.preflight import probe

    root, state = config.storage_root, config.state_dir
    if in_bucket(root):
        return _bucket(known_storage(root, state, create=True))
    if not os.path.lexists(root) and not known_storage(root, state, create=False).identity:
        return _no_root_yet(Path(root))
    free = probe(known_storage(root, state, create=True))
    text = f"{config.storage_root}: rights, link() and rename() are fine, {format_bytes(free)} free"
    return Check("storage", True, text)


def _bucket(storage: Storage) -> Check:
    from ckptd.persist.preflight import probe, winners

    probe(storage)
    ahead_s = storage.clock_s("") - time.time()
    text = f"{storage.locate('')}: rights and conditional PUT are fine, its clock is {abs(ahead_s):.0f} s off"
    if abs(ahead_s) > SKEW_MAX_S:
        return Check("storage", False, text, "set this node's clock (chrony, ntpd): stores refuse requests that are 15 minutes off")
    count = winners(storage)
    if count > 1:
        text += f"; {count} of those who took one name at the same time got it"
        return Check("storage", None, text, "of two starts of one job that come at once both may go on; no other store is as sure")
    return Check("storage", True, text)


def _no_root_yet(root: Path) -> Check:
    """`ckptd run` makes it, if it may."""
    above = next(place for place in root.absolute().parents if place.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise CkptdError("no such directory, and it cannot be made", where=str(root), hint="make or mount it, on every node alike")
    text = f"{root}: not there; `ckptd run` makes it in {above}"
    return Check("storage", None, text, "mount it first if it is to be the one directory that all nodes share")


def files(config: Config) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 3 * config.connections_max + FILES_SPARE
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Check(
            "files",
            False,
            f"at most {hard} open files, {needed} may be needed",
            "raise LimitNOFILE or lower connections_max",
        )
    return Check("files", True, f"{soft} open files now, {hard} at most, {needed} may be needed")


def memlock(config: Config) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", True, "unlimited")
    return Check("memlock", None, f"{format_bytes(soft)}: enough for CPU and for CUDA's own pinning, not for RDMA",
                 "ulimit -l unlimited (LimitMEMLOCK=infinity) for ranks that register memory")  # fmt: skip


def parity(config: Config) -> Check:
    """Loads ISA-L and has it compute a few bytes."""
    from ckptd.protect import erasure

    slow = erasure.slow_for(config.policy().redundancy)
    return Check("parity", None if slow else True, slow or erasure.describe(), slow and erasure.HINT)


def _answers(path: Path) -> bool:
    """Does a process listen at this socket?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _nearest(path: Path) -> Path:
    """The path, or the nearest directory above it that is there: what must be writable for it to be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


ALL: dict[str, Callable[[Config], Check]] = {
    "identity": identity,
    "key": key,
    "addresses": addresses,
    "socket": rank_socket,
    "state_dir": state,
    "memory": memory,
    "storage": storage,
    "files": files,
    "memlock": memlock,
    "parity": parity,
}
