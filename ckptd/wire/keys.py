"""The cluster key: one 32-byte secret in one file (0600), from which every key of the wire derives (design D3).

Whoever holds the file is a daemon of this cluster, with all a daemon's rights: holders are one trust domain. The file is
one line, ``ckptd-key-1 <64 hex digits>``. Derivation is HKDF-SHA256 with a label per use, so no use can stand for another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from ckptd.core.errors import CkptdError
from ckptd.directory import sync_path

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 256
KEY_FILE_MODE = 0o600
KEY_DIRECTORY_MODE = 0o755  # of one that is made; the file itself is for its owner alone
KEY_FILE_VARIABLE = "CKPTD_KEY_FILE"
CREDENTIAL_NAME = "ckptd.key"  # LoadCredential=ckptd.key:/etc/ckptd/ckptd.key
MAGIC = "ckptd-key-1"
HINT = "ckptd keygen makes a key file; copy it to every node with mode 0600"


def derive(secret: bytes, label: str, *, salt: bytes = b"", nbytes: int = KEY_BYTES) -> bytes:
    """HKDF-SHA256 (RFC 5869) of ``secret`` under a label."""
    return HKDF(SHA256(), nbytes, salt or None, b"ckptd/1/" + label.encode()).derive(secret)


@dataclass(frozen=True)
class CurvePair:
    """A CURVE keypair as libzmq wants it: Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class ClusterKey:
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise CkptdError(f"a cluster key has {KEY_BYTES} bytes, not {len(self.secret)}", hint=HINT)

    @staticmethod
    def generate() -> ClusterKey:
        return ClusterKey(secrets.token_bytes(KEY_BYTES))

    @cached_property
    def curve_server(self) -> CurvePair:
        return self._pair("curve-server")

    @cached_property
    def curve_client(self) -> CurvePair:
        return self._pair("curve-client")

    @cached_property
    def bulk(self) -> bytes:
        """Master key of the bulk streams: a ticket alone, without the cluster key, opens nothing."""
        return derive(self.secret, "bulk")

    @cached_property
    def fingerprint(self) -> str:
        """Tells two keys apart in a log without telling either."""
        return derive(self.secret, "fingerprint", nbytes=8).hex()

    def _pair(self, label: str) -> CurvePair:
        secret = z85.encode(derive(self.secret, label))
        return CurvePair(zmq.curve_public(secret), secret)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new key file, mode 0600, durable. Never replaces one: raises CkptdError when the path exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, KEY_FILE_MODE)
        except OSError as error:
            hint = (
                "an existing key is never replaced: use it, or name a new file"
                if isinstance(error, FileExistsError)
                else "name a file in a directory that you may write"
            )
            what = f"cannot write the key file: {error.strerror}"
            raise CkptdError(what, where=os.fspath(path), hint=hint) from error
        with open(fd, "wb") as file:
            os.fchmod(fd, KEY_FILE_MODE)  # the umask may have taken bits, an ACL may have added some
            file.write(f"{MAGIC} {self.secret.hex()}\n".encode())
            file.flush()
            os.fsync(fd)
        sync_path(Path(path).parent)

    @staticmethod
    def kept_at(path: Path) -> ClusterKey:
        """The key in this file, made now if there is none; processes that start together get the same. Raises CkptdError."""
        if not path.exists():
            own = path.with_name(f"{path.name}.{os.getpid()}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=KEY_DIRECTORY_MODE)
                own.unlink(missing_ok=True)
                ClusterKey.generate().save(own)
                with contextlib.suppress(FileExistsError):
                    os.link(own, path)
                own.unlink()
            except OSError as error:
                raise CkptdError(f"cannot keep a key: {error.strerror}", where=str(path), hint=HINT) from error
        return ClusterKey.load(path)

    @staticmethod
    def load(path: str | os.PathLike[str], *, group_readable: bool = False) -> ClusterKey:
        """Read a key file that only its owner (this user or root) can read. Raises CkptdError."""
        where = os.fspath(path)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                _check_rights(os.fstat(file.fileno()), where, 0o037 if group_readable else 0o077)
                text = file.read(KEY_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise CkptdError(f"cannot read the key file: {error.strerror}", where=where, hint=HINT) from error
        return _parse(text, where)

    @staticmethod
    def from_env(environ: Mapping[str, str] = os.environ) -> ClusterKey | None:
        """The key named by CKPTD_KEY_FILE, else systemd's credential ``ckptd.key``, else None."""
        if environ.get(KEY_FILE_VARIABLE):
            return ClusterKey.load(environ[KEY_FILE_VARIABLE])
        credential = Path(environ.get("CREDENTIALS_DIRECTORY") or "/nonexistent") / CREDENTIAL_NAME
        # systemd grants the service's user by an ACL, which fstat shows as a group bit; the directory itself is private.
        return ClusterKey.load(credential, group_readable=True) if credential.exists() else None


def _check_rights(info: os.stat_result, where: str, forbidden: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise CkptdError("the key file is not a regular file", where=where, hint=HINT)
    if info.st_uid not in (os.geteuid(), 0):
        raise CkptdError(f"the key file belongs to uid {info.st_uid}", where=where, hint=f"chown {os.geteuid()} {where}")
    if info.st_mode & forbidden:
        mode = stat.S_IMODE(info.st_mode)
        raise CkptdError(f"others can reach the key file (mode {mode:04o})", where=where, hint=f"chmod 600 {where}")


def _parse(text: bytes, where: str) -> ClusterKey:
    try:
        magic, digits = text.decode("ascii").split()
        secret = bytes.fromhex(digits)
    except ValueError:  # also UnicodeDecodeError; the text itself is never shown
        raise CkptdError("not a ckptd key file", where=where, hint=HINT) from None
    if magic != MAGIC or len(secret) != KEY_BYTES:
        raise CkptdError("not a ckptd key file of this version", where=where, hint=HINT)
    return ClusterKey(secret)
