"""Inputs that are almost right: mutants of valid samples, of their bytes and of the trees that they encode."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz import trees
from tests.fuzz.target import Target

EDITS_MAX = 4
GROWTH_BYTES_MAX = 1 << 16  # a mutant is not much longer than its sample
TEXT_TOKENS = (
    b"\xff", b"\0", b"\n", b"=", b'"', b"[x]\n", b"\xd9\xa1", b"\xc2\xb2", b"99999999999999999999", b"-1", b"nan", b"1e400", b":",
    b"::1", b"%", b"../", b"[" * 300, b"\xe2\x80\xa8", b"0x10", b"1_0", b" ",
)  # fmt: skip


def mutant(target: Target, chance: random.Random) -> bytes:
    sample = chance.choice(target.valid)
    if target.form in ("msgpack", "json") and chance.random() < 0.6:
        return _edited_tree(sample, target.form, chance)
    data = bytearray(sample)
    for _ in range(chance.randint(1, EDITS_MAX)):
        edit_bytes(data, target, chance)
    return bytes(data)


# --- bytes ------------------------------------------------------------------------------------------------------
def edit_bytes(data: bytearray, target: Target, chance: random.Random) -> None:
    at = chance.randint(0, len(data)) if chance.random() < 0.7 else chance.randint(0, min(len(data), 64))
    kind = chance.randrange(9)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = chance.randrange(256)
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + chance.randint(1, 16)]
    elif kind == 4:
        data += chance.choice((chance.randbytes(chance.randint(1, 64)), b"\0" * chance.randint(1, 5000)))
    elif kind == 5:
        other = chance.choice(target.valid)
        start = chance.randint(0, len(other))
        data[at:] = other[start : start + GROWTH_BYTES_MAX]
    elif kind == 6:
        data[at:at] = data[at : at + chance.randint(1, 200)]
    elif kind == 7:
        _write_number(data, at, chance)
    else:
        token = chance.choice(
            TEXT_TOKENS if target.form in ("text", "binary") else trees.ODD_BYTES[target.form]
        )
        data[at : at + chance.choice((0, len(token)))] = token


def _write_number(data: bytearray, at: int, chance: random.Random) -> None:
    """A length field may be anywhere, of any width and order."""
    number, width = chance.choice(trees.NUMBERS), chance.choice((1, 2, 4, 8))
    order = chance.choice(("big", "little"))
    data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]


# --- trees ------------------------------------------------------------------------------------------------------
def _edited_tree(sample: bytes, form: str, chance: random.Random) -> bytes:
    tree = [trees.parse(sample, form)]
    for _ in range(chance.randint(1, EDITS_MAX)):
        _edit_tree(tree, form, chance)
    return trees.pack(tree[0], form) if tree else b""


def _edit_tree(root: list[Any], form: str, chance: random.Random) -> None:
    places = list(trees.places(root))
    if not places:
        return
    above, key = chance.choice(places)
    old, kind = above[key], chance.randrange(10)
    if kind <= 3:
        above[key] = trees.odd_value(chance, form)
    elif kind == 4:
        other, place = chance.choice(places)
        above[key] = _without_cycles(other[place])
    elif kind == 5 and above is not root:
        del above[key]
    elif kind == 6 and isinstance(above, list):
        above.insert(key, old if not isinstance(old, dict | list) else _without_cycles(old))
    elif kind == 7 and isinstance(above, dict):
        new = chance.choice((*trees.TEXTS, *(k for k in above if isinstance(k, str))))
        above[new] = above.pop(key)
    elif kind == 8 and isinstance(old, dict):
        above[key] = trees.Pairs([*old.items(), *list(old.items())[:1]])
    else:
        above[key] = _near(old, chance)


def _near(old: Any, chance: random.Random) -> Any:
    if type(old) is int:
        return max(-(2**63), min(old + chance.choice((-64, -1, 1, 64, 4096)), 2**64 - 1))
    if type(old) in (str, bytes) and old:
        cut = chance.randrange(len(old))
        return old[:cut] if chance.random() < 0.5 else old + old[cut:]
    return old


def _without_cycles(value: Any) -> Any:
    if type(value) is dict:
        return {k: _without_cycles(v) for k, v in value.items()}
    return [_without_cycles(v) for v in value] if type(value) is list else value
