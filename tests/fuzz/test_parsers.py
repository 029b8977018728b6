"""Every parser of the registry against mutants of valid samples, trees of any kind, and what once broke it (P10, P13)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.wire import codec, rank
from tests.fuzz import trees
from tests.fuzz.examples import example, examples
from tests.fuzz.mutate import mutant
from tests.fuzz.registry import TARGETS
from tests.fuzz.regressions import HARMLESS, REGRESSIONS
from tests.fuzz.target import REFUSED, Target, _parse, judge

EXAMPLES = 30  # of each target and test, others each time; `make soak` looks longer
MUTANTS_PER_EXAMPLE = 4

bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
every = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
KNOWN = [(TARGETS[name], what, data) for name, found in REGRESSIONS.items() for what, data in found.items()]

MESSAGES = [
    (TARGETS["control-message"], list(codec.MESSAGES.values())),
    (TARGETS["rank-frame"], list(rank.TO_DAEMON)),
    (TARGETS["daemon-frame"], list(rank.TO_RANK)),
]

LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=10,
)


def hold(target: Target, data: bytes) -> None:
    finding = judge(target, data, memory=True)
    assert finding is None, f"{target.name}: {finding.kind}: {finding.text}\n{data[:400]!r}"


@every
def test_its_own_samples_are_accepted_and_come_back(target: Target) -> None:
    for sample in target.valid:
        try:
            target.parse(sample)
        except target.errors:
            assert target.name == "bulk-reply", "only refusals are answered with an error"
        hold(target, sample)
        if target.pack is not None and target.name != "bulk-reply":
            assert target.parse(target.pack(target.parse(sample))) == target.parse(sample)


@every
@bounded
@given(seed=st.integers(0, 2**32))
def test_mutants(target: Target, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(MUTANTS_PER_EXAMPLE):
        hold(target, mutant(target, chance))


@every
@bounded
@given(data=st.one_of(st.binary(max_size=200), st.sampled_from(list(trees.ODD_BYTES["msgpack"]))))
def test_any_bytes(target: Target, data: bytes) -> None:
    hold(target, data)


@pytest.mark.parametrize(
    "target", [t for t in TARGETS.values() if t.form in ("msgpack", "json")], ids=lambda t: str(t.name)
)
@bounded
@given(tree=TREES, seed=st.integers(0, 2**32))
def test_any_tree_where_a_value_was_expected(target: Target, tree: Any, seed: int) -> None:
    """Generated from the structure: the sample's own, with a subtree of another kind."""
    chance = random.Random(seed)
    whole = [trees.parse(chance.choice(target.valid), target.form)]
    above, key = chance.choice(list(trees.places(whole)))
    above[key] = tree if target.form == "msgpack" else trees.as_json(tree)
    hold(target, trees.pack(whole[0], target.form))


@pytest.mark.parametrize(("target", "what", "data"), KNOWN, ids=[f"{t.name}: {what}" for t, what, _ in KNOWN])
def test_what_once_broke_it_is_refused(target: Target, what: str, data: bytes) -> None:
    hold(target, data)
    assert _parse(target, data) is REFUSED


@pytest.mark.parametrize("name", HARMLESS)
def test_what_once_broke_it_counts_as_nothing(name: str) -> None:
    for data in HARMLESS[name].values():
        hold(TARGETS[name], data)


@bounded
@given(seed=st.integers(0, 2**32))
def test_every_message_comes_back_equal(seed: int) -> None:
    chance = random.Random(seed)
    for target, classes in MESSAGES:
        message = example(chance.choice(classes), chance)
        assert target.pack is not None
        assert target.parse(target.pack(message)) == message


@pytest.mark.parametrize("name", ["control-message", "rank-frame", "daemon-frame"])
def test_every_class_has_samples(name: str) -> None:
    classes = next(classes for target, classes in MESSAGES if target.name == name)
    assert {type(value) for value in TARGETS[name].values} == set(classes)
    assert len(TARGETS[name].valid) == len(examples(classes))
