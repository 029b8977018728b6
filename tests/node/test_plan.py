"""`ckptd plan`: the choice and why, what it costs, what it survives, and the published probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli import published
from ckptd.cli.plan_nodes import parse_nodes
from ckptd.cli.plan_tables import probability
from tests.node.commands import Cli, Ran, places
from tests.node.status_page import Page

GIB = 1 << 30


@pytest.fixture
def plan(cli: Cli, tmp_path: Path) -> Any:
    def called(*arguments: object) -> Ran:
        return cli("plan", *places(tmp_path), *arguments)

    return called


def answer(shown: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown.out)
    return found


# --- published values --------------------------------------------------------------------------------------------
def test_the_published_table_is_printed_and_matches(plan: Any) -> None:
    shown = plan("--published")
    assert shown.code == 0
    assert re.search(r"group +16 +2 +4 +exact +0\.6154 +0\.6154 +ok", shown.out)
    assert re.search(r"mixed +9 +2 +2 +exact +0\.8333 +0\.8333 +ok", shown.out)
    rows = answer(plan("--published", "--json"))["rows"]
    assert len(rows) == len(published.PUBLISHED) == shown.out.count(" ok")


def test_a_value_that_does_not_match_is_an_error(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(published.PUBLISHED[0], published=0.9332)
    monkeypatch.setattr(published, "PUBLISHED", (wrong, *published.PUBLISHED[1:]))
    shown = plan("--published")
    assert shown.code == 1
    assert re.search(r"0\.9332 +0\.9333 +NO", shown.out)


# --- the choice --------------------------------------------------------------------------------------------------
ASKED = ("--nodes", 8, "--state-bytes", "96GiB", "--ranks-per-node", 8)


def test_copies_are_chosen_where_they_fit(plan: Any) -> None:
    shown = plan(*ASKED, "--memory-budget", "88GiB", "--json")
    found = answer(shown)
    assert shown.code == 0
    assert (found["redundancy"], found["chosen"], found["fits"]) == ("replicas=1", True, True)
    assert found["memory"]["steady_bytes"] == 60 * GIB
    assert found["memory"]["own_bytes"] == 36 * GIB
    assert (
        found["memory"]["needed_bytes"]
        == found["memory"]["worst_after_loss_bytes"]
        == int(60 * GIB + 2 * 96 * GIB / 7)
    )
    assert found["sent_bytes_per_snapshot"] == 12 * GIB
    assert found["survives_domains"] == 1
    assert found["copies"]["n0"] == ["n1"]
    assert [row["value"] for row in found["recovery"]][:2] == [1.0, pytest.approx(1 - 4 / 28)]


def test_parity_is_chosen_where_copies_do_not_fit(plan: Any) -> None:
    shown = plan(*ASKED, "--memory-budget", "65GiB")
    assert shown.code == 0
    assert re.search(r"redundancy +xor\(4\)", shown.out)
    assert "xor(4) is the smallest group with parity that does" in shown.out
    assert re.search(r"parity groups +n0\+n2\+n4\+n6  n1\+n3\+n5\+n7", shown.out)
    assert re.search(r"rejected[^\n]*\n[^\n]*\nreplicas=1 +needs 87.4 GiB of 65 GiB per node", shown.out)
    assert "memory              44.0 GiB" in re.sub(r"memory +", "memory              ", shown.out)
    assert re.search(r"\n +1 +1\.0000 +exact +1\.0000\n +2 +0\.5714 +exact", shown.out)


def test_a_policy_that_was_named_is_shown_and_not_questioned(plan: Any) -> None:
    shown = plan(*ASKED, "--memory-budget", "60GiB", "--redundancy", "rs(4,2)", "--json")
    found = answer(shown)
    assert shown.code == 1
    assert (found["redundancy"], found["chosen"], found["fits"]) == ("rs(4,2)", False, False)
    assert [len(group) for group in found["groups"]] == [4, 4]
    assert (
        answer(plan(*ASKED, "--replicas", 2, "--memory-budget", "900GiB", "--json"))["redundancy"]
        == "replicas=2"
    )
    auto = answer(
        plan(*ASKED, "--redundancy", "auto", "--tolerate", 2, "--memory-budget", "900GiB", "--json")
    )
    assert (auto["redundancy"], auto["chosen"]) == ("replicas=2", True)


def test_domains_are_lost_whole(plan: Any) -> None:
    racks = ",".join(f"n{i}:rack{i // 2}" for i in range(8))
    shown = plan("--nodes", racks, "--redundancy", "replicas=1")
    assert shown.code == 0
    assert "8 in 4 failure domains" in shown.out
    assert "holds 1 of a node's state for others" in shown.out
    assert "by failure domains lost at once" in shown.out


def test_what_ddp_replicates_is_captured_more_than_once_and_sent_nowhere(plan: Any) -> None:
    asked = (*ASKED, "--ddp", "--tolerate", 2, "--memory-budget", "200GiB")
    found = answer(plan(*asked, "--json"))
    assert (found["redundancy"], found["sent_bytes_per_snapshot"], found["memory"]["peer_bytes"]) == (
        "replicas=2",
        0,
        0,
    )
    assert found["memory"]["own_bytes"] == 3 * 3 * 12 * GIB
    assert (found["groups"], found["copies"], found["recovery"]) == ([], {}, []), (
        "the client's plan decides who holds what"
    )
    shown = plan(*asked)
    assert "any 2 failure domains at once" in shown.out
    assert "spread over the job" in shown.out


def test_model_parallel_groups_are_kept_apart(plan: Any) -> None:
    found = answer(plan("--nodes", "a::tp0,b::tp0,c::tp1,d::tp1", "--redundancy", "1", "--json"))
    assert found["copies"]["a"][0] in "cd"
    assert found["copies"]["b"][0] in "cd"


@pytest.mark.parametrize("text", ["0", "a,a", "", "a b", "a:b:c:d", "70000"])
def test_bad_lists_of_nodes(text: str, plan: Any) -> None:
    with pytest.raises(ValueError, match=r"write a number|once|there are 1 to"):
        parse_nodes(text)
    assert plan("--nodes", text, "--state-bytes", "1GiB").code == 2


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.0000"), (0.99999, "1 - 1e-05"), (0.9999, "0.9999"), (0.0, "0.0000")]
)
def test_what_is_not_certain_does_not_look_like_it(value: float, text: str) -> None:
    assert probability(value) == text


def test_wrong_usage(plan: Any) -> None:
    unsaid = plan("--nodes", 4)
    assert (unsaid.code, "say --state-bytes" in unsaid.err) == (1, True)
    assert plan("--nodes", 4, "--state-bytes", "lots").code == 2
    assert plan("--nodes", 4, "--state-bytes", "1MiB", "--frozen-bytes", "2MiB").code == 2
    nobody = plan("--state-bytes", "1GiB")
    assert (nobody.code, "say --nodes" in nobody.err) == (1, True)


# --- the running job ---------------------------------------------------------------------------------------------
def job(name: str) -> dict[str, Any]:
    """Four nodes with 6 GiB of room, 8 ranks with half a GiB each, of which a quarter is frozen."""
    nodes = [{"node": f"n{i}", "domain": f"rack{i}", "memory": {"budget_bytes": (6 + i) * GIB}} for i in range(4)]
    ranks = [{"rank": rank, "state_bytes": 3 * GIB // 8, "frozen_bytes": GIB // 8} for rank in range(8)]
    return {"job": f"1000/{name}", "world": 8, "nodes": nodes, "ranks": ranks}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[dict[str, Any]]:
    answers: dict[str, Any] = {"status": {"jobs": [job("llm")]}}
    served = Page(tmp_path, answers)
    yield answers
    served.stop()


def test_nodes_and_state_of_the_running_job(plan: Any, page: dict[str, Any]) -> None:
    found = answer(plan("--json"))
    assert [node["domain"] for node in found["nodes"]] == [f"rack{i}" for i in range(4)]
    assert found["memory"]["own_bytes"] == 3 * 3 * GIB // 4 + GIB // 4, "three generations, and what is frozen once"
    assert found["memory"]["budget_bytes"] == 6 * GIB, "of the node that has least"
    assert answer(plan("--frozen-bytes", "0", "--json"))["memory"]["own_bytes"] == 3 * GIB
    assert answer(plan("--memory-budget", "8GiB", "--json"))["memory"]["budget_bytes"] == 8 * GIB, "what is said counts"
    assert "job 1000/llm, now" in plan().out


def test_a_rank_of_unknown_size_makes_the_state_unknown(plan: Any, page: dict[str, Any]) -> None:
    del page["status"]["jobs"][0]["ranks"][3]["state_bytes"]
    unsaid = plan("--json")
    assert (unsaid.code, "how large is one snapshot" in unsaid.err) == (1, True)


def test_which_of_several_jobs(plan: Any, page: dict[str, Any]) -> None:
    page["status"] = {"jobs": [job("llm"), job("other")]}
    unsaid = plan("--json")
    assert unsaid.code == 1
    assert "1000/llm, 1000/other" in unsaid.err
    assert plan("--job", "llm", "--memory-budget", "8GiB").code == 0
    assert plan("--job", "none").code == 1
