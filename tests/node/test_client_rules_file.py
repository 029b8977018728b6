"""Rules in a TOML file mean what they mean in a program, and each mistake is named with file, pattern and remedy (D18)."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptd_client import CkptdError, Client, copied, own, padded, rules_file, shard
from ckptd_client.rules_file import given, given_own

from tests.node.rank_daemon_double import RankDaemonDouble

INTEGRATIONS = Path(__file__).resolve().parents[2] / "docs" / "INTEGRATIONS.md"
reads_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python reads TOML by itself from 3.11 on")


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text, encoding="utf-8")
    return path


@reads_toml
@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('"w" = [{shard = 0, over = "tp"}]', [shard(0, over="tp")]),
        ('"w" = {shard = -1, over = "tp"}', shard(-1, over="tp")),
        ('["w"]\nshard = 1\nover = "tp"', shard(1, over="tp")),
        ('[["w"]]\nshard = 1\nover = "tp"\n[["w"]]\ncopied = "dp"', [shard(1, over="tp"), copied("dp")]),
        ('"w" = [{shard = 0, over = "tp", parts = [64, 16, 16]}]', [shard(0, over="tp", parts=[64, 16, 16])]),
        ('"w" = {shard = 0, over = "tp", widths = "even", unit = 8}', shard(0, over="tp", widths="even", unit=8)),
        ('"w" = {shard = 0, over = "tp", widths = [7, 0, 3]}', shard(0, over="tp", widths=[7, 0, 3])),
        (
            '"w" = {shard = 0, over = "tp", parts = [4, 6], widths = [[4, 0], [1, 5]]}',
            shard(0, over="tp", parts=[4, 6], widths=[[4, 0], [1, 5]]),
        ),
        ('"w" = {shard = 0, over = "ep", unit = 2, order = [[1, 0], [2]]}', shard(0, over="ep", unit=2, order=[[1, 0], [2]])),
        ('"w" = {copied = "tp"}', copied("tp")),
        ('"w" = [{shard = 0, over = "tp"}, {padded = 0, size = 50257}]', [shard(0, over="tp"), padded(0, 50257)]),
        *((f'"w" = {{own = "{how}"}}', own(how)) for how in ("mean", "sum", "max", "first", "same")),
    ],
)
def test_a_rule_means_what_it_means_in_a_program(tmp_path: Path, line: str, rule: Any) -> None:
    path = written(tmp_path, line)
    assert given(path) == given(str(path)) == {"w": rule}


@reads_toml
def test_the_documents_example_is_a_file_of_rules(tmp_path: Path) -> None:
    text = INTEGRATIONS.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    rules = given(written(tmp_path, text))
    assert rules["*.running_*"] == own("mean")
    assert rules["*.qkv.weight"] == [shard(0, over="tp", parts=(4096, 1024, 1024)), copied("dp")]


@reads_toml
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"w" = {cut = 0}', "a cut is one of shard, copied, padded, own, not 'cut'"),
        ('"w" = {}', "a cut is one of shard, copied, padded, own, not nothing"),
        ('w.bias = {own = "mean"}', "a cut is one of shard, copied, padded, own, not 'bias'"),
        ('"w" = {shard = 0, over = "tp", copied = "dp"}', "not shard and copied"),
        ('"w" = 3', "a rule is a cut or a list of cuts, each in braces"),
        ('"w" = []', "a rule is a cut or a list of cuts, each in braces"),
        ('"w" = [0, "tp"]', "a rule is a cut or a list of cuts, each in braces"),
        ('"w" = {shard = 0}', "shard needs over"),
        ('"w" = {padded = 0}', "padded needs size"),
        ('"w" = {shard = 0, over = "tp", part = [1]}', "shard takes over, parts, widths, unit, order, not 'part'"),
        ('"w" = {copied = "tp", size = 3}', "copied takes nothing more, not 'size'"),
        ('"w" = {shard = "0", over = "tp"}', "shard is a whole number, not '0'"),
        ('"w" = {shard = true, over = "tp"}', "shard is a whole number, not True"),
        ('"w" = {shard = 0, over = 1}', "over is a text in quotes, not 1"),
        ('"w" = {copied = ["tp"]}', "copied is a text in quotes, not ['tp']"),
        ('"w" = {shard = 0, over = "tp", parts = 64}', "parts is a list of whole numbers, not 64"),
        ('"w" = {shard = 0, over = "tp", parts = [64, 0.5]}', "parts is a list of whole numbers, not [64, 0.5]"),
        ('"w" = {shard = 0, over = "tp", unit = 2.0}', "unit is a whole number, not 2.0"),
        ('"w" = {shard = 0, over = "tp", unit = 0}', "shard: unit is at least 1"),
        ('"w" = {shard = 0, over = "tp", widths = "odd"}', "widths is \"even\", a list of whole numbers or"),
        ('"w" = {shard = 0, over = "tp", widths = [[1], 2]}', "widths is \"even\", a list of whole numbers or"),
        ('"w" = {shard = 0, over = "tp", order = [0, 1]}', "order is a list of lists of whole numbers, not [0, 1]"),
        ('"w" = {shard = 0, over = "tp", order = [[0], [0]]}', "shard: order names each unit once"),
        ('"w" = {padded = 0, size = "50257"}', "size is a whole number, not '50257'"),
        ('"w" = {own = "median"}', "own: own() takes one of mean, sum, max, first, same, not 'median'"),
        ('"w" = [{own = "mean"}]', "own is the only rule of a tensor"),
    ],
)
def test_a_mistake_is_named_with_file_pattern_and_remedy(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, line)
    with pytest.raises(CkptdError) as caught:
        given(path)
    assert said in caught.value.what
    assert caught.value.where == f"{path}: 'w'"
    assert caught.value.hint


@reads_toml
@pytest.mark.parametrize(("line", "said"), [('"w" = ', "not TOML: "), ('"w" = {own = "sum"}\n"w" = {own = "max"}', "not TOML: ")])
def test_what_is_no_toml(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, line)
    with pytest.raises(CkptdError, match=said) as caught:
        given(path)
    assert caught.value.where == str(path)
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.toml", "No such file"), (tmp_path, "directory")):
        with pytest.raises(CkptdError, match=said) as caught:
            given(path)
        assert caught.value.where == os.fspath(path)
        assert caught.value.hint
    odd = tmp_path / "odd.toml"
    odd.write_bytes(b'"w" = {own = "\xff"}')
    with pytest.raises(CkptdError, match="rules cannot be read"):
        given(odd)
    with pytest.raises(CkptdError, match="the path of a TOML file, not a int"):
        given(3)  # type: ignore[arg-type]


def test_an_older_python_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    path, there = written(tmp_path, '"w" = {own = "mean"}'), runpy.run_path(rules_file.__file__)
    with pytest.raises(CkptdError, match=r"needs Python 3\.11") as caught:
        there["given"](path)
    assert caught.value.where == str(path)
    assert there["given"]({"w": own("mean")}) == {"w": own("mean")}


def test_rules_of_a_program_are_taken_as_they_are() -> None:
    rules = {"w": own("mean")}
    assert given(rules) is rules
    assert given(None) == {} == given_own(None)
    with pytest.raises(CkptdError, match=r"takes own\(\) alone \[w\]"):
        given_own({"w": copied("tp")})


@reads_toml
def test_a_restore_takes_own_alone(tmp_path: Path) -> None:
    path = written(tmp_path, '"*.running_*" = {own = "mean"}')
    assert given_own(path) == {"*.running_*": own("mean")}
    path = written(tmp_path, '"w" = {copied = "tp"}')
    with pytest.raises(CkptdError) as caught:
        given_own(path)
    assert (caught.value.what, caught.value.where) == ("restore() takes own() alone", f"{path}: 'w'")


@reads_toml
def test_a_client_registers_and_restores_by_a_file(tmp_path: Path, daemon: RankDaemonDouble) -> None:
    """What is padded is not saved; a file of another pattern is refused as the same rule in a program is."""
    path, model = written(tmp_path, '"model.weight" = {padded = 0, size = 100}'), torch.nn.Embedding(128, 3)
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, rules=path)
        client.restore(rules=None)
        assert client.snapshot(1, must=True).wait("durable", 30) == "durable"
    assert [f.shape for f in daemon.held[1, 1][0].layout.fragments if f.key == "model.weight"] == [(100, 3)]
    with Client.connect("job", socket=daemon.path) as client:
        client.register(model=model, rules=os.fspath(path))
        with pytest.raises(CkptdError, match=r"takes own\(\) alone"):
            client.restore(rules=path)
        with pytest.raises(CkptdError, match="fits none of"):
            client.register(model=model, rules=written(tmp_path, '"model.wight" = {padded = 0, size = 100}'))
        assert client.restore(rules=written(tmp_path, '"model.*" = {own = "same"}')) == 1
