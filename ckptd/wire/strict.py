"""What msgspec.convert leaves open for dataclasses: unknown fields (it drops them) and the depth of untyped values.

``checker(cls)`` compiles a type into a function that walks a decoded tree once; types that contain no dataclass and no
``Any`` compile to nothing and cost nothing.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

UNTYPED_DEPTH_MAX = 16  # containers inside containers, where a field's type is Any

Check = Callable[[Any, str], None]


class Unexpected(Exception):
    """The path of a field that nobody knows, or of a value that is nested too deeply."""


@lru_cache(maxsize=256)
def checker(cls: Any) -> Check:
    return _compile(cls) or _accept


def _accept(value: Any, path: str) -> None:
    return None


def _compile(kind: Any) -> Check | None:
    if kind is Any:
        return _shallow
    if dataclasses.is_dataclass(kind):
        return _fields(kind)
    origin, arguments = get_origin(kind), [a for a in get_args(kind) if a is not Ellipsis]
    checks = [(a, _compile(a)) for a in arguments]
    if all(check is None for _, check in checks):
        return None
    if origin in (Union, types.UnionType):
        return _optional(next(check for _, check in checks if check is not None))
    if origin is dict:
        return _values(checks[1][1])
    return _items([check for _, check in checks])


def _fields(cls: Any) -> Check:
    known = {name: _compile(hint) for name, hint in get_type_hints(cls).items() if name in _names(cls)}

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            return  # msgspec says it better
        for name, item in value.items():
            if name not in known:
                raise Unexpected(f"{path}.{str(name)[:80]} is not a field")
            inner = known[name]
            if inner is not None:
                inner(item, f"{path}.{name}")

    return check


def _names(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls) if f.init}


def _optional(inner: Check) -> Check:
    def check(value: Any, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def _values(inner: Check | None) -> Check:
    def check(value: Any, path: str) -> None:
        if isinstance(value, dict) and inner is not None:
            for key, item in value.items():
                inner(item, f"{path}[{str(key)[:80]}]")

    return check


def _items(inner: list[Check | None]) -> Check:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple):
            return
        for index, item in enumerate(value):
            one = inner[min(index, len(inner) - 1)]  # tuple[X, ...] has one entry, tuple[X, Y] has two
            if one is not None:
                one(item, f"{path}[{index}]")

    return check


def _shallow(value: Any, path: str, depth: int = 0) -> None:
    if depth > UNTYPED_DEPTH_MAX:
        raise Unexpected(f"{path} is nested deeper than {UNTYPED_DEPTH_MAX}")
    if isinstance(value, dict):
        for key, item in value.items():
            _shallow(item, f"{path}[{str(key)[:80]}]", depth + 1)
    elif isinstance(value, list):
        for item in value:
            _shallow(item, f"{path}[]", depth + 1)
