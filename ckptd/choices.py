"""What several commands let one choose: names by patterns, how names begin, a dtype, a part of the work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeVar

from ckptd.core.errors import CkptdError
from ckptd.core.state_map.dtypes import FLOATS, TORCH_NAMES

SHOWN_MAX = 3  # names in a hint
_TORCH = {TORCH_NAMES[name]: name for name in sorted(FLOATS)}
_SHORT = {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "fp64": "F64"}
DTYPES = {**_TORCH, **_SHORT} | {name.lower(): name for name in FLOATS}  # what --dtype may say
assert set(DTYPES.values()) == FLOATS


def dtype_named(text: str, what: str) -> str:
    """torch's name, a short one or safetensors' own, in whatever case. Raises CkptdError."""
    if text.lower() not in DTYPES:
        raise CkptdError(f"no dtype to {what} as: {text}", where="--dtype", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[text.lower()]


class Patterns:
    """``--only``: does one of the shell patterns fit a whole name? Without patterns all names do."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._given = list(patterns)
        self._idle = dict.fromkeys(self._given)
        self._seen = set[str]()

    def __call__(self, name: str) -> bool:
        self._seen.add(name)
        fitting = [pattern for pattern in self._given if fnmatchcase(name, pattern)]
        for pattern in fitting:
            self._idle.pop(pattern, None)
        return bool(fitting) or not self._given

    def check(self) -> None:
        """After all names. Raises CkptdError naming what fits none: nobody would be told that it is missing."""
        if self._idle:
            hint = f"a pattern is of a whole key, as in {', '.join(sorted(self._seen)[:SHOWN_MAX])}"
            raise CkptdError(f"fits none of {len(self._seen)} keys: {', '.join(self._idle)}", where="--only", hint=hint)


class PrefixMap:
    """``--prefix-map OLD=NEW``: names that are OLD, or go on with a dot behind it, begin with NEW instead; the longest OLD that
    fits counts, and an empty one fits all. A dot at the end of either is no matter."""

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self._pairs = {old.rstrip("."): new.rstrip(".") for old, new in pairs.items()}
        self._idle = dict.fromkeys(self._pairs)
        self._seen = set[str]()

    @staticmethod
    def parse(texts: Iterable[str]) -> PrefixMap:
        """Raises CkptdError."""
        given = list(texts)
        wrong = [text for text in given if "=" not in text]
        if wrong:
            hint = "transformer=model, or transformer= for nothing"
            raise CkptdError(f"not OLD=NEW: {', '.join(wrong)}", where="--prefix-map", hint=hint)
        return PrefixMap(dict(text.split("=", 1) for text in given))

    def __contains__(self, old: str) -> bool:
        return old in self._pairs

    def said(self, name: str, *, by_name: bool = False) -> str | None:
        """What becomes of a name; None: no word of it. by_name: an empty OLD is none."""
        self._seen.add(name)
        fitting = [old for old in self._pairs if name == old or name.startswith(f"{old}.") or not (old or by_name)]
        if not fitting:
            return None
        old = max(fitting, key=len)
        self._idle.pop(old, None)
        return ".".join(part for part in (self._pairs[old], name[len(old) :].removeprefix(".")) if part)

    def rename(self, name: str) -> str:
        found = self.said(name)
        return name if found is None else found

    def check(self) -> None:
        """After all names. Raises CkptdError naming what begins none."""
        idle = [old for old in self._idle if old]
        if idle:
            hint = f"names go on with a dot behind it, as in {', '.join(sorted(self._seen)[:SHOWN_MAX])}"
            raise CkptdError(f"begins no name: {', '.join(idle)}", where="--prefix-map", hint=hint)


class Placed(Protocol):
    """From the byte ``at`` of all of them on."""

    @property
    def at(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=Placed)


class Share(NamedTuple):
    """``number``, from 0 on, ``of`` so many processes."""

    number: int
    of: int

    @staticmethod
    def parse(text: str) -> Share:
        """From 1 on, as the command line has it. Raises CkptdError."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise CkptdError(f"no part of the work: {text}", where="--part", hint="K/N: 1/4 to 4/4, then once without it")
        return Share(int(number) - 1, int(count))

    def has(self, at: int, nbytes: int, total: int) -> bool:
        """Is what lies at this byte of all of them its own?"""
        middle = at + nbytes // 2
        return min(middle * self.of // max(total, 1), self.of - 1) == self.number

    def among(self, parts: Sequence[P]) -> list[P]:
        """Its own of these, which are all."""
        total = sum(part.nbytes for part in parts)
        return [part for part in parts if self.has(part.at, part.nbytes, total)]
