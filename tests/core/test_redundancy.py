"""What the setting ``redundancy`` accepts, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.redundancy.policies import FORMS, GROUP_MAX, Parity, Redundancy, Replicas, attainable, parse
from tests.core.worlds import quick


@pytest.mark.parametrize(
    ("text", "meant", "tolerates", "canonical"),
    [
        ("replicas=2", Replicas(2), 2, "replicas=2"),
        (" Replicas = 1 ", Replicas(1), 1, "replicas=1"),
        ("3", Replicas(3), 3, "replicas=3"),
        ("0", Replicas(0), 0, "replicas=0"),
        ("xor(4)", Parity(3, 1), 1, "xor(4)"),
        ("xor( 2 )", Parity(1, 1), 1, "xor(2)"),
        ("rs(4,2)", Parity(4, 2), 2, "rs(4,2)"),
        ("RS(10, 4)", Parity(10, 4), 4, "rs(10,4)"),
        ("rs(3,1)", Parity(3, 1), 1, "xor(4)"),
    ],
)
def test_forms(text: str, meant: Redundancy, tolerates: int, canonical: str) -> None:
    found = parse(text)
    assert found == meant
    assert found is not None and (found.tolerates, found.text) == (tolerates, canonical)


def test_auto_is_none_and_groups_count_data_and_parity() -> None:
    assert parse("auto") is None
    assert parse("AUTO") is None
    assert Parity(4, 2).group == 6


@pytest.mark.parametrize(
    "text", ["", "two", "replicas", "replicas=-1", "replicas=", "xor", "xor(4,1)", "rs(4)", "1.5"]
)
def test_anything_else_names_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match="is not a redundancy") as error:
        parse(text)
    assert FORMS in str(error.value)


@pytest.mark.parametrize(
    "text", ["17", "xor(1)", "xor(0)", "rs(0,2)", "rs(4,0)", "rs(250,6)", f"xor({GROUP_MAX + 1})"]
)
def test_numbers_out_of_range_say_the_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"0 to 16|at least|at most 255"):
        parse(text)


@quick
@given(
    st.one_of(
        st.builds(Replicas, st.integers(0, 16)), st.builds(Parity, st.integers(1, 200), st.integers(1, 55))
    )
)
def test_the_text_is_read_back(redundancy: Redundancy) -> None:
    assert parse(redundancy.text) == redundancy


@pytest.mark.parametrize(
    ("tolerates", "domains", "most"),
    [(2, "abcd", 2), (2, "abc", 2), (2, "ab", 1), (2, "aabb", 1), (2, "aaaa", 0), (0, "abc", 0), (1, "", 0)],
)
def test_no_more_losses_are_survived_than_there_are_other_domains(tolerates: int, domains: str, most: int) -> None:
    assert attainable(tolerates, iter(domains)) == most
