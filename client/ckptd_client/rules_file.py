"""Rules that stand in a TOML file, beside the settings of a run rather than in its program (design D18).

A pattern is a quoted key, its rule a table of one cut or a list of these, outermost first, as ``register(rules=)`` takes them:
``"*.qkv.weight" = [{shard = 0, over = "tp", parts = [64, 16, 16]}]``, ``"*.running_*" = {own = "mean"}``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptd.core.errors import CkptdError
from ckptd_client.rules import EVEN, Cut, Own, Rule, check_rules, copied, own, padded, shard

if sys.version_info >= (3, 11):
    import tomllib

    def _parsed(text: str, where: str) -> dict[str, Any]:
        return tomllib.loads(text)
else:

    def _parsed(text: str, where: str) -> dict[str, Any]:
        hint = "give register() and restore() a dict of rules, or run the trainer with Python 3.11"
        raise CkptdError("a file of rules needs Python 3.11, which reads TOML by itself", where=where, hint=hint)


Rules = Mapping[str, Rule] | str | os.PathLike[str]
EXAMPLE = '"*.weight" = [{shard = 0, over = "tp"}]'


class _Kind(NamedTuple):
    """``says``: for an error."""

    says: str
    fits: Callable[[Any], bool]


class _Cut(NamedTuple):
    """``word``: whose value comes first to ``make``; ``needs`` and ``takes`` follow by name."""

    make: Callable[..., Any]
    word: _Kind
    needs: Mapping[str, _Kind]
    takes: Mapping[str, _Kind]
    example: str


def _is_number(value: Any) -> bool:
    return type(value) is int  # TOML's true is no number, and Python's is


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_row, value))


NUMBER = _Kind("a whole number", _is_number)
TEXT = _Kind("a text in quotes", lambda value: isinstance(value, str))
ROW = _Kind("a list of whole numbers", _is_row)
ROWS = _Kind("a list of lists of whole numbers", _is_rows)
WIDTHS = _Kind(f'"{EVEN}", {ROW.says} or {ROWS.says}', lambda value: value == EVEN or _is_row(value) or _is_rows(value))

CUTS = {
    "shard": _Cut(
        shard, NUMBER, {"over": TEXT}, {"parts": ROW, "widths": WIDTHS, "unit": NUMBER, "order": ROWS}, '{shard = 0, over = "tp"}'
    ),
    "copied": _Cut(copied, TEXT, {}, {}, '{copied = "tp"}'),
    "padded": _Cut(padded, NUMBER, {"size": NUMBER}, {}, "{padded = 0, size = 50257}"),
    "own": _Cut(own, TEXT, {}, {}, '{own = "mean"}'),
}


def given(rules: Rules | None) -> Mapping[str, Rule]:
    """What ``rules=`` means: rules by pattern as they are, or those of a TOML file, by its path. Raises CkptdError naming the file,
    the pattern and the remedy."""
    if rules is None or isinstance(rules, Mapping):
        check_rules(rules or {})
        return rules or {}
    if not isinstance(rules, str | os.PathLike):
        text = f"rules= is a dict of rules or the path of a TOML file, not a {type(rules).__name__}"
        raise CkptdError(text, hint='rules={"*.weight": shard(0, over="tp")}, or rules="rules.toml"')
    path = os.fspath(rules)
    return {pattern: _rule(value, _place(path, pattern)) for pattern, value in _read(path).items()}


def given_own(rules: Rules | None) -> dict[str, Own]:
    """The same for restore(). Raises CkptdError also for a rule that tells how a tensor was cut."""
    found: dict[str, Own] = {}
    for pattern, rule in given(rules).items():
        if not isinstance(rule, Own):
            where = pattern if isinstance(rules, Mapping) else _place(str(rules), pattern)
            raise CkptdError("restore() takes own() alone", where=where, hint="register(rules=) says how layers are cut")
        found[pattern] = rule
    return found


def _place(path: str, pattern: str) -> str:
    return f"{path}: {pattern!r}"


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        hint = "rules= takes the path of a file that each rank can read"
        raise CkptdError(f"rules cannot be read: {error.strerror or error}", where=path, hint=hint) from error
    except ValueError as error:  # no UTF-8, or a path that cannot be one
        raise CkptdError(f"rules cannot be read: {error}", where=path, hint="a file of rules is TOML, in UTF-8") from error
    try:
        return _parsed(text, path)
    except (ValueError, RecursionError) as error:
        raise CkptdError(f"not TOML: {error}", where=path, hint=f"a line of it: {EXAMPLE}") from error


def _rule(value: Any, where: str) -> Rule:
    if isinstance(value, dict):
        return _cut(value, where)
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise CkptdError("a rule is a cut or a list of cuts, each in braces", where=where, hint=f"as in {EXAMPLE}")
    found = [_cut(one, where) for one in value]
    cuts = [one for one in found if not isinstance(one, Own)]
    if len(cuts) < len(found):
        hint = 'without brackets: {own = "mean"}'
        raise CkptdError("own is the only rule of a tensor: what is cut or copied is no rank's own", where=where, hint=hint)
    return cuts


def _cut(table: dict[str, Any], where: str) -> Cut | Own:
    words = [word for word in CUTS if word in table]
    if len(words) != 1:
        named = f"not {' and '.join(words or map(repr, table)) or 'nothing'}"
        hint = "a pattern with dots stands in quotes; two cuts stand in braces each, in a list"
        raise CkptdError(f"a cut is one of {', '.join(CUTS)}, {named}", where=where, hint=hint)
    word = words[0]
    made, values = CUTS[word], {name: value for name, value in table.items() if name != word}
    known = {**made.needs, **made.takes}
    for name in sorted(values.keys() - known.keys()):
        takes = f"takes {', '.join(known)}" if known else "takes nothing more"
        raise CkptdError(f"{word} {takes}, not {name!r}", where=where, hint=f"as in {made.example}")
    for name in sorted(made.needs.keys() - values.keys()):
        raise CkptdError(f"{word} needs {name}", where=where, hint=f"as in {made.example}")
    for name, kind in {word: made.word, **known}.items():
        if name in table and not kind.fits(table[name]):
            raise CkptdError(f"{name} is {kind.says}, not {table[name]!r}", where=where, hint=f"as in {made.example}")
    try:
        cut: Cut | Own = made.make(table[word], **values)
    except ValueError as error:
        raise CkptdError(f"{word}: {error}", where=where, hint=f"as in {made.example}") from error
    return cut
