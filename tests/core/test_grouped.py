"""Errors about many tensors are grouped by cause, counted, and five of each shown (P15)."""

from __future__ import annotations

from ckptd.core.grouped import grouped


def test_one_is_as_it_was() -> None:
    assert grouped(["a.weight: not there"]) == "a.weight: not there"
    assert grouped(["no colon here"]) == "no colon here"
    assert grouped([]) == ""


def test_equal_causes_are_said_once_the_commonest_first() -> None:
    found = grouped(["z: another", *(f"a{i}: not there" for i in range(7))])
    assert found == "a0, a1, a2, a3, a4 and 2 more: not there (7 in all); z: another"


def test_causes_that_differ_in_numbers_are_one() -> None:
    assert grouped([f"a: F32[{i}] here" for i in (3, 4)]) == "a: F32[3] here; a: F32[4] here (2 in all)"
