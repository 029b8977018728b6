"""`ckptd preflight`: what fits and why not, and the arithmetic of memory behind it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.sizing import Sizing, sizing
from ckptd.core.policy import Policy
from tests.node.commands import Cli, Ran, places

GIB = 1 << 30


def checks_of(shown: Ran) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(shown.out)["checks"]}


def preflight(cli: Cli, folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    shown = cli("preflight", "--json", *places(folder), "--memory-budget", "64MiB", *arguments)
    return shown.code, checks_of(shown)


def test_preflight_of_a_node_that_is_fine(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    cli("keygen", tmp_path / "key")
    code, found = preflight(
        cli, tmp_path, "--key-file", tmp_path / "key", "--storage-root", tmp_path / "storage"
    )
    assert [name for name, check in found.items() if check["ok"] is False] == []
    assert code == 0


def test_preflight_says_what_is_wrong_and_what_to_do(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o644)
    code, found = preflight(
        cli, tmp_path, "--key-file", tmp_path / "key", "--storage-root", tmp_path / "absent"
    )
    assert code == 1
    for name in ("key", "storage"):
        assert found[name]["ok"] is False
        assert found[name]["hint"], name


def test_preflight_wants_a_key_or_the_explicit_flag(cli: Cli, tmp_path: Path) -> None:
    assert preflight(cli, tmp_path)[1]["key"]["ok"] is False
    assert preflight(cli, tmp_path, "--plain-loopback")[1]["key"]["ok"] is True


def test_preflight_finds_a_taken_port_and_a_foreign_address(cli: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = preflight(cli, tmp_path, "--plain-loopback", "--bulk-port", port)[1]["addresses"]
        assert found["ok"] is False
        assert f"127.0.0.1:{port}" in found["text"]
    found = preflight(cli, tmp_path, "--bind-address", "192.0.2.1")[1]["addresses"]
    assert found["ok"] is False


def test_preflight_finds_a_budget_beyond_the_machine(cli: Cli, tmp_path: Path) -> None:
    shown = cli("preflight", "--json", *places(tmp_path), "--plain-loopback", "--memory-budget", "900TiB")
    assert shown.code == 1
    assert checks_of(shown)["memory"]["ok"] is False


def test_preflight_prints_the_sum_and_what_would_fit(cli: Cli, tmp_path: Path) -> None:
    asked = ("--plain-loopback", "--nodes", 4, "--ranks-per-node", 2, "--state-bytes")
    code, found = preflight(cli, tmp_path, *asked, "20MiB")
    assert found["state"]["ok"] is True
    assert code == 0
    code, found = preflight(cli, tmp_path, *asked, "60MiB")
    assert found["state"]["ok"] is False
    assert "own_slots=2 replicas=0 would fit" in found["state"]["hint"]
    assert code == 1
    assert preflight(cli, tmp_path, *asked, "40MiB")[1]["state"]["ok"] is False
    assert preflight(cli, tmp_path, *asked, "40MiB", "--frozen-bytes", "36MiB")[1]["state"]["ok"] is True
    assert cli("preflight", "--state-bytes", "1MiB", "--frozen-bytes", "2MiB").code == 2


def test_preflight_is_a_table_for_people(cli: Cli, tmp_path: Path) -> None:
    shown = cli("preflight", *places(tmp_path), "--plain-loopback", "--memory-budget", "64MiB")
    assert re.search(r"addresses +ok +127.0.0.1 can be bound", shown.out)
    assert cli("preflight", "--state-bytes", "lots").code == 2


def asked(**changes: Any) -> Sizing:
    base: dict[str, Any] = {"state_bytes": 12 * GIB, "nodes": 4, "ranks_per_node": 1, "replicas": 1}
    return Sizing(**{**base, "own_slots": 2, "peer_sets": 2, **changes})


def test_steady_memory_is_four_states_of_a_node_with_one_replica() -> None:
    """P8: replicas=1 with 2 own and 2 peer sets is 4 x S per node."""
    assert asked().steady_bytes(4) == 4 * 12 * GIB / 4
    assert asked().steady_bytes(3) / asked().steady_bytes(4) == pytest.approx(4 / 3)


def test_what_is_frozen_is_held_once_and_once_per_copy() -> None:
    """An adapter of 1 GiB on a base model of 11 GiB."""
    adapter = asked(frozen_bytes=11 * GIB)
    assert adapter.steady_bytes(4) == (4 * 1 + 2 * 11) * GIB / 4 < asked().steady_bytes(4)
    assert asked(frozen_bytes=11 * GIB, replicated=True).steady_bytes(4) == (2 * 2 * 1 + 2 * 11) * GIB / 4
    assert adapter.slot_bytes == GIB // 4


def test_ddp_needs_no_peer_memory() -> None:
    """About 2 x (f+1)/N x S."""
    assert asked(replicated=True).steady_bytes(4) == 2 * 2 * 12 * GIB / 4


def test_a_lost_node_is_part_of_the_sum() -> None:
    size = asked()
    assert size.needed_bytes == int(size.steady_bytes(4) + 2 * 12 * GIB / 3)
    assert size.needed_bytes > size.steady_bytes(3)


def test_one_node_has_nobody_to_copy_to() -> None:
    alone = asked(nodes=1, replicas=2)
    assert alone.tolerates == 0
    assert alone.needed_bytes == (2 + 1) * 12 * GIB


def test_the_ladder_goes_down_to_local_only() -> None:
    steps = asked(own_slots=4, replicas=2).fallbacks()
    assert [(s.own_slots, s.replicas) for s in steps] == [(3, 2), (2, 2), (2, 1), (2, 0)]
    assert asked().fitting(1) is None
    assert sizing(Policy(), 1, 1, 1, replicated=False).fitting(1 << 20) is not None
