"""A mutant in the modules that are loaded already: each function's code is exchanged in place, so whoever imported it has it."""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from typing import Any

from tests.mutants.targets import PACKAGE


def plant(path: str, tree: ast.Module) -> None:
    """Raises ValueError when no living function is affected: such a mutant would prove nothing."""
    module = importlib.import_module("ckptd." + path.removesuffix(".py").replace("/", "."))
    mutated = dict(_codes(compile(tree, str(PACKAGE / path), "exec")))
    changed = 0
    for function in _functions(vars(module), module.__name__):
        new = mutated.get(_place(function.__code__))
        if new is not None and _differs(new, function.__code__):
            function.__code__ = new
            changed += 1
    if not changed:
        raise ValueError(f"{path}: nothing changed")


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """Functions of the module and of its classes; those inside of functions come with them."""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            if (
                const.co_flags & 0x02
            ):  # CO_NEWLOCALS: a function; the body of a class has no locals of its own
                yield _place(const), const
            else:
                yield from _codes(const)


def _place(code: types.CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _differs(one: types.CodeType, other: types.CodeType) -> bool:
    return one.co_code != other.co_code or one.co_names != other.co_names or _consts(one) != _consts(other)


def _consts(code: types.CodeType) -> list[Any]:
    return [
        (c.co_code, c.co_names, _consts(c)) if isinstance(c, types.CodeType) else (type(c), c)
        for c in code.co_consts
    ]


def _functions(
    names: dict[str, Any] | types.MappingProxyType[str, Any], module: str
) -> Iterator[types.FunctionType]:
    for value in list(names.values()):
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", value)  # static and class methods
        value = getattr(value, "__wrapped__", value)  # lru_cache
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)
