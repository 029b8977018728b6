"""`ckptd diff` and `ckptd ls --tensors`: what stands in checkpoints, and how far two are apart."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from ckptd_client import own

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import MAYBE, UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist.diff import differences
from ckptd.persist.names import leases_dir, step_dir
from ckptd.persist.numbers import distance, numbers
from ckptd.persist.opening import open_at
from ckptd.persist.storage.posix import PosixStorage
from tests.core.worlds import rows_of
from tests.node.checkpoints import JOB, World, make_world, save, small_world
from tests.node.commands import Cli
from tests.node.trained import Small, steps_of, trained


def saved(storage: PosixStorage, world: World, step: int) -> str:
    save(storage, world, snapshot := SnapshotId(1, step))
    return storage.locate(step_dir(JOB, snapshot))


def altered(world: World, ranks: int, **changes: object) -> World:
    """The same with other elements: key -> (rank, place, value of its first byte)."""
    values = {key: value.copy() for key, value in world.values.items()}
    for key, (rank, place, byte) in changes.items():  # type: ignore[misc]
        values[key.replace("_", "."), rank][place] ^= byte
    again = small_world(ranks, seed=0, rows=40)
    return make_world(
        {rank: [LayoutItem(f.key, f.dtype, f.shape, f.box, f.role, f.sharing, f.tier) for f in layout.fragments]
         for rank, layout in again.layouts.items()},
        per_rank=frozenset({"t:model.mean"}), values=values, aliases=[("model.head", "model.wide")],
        objects=again.objects,
    )  # fmt: skip


def test_a_copy_in_other_slices_is_the_same(cli: Cli, tmp_path: Path) -> None:
    storage, shape = PosixStorage(str(tmp_path / "root")), (7, 5)
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 2), np.uint8)
    paths = []
    for ranks in (1, 3):
        boxes = rows_of(shape, ranks) if ranks == 1 else [Box((0, 0), (7, 2)), Box((0, 2), (3, 3)), Box((3, 2), (4, 3))]
        items = {r: [LayoutItem("m.w", "BF16", shape, box, "param", UNIQUE, 1)] for r, box in enumerate(boxes)}
        world = make_world(items, values={("m.w", None): noise}, objects={r: {"o": b"\x01"} for r in range(ranks)})
        paths.append(saved(storage, world, ranks))
    ran = cli("diff", *paths)
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "the same")
    assert json.loads(cli("diff", *paths, "--json").out)["same"] is True
    assert not storage.list(leases_dir(JOB)), "the leases are dropped"


def test_what_differs_is_named_and_measured(cli: Cli, tmp_path: Path) -> None:
    storage, world = PosixStorage(str(tmp_path / "root")), small_world(2, rows=40)
    a = saved(storage, altered(world, 2), 10)
    b = saved(storage, altered(world, 2, model_wide=(None, (39, 1000, 3), 0x80), model_mean=(1, (2, 7), 0x80)), 20)
    ran = cli("diff", a, b, "--json")
    assert ran.code == 1
    found = {(row["name"], row["rank"]): row for row in json.loads(ran.out)["differences"]}
    assert found.keys() == {("model.wide", None), ("model.head", None), ("model.mean", 1)}
    wide = world.values["model.wide", None].view("<f4")[..., 0]
    row = found["model.wide", None]
    assert (row["what"], row["first"], row["elements"]) == ("other values", "[39, 1000]", 1)
    assert row["max_difference"] == pytest.approx(2 * abs(float(wide[39, 1000]))), "only its sign was turned"
    assert found["model.mean", 1]["first"] == "[2]"
    assert cli("diff", a, b, "--only", "model.tall", "--only", "optim.*").code == 0
    assert "model.mean" in cli("diff", a, b).out


def test_keys_shapes_dtypes_and_objects(tmp_path: Path) -> None:
    def one(key: str, dtype: str, shape: tuple[int, ...]) -> LayoutItem:
        return LayoutItem(key, dtype, shape, Box.whole(shape), "param", MAYBE, 1)

    storage, empty = PosixStorage(str(tmp_path / "root")), np.zeros((0, 4, 4), np.uint8)
    values = [
        {("same", None): empty, ("dtype", None): np.array([1.5, -2.0], "<f4").view(np.uint8).reshape(2, 4)},
        {("same", None): empty, ("dtype", None): np.array([1.5, -2.0], "<f8").view(np.uint8).reshape(2, 8)},
    ]
    items = [
        [one("same", "F32", (0, 4)), one("shape", "U8", (3,)), one("mine", "U8", ()), one("dtype", "F32", (2,))],
        [one("same", "F32", (0, 4)), one("shape", "U8", (4,)), one("its", "U8", ()), one("dtype", "F64", (2,))],
    ]
    objects = [{"o": msgpack.packb({"a": [1, {"b": 2}]}), "x": b"\x01"}, {"o": msgpack.packb({"a": [1, {"b": 3}]}), "y": b"\x01"}]
    paths = [
        saved(storage, make_world({0: items[n]}, values=values[n], objects={0: objects[n]}), n) for n in range(2)  # type: ignore[dict-item]
    ]
    with open_at(paths[0]) as a, open_at(paths[1]) as b:
        found = [(one.name, one.what, one.a, one.b, one.first) for one in differences(a, b, lambda name: True)]
    assert found == [
        ("dtype", "other dtype", "F32[2]", "F64[2]", ""),
        ("its", "only in B", "", "U8[]", ""),
        ("mine", "only in A", "U8[]", "", ""),
        ("shape", "other shape", "U8[3]", "U8[4]", ""),
        ("o", "other values", "2", "3", ".a[1].b"),
        ("x", "only in A", "", "", ""),
        ("y", "only in B", "", "", ""),
    ]


def test_numbers_of_every_kind() -> None:
    def apart(dtype: str, a: bytes, b: bytes) -> int | float:
        return distance(numbers(memoryview(a), dtype), numbers(memoryview(b), dtype))

    assert apart("I64", (2**63 - 1).to_bytes(8, "little"), (1 << 63).to_bytes(8, "little")) == 2**64 - 1
    assert apart("I8", b"\x80", b"\x7f") == 255
    assert apart("U8", b"\x00", b"\xff") == 255
    assert apart("BF16", b"\x80\x3f", b"\x00\x40") == 1.0
    assert apart("F8_E4M3", b"\x38", b"\x40") == 1.0
    assert apart("F32", b"\x00\x00\xc0\x7f", b"\x00\x00\xc0\x7f") == 0, "neither is a number"
    assert apart("F32", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x3f") == np.inf
    assert apart("C64", bytes(8), np.array([3 + 4j], "<c8").tobytes()) == 5.0


def test_the_tensors_of_a_checkpoint(cli: Cli, tmp_path: Path) -> None:
    path = saved(PosixStorage(str(tmp_path / "root")), small_world(2, rows=40), 10)
    rows = json.loads(cli("ls", "--tensors", "model.*", path, "--json").out)["tensors"]
    assert rows[-1] == {
        "key": "model.wide", "dtype": "F32", "shape": [40, 1024], "bytes": 4 * 40 * 1024, "chunks": 2, "role": "param",
        "rank": None, "aliases": ["model.head"], "rule": None,
    }  # fmt: skip
    assert [row["rank"] for row in rows if row["key"] == "model.mean"] == [0, 1]
    assert {row["key"] for row in rows} == {"model.mean", "model.norm", "model.tall", "model.wide"}
    shown = cli("ls", "--tensors", "*.head", path)
    assert shown.code == 0 and "model.wide" in shown.out
    assert "fits 'x'" in cli("ls", "--tensors", "x", path).out
    assert "no such directory" in cli("ls", "--tensors", "*", tmp_path / "nowhere").err
    assert "needs a checkpoint" in cli("ls", "--tensors", "*").err


def test_the_rule_that_a_tensor_was_saved_under(cli: Cli) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    with trained() as train:
        rules = {"*.running_*": own("mean"), "model.norm.num_batches_tracked": own("max"), "model.norm.weight": own("same")}
        path = train("ruled", {"model": model, "optimizer": optimizer, "rules": rules}, steps_of(model, optimizer))
        shown = {row["key"]: row["rule"] for row in json.loads(cli("ls", "--tensors", "*", path, "--json").out)["tensors"]}
        assert {key: rule for key, rule in shown.items() if rule} == {
            "model.norm.running_mean": 'own("mean")', "model.norm.running_var": 'own("mean")',
            "model.norm.num_batches_tracked": 'own("max")', "model.norm.weight": 'own("same")',
            "optimizer.model.norm.weight.exp_avg": 'own("same")', "optimizer.model.norm.weight.exp_avg_sq": 'own("same")',
        }  # fmt: skip
        assert 'own("mean")' in cli("ls", "--tensors", "*.running_mean", path).out


def test_who_compares_nothing_is_told(cli: Cli, tmp_path: Path) -> None:
    storage = PosixStorage(str(tmp_path / "root"))
    a, b = (saved(storage, small_world(2, rows=40, seed=step), step) for step in (10, 20))
    ran = cli("diff", a, b, "--only", "tall", "--only", "model.tall")
    assert ran.code == 1 and "fits none of" in ran.err and "keys: tall" in ran.err and "as in" in ran.err
