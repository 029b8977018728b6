"""Values of any message class, made from its type hints: what the real encoders are given."""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from ckptd.core.redundancy.parity_sets import Member, ParitySet, ParityShard

WORDS = ("", "a", "n0", "n1", "protected", "durable", "1000/gpt", "tcp://10.0.0.1:7000", "é", "x" * 40)


def example(hint: Any, chance: random.Random) -> Any:
    """Any value that a field of this type may hold."""
    if hint is Any:
        return {"a": [1, {"b": None, "c": 1.5}], "d": b"x"}
    if hint is ParitySet:  # whose fields must fit together
        members = tuple(example(Member, chance) for _ in range(chance.randrange(2, 5)))
        return ParitySet(chance.randrange(1, 9), chance.randrange(4), chance.randrange(1, len(members)), members)
    if hint is ParityShard:
        parity_set = example(ParitySet, chance)
        return ParityShard(parity_set, chance.randrange(len(parity_set.members)))
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{f.name: example(hints[f.name], chance) for f in dataclasses.fields(hint)})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return example(chance.choice(arguments), chance)
    if origin is dict:
        return {
            example(arguments[0], chance): example(arguments[1], chance) for _ in range(chance.randrange(3))
        }
    if origin is list:
        return [example(arguments[0], chance) for _ in range(chance.randrange(3))]
    if origin is tuple:
        kinds = [arguments[0]] * chance.randrange(3) if arguments[-1] is Ellipsis else arguments
        return tuple(example(kind, chance) for kind in kinds)
    return _leaf(hint, chance)


def _leaf(kind: Any, chance: random.Random) -> Any:
    if kind is int:
        return chance.choice((0, 1, 7, 4096, 2**31, 2**40))
    if kind is str:
        return chance.choice(WORDS)
    if kind is bytes:
        return chance.randbytes(chance.choice((0, 16, 40)))
    if kind is float:
        return chance.choice((0.0, 0.5, 1e9))
    if kind is bool:
        return chance.random() < 0.5
    assert kind is type(None), kind
    return None


def examples(classes: Any, each: int = 2) -> list[Any]:
    chance = random.Random(1)
    return [example(cls, chance) for cls in classes for _ in range(each)]
