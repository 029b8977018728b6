"""How a fetch from a peer ended. That nobody could be reached says nothing against what is held there (P1, D11)."""

from __future__ import annotations

from typing import NamedTuple

from ckptd.core.errors import CkptdError
from ckptd.wire.bulk import TransferError


class Fetched(NamedTuple):
    """``away``: the holder did not answer, or the wire broke or changed what came. Asked again later it may well bring it; else it
    is damaged, freed or not there, and it does not come back."""

    ok: bool
    reason: str = ""
    away: bool = False


class Away(CkptdError):
    """Whoever holds it could not be asked."""


class Unanswered(TransferError):
    """The control link takes nothing for the holder, or it says nothing: no use in asking again at once."""
