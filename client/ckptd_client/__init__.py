"""ckptd in the training process: asynchronous checkpoints through the daemon of this node."""

from importlib import import_module

from ckptd.core.errors import CkptdError
from ckptd_client.boxes import Blob, Box
from ckptd_client.client import Client
from ckptd_client.handles import Handle
from ckptd_client.place import followed
from ckptd_client.reader import open_job as open
from ckptd_client.rules import copied, numbered, own, padded, shard
from ckptd_client.troubles import HealthReport
from ckptd_client.ucp import ucp_rules

__all__ = [
    "Blob", "Box", "CkptdError", "Client", "Handle", "HealthReport", "copied", "followed", "numbered", "open", "own",
    "padded", "shard", "ucp_rules",
]  # fmt: skip


def __getattr__(name: str) -> str:
    """``__version__``, looked up when somebody asks for it."""
    if name == "__version__":
        found: str = import_module("importlib.metadata").version("ckptd")
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
