"""Which tensors and objects are exported, under which names, as which dtype."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ckptd.choices import Patterns, PrefixMap, dtype_named


@dataclass(frozen=True)
class Selection:
    """only: of whole keys. prefixes: of a model's names. dtype: of a model's floating tensors, None: as they are."""

    only: Patterns
    prefixes: PrefixMap
    dtype: str | None = None

    @staticmethod
    def of(only: Collection[str], prefix_map: Collection[str], dtype: str | None) -> Selection:
        """As the command line has them. Raises CkptdError."""
        return Selection(Patterns(only), PrefixMap.parse(prefix_map), dtype and dtype_named(dtype, "export"))

    def check(self, keys: Collection[str], names: Collection[str]) -> None:
        """Raises CkptdError naming what fits nothing."""
        for key in keys:
            self.only(key)
        for name in names:
            self.prefixes.said(name)
        self.only.check()
        self.prefixes.check()
