"""How it is said that a promise does not hold, or that a life could not even be judged."""

from __future__ import annotations


class Broken(AssertionError):
    """A promise does not hold."""


class Failed(Broken):
    """A life went wrong by itself, before the power did: this need not have anything to do with power cuts."""


def expect(holds: object, text: str, kind: type[Broken] = Broken) -> None:
    if not holds:
        raise kind(text)
