"""The daemon's name for the one error type (the client imports it from ckptd.core)."""

from ckptd.core.errors import CkptdError

__all__ = ["CkptdError"]
