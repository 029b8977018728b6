"""`ckptd preflight`: what fits and why not, and the arithmetic of memory behind it."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from ckptd.cli.sizing import formula, sizing
from ckptd.core.errors import CkptdError
from ckptd.core.policy import Policy
from ckptd.core.redundancy.policies import Parity, Redundancy, Replicas
from ckptd.core.redundancy.sizing import Sizing
from ckptd.daemon.state import StateDir
from ckptd.daemon.storage import open_storage
from ckptd.observe.health import Health
from ckptd.protect import erasure
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
        cli, tmp_path, "--key-file", tmp_path / "key", "--storage-root", tmp_path / "key"
    )
    assert code == 1
    for name in ("key", "storage"):
        assert found[name]["ok"] is False
        assert found[name]["hint"], name


def test_preflight_and_run_agree_about_a_storage_root_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    """`ckptd run` makes it, and preflight called that an error; neither had a word about what is no directory."""
    code, found = preflight(cli, tmp_path, "--plain-loopback", "--storage-root", tmp_path / "absent")
    assert (code, found["storage"]["ok"]) == (0, None)
    assert "`ckptd run` makes it" in found["storage"]["text"] and not (tmp_path / "absent").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CkptdError, match="is no directory") as refused:
        open_storage(str(tmp_path / "file"), "n", Health(), StateDir(tmp_path / "state"), fresh=True)
    assert "name a directory" in refused.value.hint
    found = preflight(cli, tmp_path, "--plain-loopback", "--storage-root", tmp_path / "file" / "below")[1]
    assert found["storage"]["ok"] is False and found["storage"]["hint"]


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


ONE_COPY = Replicas(1)


def asked(redundancy: Redundancy = ONE_COPY, **changes: Any) -> Sizing:
    base: dict[str, Any] = {
        "state_bytes": 12 * GIB,
        "nodes": 4,
        "ranks_per_node": 1,
        "redundancy": redundancy,
    }
    return Sizing(**{**base, "own_slots": 2, "peer_sets": 2, **changes})


def steady(size: Sizing) -> float:
    return size.steady_bytes(size.where)


def test_steady_memory_is_four_states_of_a_node_with_one_replica() -> None:
    """P8: replicas=1 with 2 own and 2 peer sets is 4 x S per node."""
    assert steady(asked()) == 4 * 12 * GIB / 4
    assert asked().steady_bytes(asked().left) / steady(asked()) == pytest.approx(4 / 3)


def test_parity_takes_its_share_of_a_state() -> None:
    """xor(4): a third of S for each set; after a loss groups are smaller and parity larger."""
    size = asked(Parity(3, 1))
    assert steady(size) == pytest.approx((2 + 2 / 3) * 3 * GIB)
    assert size.new_set_bytes() == pytest.approx((1 + 1 / 2) * 4 * GIB)
    assert size.sent_bytes == asked().sent_bytes == 3 * GIB
    assert "2 own + 0.333 of parity x 2 sets" in formula(size)
    assert steady(asked(Parity(4, 2), nodes=12)) == pytest.approx((2 + 2 / 2) * GIB)
    assert steady(asked(Parity(3, 1), frozen_bytes=12 * GIB)) == pytest.approx((1 + 1 / 3) * 3 * GIB)


def test_domains_are_lost_whole() -> None:
    """Two racks of two nodes: the loss of one leaves two nodes with everything, and nobody else."""
    racks = asked(domains=("a", "a", "b", "b"))
    assert (racks.tolerates, racks.left) == (1, ("b", "b"))
    assert racks.new_set_bytes() == 12 * GIB / 2, "there is no other domain left for a copy"
    uneven = asked(nodes=3, domains=("a", "a", "b"))
    assert uneven.held(uneven.where) == 2, "b holds for both nodes of a"


def test_what_is_frozen_is_held_once_and_once_per_copy() -> None:
    """An adapter of 1 GiB on a base model of 11 GiB."""
    adapter = asked(frozen_bytes=11 * GIB)
    assert steady(adapter) == (4 * 1 + 2 * 11) * GIB / 4 < steady(asked())
    assert steady(asked(frozen_bytes=11 * GIB, replicated=True)) == (2 * 2 * 1 + 2 * 11) * GIB / 4
    assert adapter.slot_bytes == GIB // 4


def test_ddp_needs_no_peer_memory() -> None:
    """About 2 x (f+1)/N x S."""
    assert steady(asked(replicated=True)) == 2 * 2 * 12 * GIB / 4
    assert steady(asked(Parity(3, 1), replicated=True)) == 2 * 2 * 12 * GIB / 4
    assert asked(replicated=True).sent_bytes == 0


def test_a_lost_node_is_part_of_the_sum() -> None:
    size = asked()
    assert size.needed_bytes == int(steady(size) + 2 * 12 * GIB / 3)
    assert size.needed_bytes > size.steady_bytes(size.left)


def test_one_node_has_nobody_to_copy_to() -> None:
    for redundancy in (Replicas(2), Parity(3, 1)):
        alone = asked(redundancy, nodes=1)
        assert alone.tolerates == 0
        assert alone.needed_bytes == (2 + 1) * 12 * GIB


def test_the_ladder_goes_down_to_local_only() -> None:
    steps = asked(Replicas(2), own_slots=4).fallbacks()
    assert [(s.own_slots, s.redundancy.tolerates) for s in steps] == [(3, 2), (2, 2), (2, 1), (2, 0)]
    assert asked().fitting(1) is None
    assert sizing(Policy(), 1, 1, 1, replicated=False).fitting(1 << 20) is not None


def test_preflight_says_which_kernel_makes_parity(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ISA-L it is worth knowing, not wrong: XOR needs nothing, and numpy recovers what ISA-L encoded."""
    _, found = preflight(cli, tmp_path, "--redundancy", "rs(4,2)")
    assert (found["parity"]["ok"], found["parity"]["hint"]) == (True, "")
    assert found["parity"]["text"].startswith("ISA-L")
    monkeypatch.setattr(erasure, "candidates", lambda: ["/no/such/libisal.so.2"])
    erasure.kernel.cache_clear()
    try:
        _, slow = preflight(cli, tmp_path, "--redundancy", "rs(4,2)")
        _, fine = preflight(cli, tmp_path, "--redundancy", "xor(4)")
    finally:
        erasure.kernel.cache_clear()
    assert slow["parity"]["ok"] is None
    assert slow["parity"]["text"] == "no ISA-L: parity for rs(4,2) takes many times longer"
    assert slow["parity"]["hint"].startswith("pip install 'ckptd[rs]'")
    assert (fine["parity"]["ok"], fine["parity"]["hint"]) == (True, "")
