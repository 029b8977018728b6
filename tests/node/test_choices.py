"""What several commands let one choose means the same in each of them."""

from __future__ import annotations

import pytest

from ckptd.choices import Patterns, PrefixMap
from ckptd.core.errors import CkptdError


@pytest.mark.parametrize(
    ("given", "name", "becomes"),
    [
        ("net=model", "net.weight", "model.weight"), ("net.=model.", "net.weight", "model.weight"),
        ("net=model", "network.weight", None), ("net=model", "net", "model"), ("net=", "net.weight", "weight"),
        ("=model", "weight", "model.weight"), ("a=x", "b.a", None),
    ],
)  # fmt: skip
def test_a_prefix_ends_at_a_dot(given: str, name: str, becomes: str | None) -> None:
    prefixes = PrefixMap.parse([given])
    assert (prefixes.said(name), prefixes.rename(name)) == (becomes, name if becomes is None else becomes)


def test_the_longest_prefix_counts_and_an_empty_one_is_no_name() -> None:
    prefixes = PrefixMap.parse(["=model", "app=a", "app.optim="])
    assert [prefixes.rename(name) for name in ("app.optim", "app.net", "w")] == ["", "a.net", "model.w"]
    assert prefixes.said("optimizer", by_name=True) is None
    prefixes.check()


def test_what_fits_nothing_is_said() -> None:
    wanted, prefixes = Patterns(["a.*", "b"]), PrefixMap.parse(["x=y"])
    assert [wanted(name) and prefixes.said(name) is None for name in ("a.w", "c")] == [True, False]
    with pytest.raises(CkptdError, match="fits none of 2 keys: b") as told:
        wanted.check()
    assert told.value.hint == "a pattern is of a whole key, as in a.w, c"
    with pytest.raises(CkptdError, match="begins no name: x"):
        prefixes.check()
    with pytest.raises(CkptdError, match="not OLD=NEW: x"):
        PrefixMap.parse(["x"])
