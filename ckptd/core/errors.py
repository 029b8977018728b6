"""One error type: what failed, where, and what the operator can do (design section 8, Litestream's habit)."""

from __future__ import annotations


class CkptdError(Exception):
    """``what`` failed, ``where`` (path, address, key), and a ``hint`` that names the remedy."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        text = self.what + (f" [{self.where}]" if self.where else "")
        return text + (f"\n  hint: {self.hint}" if self.hint else "")
