"""Which storage a root names. The only place that knows the backends."""

from __future__ import annotations

import re

from ckptd.core.errors import CkptdError
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.posix import PosixStorage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


def storage_at(root: str, *, create: bool = False, marked: bool | None = None) -> Storage:
    """create: make the root if need be. marked: insist on its marker, without which it is taken for an unmounted one (default: as
    ``create``). Raises CkptdError: a scheme that no backend here is for."""
    scheme = _SCHEME.match(root)
    if scheme:
        text = f"storage of the kind {scheme[1]}: is not supported"
        raise CkptdError(text, where=root, hint="storage_root is a directory that all nodes mount")
    return PosixStorage(root, create=create, marked=marked)
