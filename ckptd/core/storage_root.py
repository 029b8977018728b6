"""What a storage root may be: a directory, or a bucket. An address of something else is refused, or a directory of its name would
be made."""

from __future__ import annotations

import re

from ckptd.core.errors import CkptdError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)  # pathlib makes one slash of two
_BUCKETS = {  # by scheme: what its names are
    "s3": re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"),
    "az": re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]"),
}
_NAMED = {  # what they are called, and how one is written
    "s3": ("bucket", "write s3://bucket/prefix"),
    "az": ("container", "write az://container/prefix, in small letters; the account is AZURE_STORAGE_ACCOUNT_NAME"),
}
_KEY = re.compile(r"[A-Za-z0-9._@+=-]+")  # a component of a prefix: what every store and every tool takes as it is
_FILE = "file"
S3, AZURE = "s3://", "az://"


def storage_root(text: str) -> str:
    """The directory that ``text`` names, itself or of ``file:///path`` the path; or ``s3://bucket/prefix`` or
    ``az://container/prefix`` in its one form. Raises CkptdError for every other scheme, a file on another host, and what no bucket
    or prefix can be."""
    found = _SCHEME.fullmatch(text)
    if found is None:
        return text
    scheme, slashes, rest = found.groups()
    if scheme.lower() in _BUCKETS:
        return _bucket_root(text, scheme.lower(), rest)
    if scheme.lower() == _FILE and len(slashes) != 2:
        return f"/{rest}"
    if scheme.lower() == _FILE:
        raise CkptdError("a file on another host is no storage root", where=text, hint="write file:///path, or the path itself")
    raise CkptdError(
        f"storage with the scheme {scheme}:// is not supported",
        where=text,
        hint="name a directory that all nodes mount, s3://bucket/prefix of a store that speaks S3, or az://container/prefix",
    )


def local_root(text: str) -> str:
    """The same where only a directory will do."""
    root = storage_root(text)
    if in_bucket(root):
        hint = "name one, and copy what is made there with the store's own tools"
        raise CkptdError("a directory is needed here, not a bucket", where=text, hint=hint)
    return root


def in_bucket(root: str) -> bool:
    """Of a root in its one form."""
    return root.startswith((S3, AZURE))


def bucket_and_prefix(root: str) -> tuple[str, str]:
    bucket, _, prefix = root.partition("://")[2].partition("/")
    return bucket, prefix


def _bucket_root(text: str, scheme: str, rest: str) -> str:
    bucket, *prefix = [part for part in rest.split("/") if part] or [""]
    if not _BUCKETS[scheme].fullmatch(bucket):
        raise CkptdError(f"not the name of a {_NAMED[scheme][0]}", where=text, hint=_NAMED[scheme][1])
    for part in prefix:
        if part in (".", "..") or not _KEY.fullmatch(part):
            hint = "write [A-Za-z0-9._@+=-] between its slashes"
            raise CkptdError(f"{part!r} is no part of a prefix", where=text, hint=hint)
    return f"{scheme}://" + "/".join([bucket, *prefix])
