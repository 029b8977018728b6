"""Which tensors were written past a rank's fence: what a void tells every rank, so that all copy them at once (D6).

Not a promise: a rank that does not hear of a tensor finds the next write to it by itself, for one more void.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Written = dict[str, tuple[str, ...]]  # registered object -> keys of its tensors; none: all of it

OWNERS_MAX = 64  # named in one void
KEYS_MAX = 64  # the same, of all owners together
NAME_BYTES_MAX = 256  # a longer key has its owner named in its place; a longer owner is not named


def bounded(written: Mapping[str, Collection[str]]) -> Written:
    """As much as a void may name. An owner whose keys are too many or too long is named as a whole."""
    found: Written = {}
    room = KEYS_MAX
    for owner in sorted(filter(_short, written))[:OWNERS_MAX]:
        keys = tuple(sorted(written[owner]))
        whole = len(keys) > room or not all(map(_short, keys))
        found[owner] = () if whole else keys
        room -= len(found[owner])
    return found


def merged(first: Written, second: Written) -> Written:
    """What two ranks found."""
    both: dict[str, Collection[str]] = {**first, **second}
    for owner in first.keys() & second.keys():
        both[owner] = {*first[owner], *second[owner]} if first[owner] and second[owner] else ()
    return bounded(both)


def checked(value: object) -> Written:
    """What came from a rank. Raises ValueError for what no client sends."""
    if not isinstance(value, dict) or len(value) > OWNERS_MAX:
        raise ValueError("not a list of written tensors")
    for owner, keys in value.items():
        if not isinstance(keys, list) or len(keys) > KEYS_MAX or not all(map(_is_name, (owner, *keys))):
            raise ValueError("not a list of written tensors")
    return bounded(value)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _short(name)


def _short(name: str) -> bool:
    return len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX
