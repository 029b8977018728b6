"""What a storage root may be: a directory. An address of something else is refused, or a directory of its name would be made."""

from __future__ import annotations

import re

from ckptd.core.errors import CkptdError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.*)", re.DOTALL)  # pathlib makes one slash of two
_FILE = "file"


def local_root(text: str) -> str:
    """The directory that ``text`` names: itself, or of ``file:///path`` the path. Raises CkptdError for every other scheme
    (``s3://bucket/x``) and for a file on another host."""
    found = _SCHEME.fullmatch(text)
    if found is None:
        return text
    scheme, slashes, rest = found.groups()
    if scheme.lower() == _FILE and len(slashes) != 2:
        return f"/{rest}"
    if scheme.lower() == _FILE:
        raise CkptdError("a file on another host is no storage root", where=text, hint="write file:///path, or the path itself")
    raise CkptdError(
        f"storage with the scheme {scheme}:// is not supported",
        where=text,
        hint="name a directory that all nodes mount",
    )
