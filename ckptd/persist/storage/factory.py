"""Which storage a root names. The only place that knows the backends."""

from __future__ import annotations

from ckptd.core.errors import CkptdError
from ckptd.core.storage_root import in_bucket, storage_root
from ckptd.persist.storage.base import Storage
from ckptd.persist.storage.posix import PosixStorage


def storage_at(root: str, *, create: bool = False, marked: bool | None = None, identity: str = "", if_new: str = "") -> Storage:
    """create: make the root if need be. marked: insist on its marker, without which it is taken for an unmounted one (default: as
    ``create``). identity: insist on this one ("": any). if_new: what to do where it is to be another
    one. Raises CkptdError: a scheme that no backend here is for."""
    root = storage_root(root)
    if not in_bucket(root):
        return PosixStorage(root, create=create, marked=marked, identity=identity, if_new=if_new)
    try:  # who has no bucket needs no library for one
        from ckptd.persist.storage.object_store import ObjectStorage
    except ImportError as error:
        raise CkptdError(f"{root} needs obstore", where=str(error), hint="pip install 'ckptd[s3]'") from error
    return ObjectStorage(root, create=create, marked=marked, identity=identity, if_new=if_new)
