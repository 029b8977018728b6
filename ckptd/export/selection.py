"""Which tensors and objects are exported, under which names, as which dtype."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckptd.core.errors import CkptdError
from ckptd.export.stored import CASTABLE

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}  # what --dtype may say
_SHORT = {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "fp64": "F64"}
assert set(DTYPES.values()) == CASTABLE


def dtype_named(text: str, what: str) -> str:
    """torch's name, a short one or safetensors' own, in whatever case. Raises CkptdError."""
    known = {**DTYPES, **_SHORT} | {name.lower(): name for name in CASTABLE}
    if text.lower() not in known:
        raise CkptdError(f"no dtype to {what} as: {text}", where="--dtype", hint=f"one of {', '.join(known)}")
    return known[text.lower()]


@dataclass(frozen=True)
class Selection:
    """only: shell patterns of whole keys; none: everything. prefixes: old -> new, of a model's names at dots, the longest that fits
    counts. dtype: of a model's floating tensors, None: as they are."""

    only: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None

    @staticmethod
    def of(only: Collection[str], prefix_map: Collection[str], dtype: str | None) -> Selection:
        """As the command line has them. Raises CkptdError."""
        if any("=" not in text for text in prefix_map):
            hint = "transformer=model, or transformer= for nothing"
            raise CkptdError(f"not OLD=NEW: {', '.join(prefix_map)}", where="--prefix-map", hint=hint)
        return Selection(tuple(only), dict(text.split("=", 1) for text in prefix_map), dtype and dtype_named(dtype, "export"))

    def takes(self, key: str) -> bool:
        return not self.only or any(fnmatchcase(key, pattern) for pattern in self.only)

    def rename(self, name: str) -> str:
        fitting = [old for old in self.prefixes if not old or name == old or name.startswith(f"{old}.")]
        if not fitting:
            return name
        old = max(fitting, key=len)
        return ".".join(part for part in (self.prefixes[old], name[len(old) :].lstrip(".")) if part)

    def check(self, keys: Collection[str], names: Collection[str]) -> None:
        """Raises CkptdError naming what fits nothing: what it asks for would be missing, and nobody told."""
        idle = [pattern for pattern in self.only if not any(fnmatchcase(key, pattern) for key in keys)]
        if idle:
            hint = f"a pattern is of a whole key, as in {', '.join(sorted(keys)[:3])}"
            raise CkptdError(f"fits none of {len(keys)} keys: {', '.join(idle)}", where="--only", hint=hint)
        lost = [old for old in self.prefixes if old and not any(name == old or name.startswith(f"{old}.") for name in names)]
        if lost:
            hint = f"names of the model without its owner's, as in {', '.join(sorted(names)[:3])}"
            raise CkptdError(f"begins no name of the model: {', '.join(lost)}", where="--prefix-map", hint=hint)
