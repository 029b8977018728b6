"""What the simulator raises when a promise does not hold."""

from __future__ import annotations


class Broken(AssertionError):
    """A promise was broken. The first word is its number."""
