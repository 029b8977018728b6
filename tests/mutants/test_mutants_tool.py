"""The tool itself: what it generates, plants and finds. The table is made by `make mutants`."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutants.__main__ import chosen
from tests.mutants.by_hand import BY_HAND, EDITS, edited, mutants_by_hand
from tests.mutants.generate import Mutant, mutants_of, mutated
from tests.mutants.report import complaints, table
from tests.mutants.run import Outcome
from tests.mutants.survivors import explained, gone, not_needed
from tests.mutants.targets import ROOT, TARGETS, TRACED, source_of

SOURCE = '''
import logging
log = logging.getLogger()

class Thing:
    """Not a mutant."""
    def __init__(self):
        self.count = 0

    def act(self, a, b):
        assert a
        log.info("x")
        if a and not b:
            self.count += 1
        self.left, self.right = a, b
        for x in [y for y in b if y > 1]:
            self.use(x)
            continue
        name = a or b
        if a is None:
            raise ValueError("no" if a else "")
        return a if a == 1 else name

    def ready(self) -> bool:
        if any(x for x in self.all):
            return True
        return self.count
'''


def test_conditions_are_negated_and_effects_dropped() -> None:
    found = [mutant.text for mutant in mutants_of("thing.py", SOURCE)]
    assert found == [
        "negate `a`",
        "negate `b`",
        "drop `self.count += 1`",
        "drop `self.left`",
        "drop `self.right`",
        "negate `y > 1`",
        "drop `self.use(x)`",
        "drop `continue`",
        "only `a`",
        "only `b`",
        "negate `a is None`",
        "drop `raise ValueError('no' if a else '')`",
        "negate `a == 1`",
        "negate `any((x for x in self.all))`",
        "negate `x`",
        "flip `return True`",
        "negate `self.count`",
    ]


def test_each_mutant_is_another_program_with_the_same_lines() -> None:
    plain = ast.unparse(ast.parse(SOURCE))
    seen = {plain}
    for mutant in mutants_of("thing.py", SOURCE):
        tree = mutated("thing.py", SOURCE, mutant.number)
        text = ast.unparse(tree)
        assert text not in seen, mutant.title
        seen.add(text)
        compile(tree, "thing.py", "exec")


def test_ids_do_not_move_with_the_lines_around() -> None:
    """So that the list of explained survivors does not rot."""
    before = [mutant.id for mutant in mutants_of("thing.py", SOURCE)]
    assert len(set(before)) == len(before)
    moved = SOURCE.replace("import logging\n", "import logging\n\n\n").replace(
        "        assert a\n", "        self.more()\n"
    )
    assert set(before) < {mutant.id for mutant in mutants_of("thing.py", moved)}


@pytest.mark.parametrize("path", TARGETS)
def test_every_target_has_mutants_and_each_can_be_compiled(path: str) -> None:
    source = source_of(path)
    mutants = mutants_of(path, source)
    assert len({mutant.id for mutant in mutants}) == len(mutants) > 8
    for mutant in mutants[:: max(1, len(mutants) // 5)]:
        compile(mutated(path, source, mutant.number), path, "exec")


def test_what_is_written_by_hand_fits_the_source() -> None:
    assert len(mutants_by_hand()) > len(EDITS) >= 15
    for edit in EDITS:
        compile(edited(edit), edit.path, "exec")
        assert edit.path in TRACED, "else nobody is known to reach it"


def test_a_planted_mutant_is_what_everybody_runs() -> None:
    """Also who imported the function by name. In a process of its own, which does not survive it."""
    script = """
from ckptd.core.protocol.machine.slots import Slots
from ckptd.core.retention import keep, CommitInfo
from ckptd.core.ids import SnapshotId
from ckptd.core.policy import Policy
from tests.mutants.generate import mutants_of, mutated
from tests.mutants.plant import plant
from tests.mutants.targets import source_of
path = "core/retention.py"
number = next(m.number for m in mutants_of(path, source_of(path)) if m.text == "negate `commit.verified`")
commits = [CommitInfo(SnapshotId(1, step), False, True) for step in range(3)]
before = len(keep(commits, Policy(keep_last=1), None)[1])
plant(path, mutated(path, source_of(path), number))
print(before, len(keep(commits, Policy(keep_last=1), None)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["2", "0"]


def test_the_table_and_what_is_wrong_with_it() -> None:
    one, two, three = (Mutant(f"x.py:f:negate:{n}", "x.py", "f", n, n, f"negate `{n}`", n) for n in range(3))
    outcomes = {
        one.id: Outcome(True, "seed 3", "P3"),
        two.id: Outcome(False, tried=4),
        three.id: Outcome(True, "tests/core/test_x.py::test_y", "call"),
    }
    assert complaints([one, three], outcomes, {}, []) == []
    (lives, share) = complaints([one, two, three], outcomes, {}, [])
    assert "x.py:1 negate `1`" in lives and "66.7%" in share
    assert (
        complaints([two], outcomes, {two.id: "why"}, ["gone"])[0]
        == "its entry in survivors.toml is not needed: gone"
    )
    last = table([one, two, three], outcomes, {two.id: "why"}).splitlines()[-1]
    assert last.split() == ["all", "3", "1", "1", "0", "1", "1", "66.7", "%"]
    assert gone({"a", one.id}, [one]) == ["a"]
    assert not_needed({one.id, two.id}, outcomes) == [one.id]


def test_of_those_written_by_hand_none_is_left_out() -> None:
    """Their ids would leave most of them out, as they do with those that are generated."""
    generated, by_hand = mutants_of("thing.py", SOURCE), mutants_by_hand()
    assert {mutant.function for mutant in by_hand} == {BY_HAND}
    found = chosen([*generated, *by_hand], "", 5)
    assert found[-len(by_hand) :] == by_hand
    assert 0 < len(found) - len(by_hand) < len(generated)
    assert chosen(by_hand, "no verify", 5) == [m for m in by_hand if "no verify" in m.title]


def test_every_survivor_that_is_explained_is_still_there() -> None:
    mutants = [mutant for path in TARGETS for mutant in mutants_of(path, source_of(path))]
    assert gone(explained(), [*mutants, *mutants_by_hand()]) == []
