"""`ckptd import` of files in which something lies twice, or not at all: copies are one, anything else is refused, in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from tests.node.commands import Cli
from tests.node.imports import JOB, restored, run_import
from tests.node.test_import import save


# --- safetensors ----------------------------------------------------------------------------------------------------
def shards(folder: Path, *parts: tuple[int, torch.Tensor]) -> Path:
    """As torch's HuggingFaceStorageWriter leaves them: a file each, with the row that it begins at."""
    folder.mkdir()
    for number, (row, rows) in enumerate(parts):
        where = {"w": {"saved_offsets": [row] + [0] * (rows.dim() - 1)}}
        save_file({"w": rows}, folder / f"{number}.safetensors", {"DCP_SHARDING_INFO": json.dumps(where)})
    return folder


def refused(cli: Cli, source: Path, kind: str, root: Path) -> str:
    """What is said on one line, and nothing is there."""
    ran = cli("import", source, "--from", kind, "--job", JOB, "--storage-root", root)
    assert ran.code == 1 and not root.exists(), ran
    return " ".join(ran.err.split())


def test_two_files_of_one_name_have_the_same_values(cli: Cli, tmp_path: Path) -> None:
    """Of a model beside its average the file that came last by its name won, without a word."""
    w, root = torch.arange(12.0).reshape(4, 3), tmp_path / "root"
    said = refused(cli, shards(tmp_path / "a", (0, w), (0, w + 1)), "hf", root)
    assert "two files hold other values of it: " in said and "[w]" in said
    assert f"{tmp_path / 'a/0.safetensors'} and {tmp_path / 'a/1.safetensors'}" in said
    said = refused(cli, shards(tmp_path / "b", (0, w), (2, w)), "hf", root)
    assert f"the same elements of it, and not as copies: {tmp_path / 'b/0.safetensors'}" in said and "[w]" in said
    said = refused(cli, shards(tmp_path / "c", (0, w), (0, torch.cat([w, w]))), "hf", root)
    assert "not as copies" in said, "as much as is there twice is the same"
    assert "torn: Box(offsets=(4, 0), sizes=(2, 3))" in refused(cli, shards(tmp_path / "d", (0, w), (6, w)), "hf", root)
    run_import(cli, shards(tmp_path / "e", (0, w), (4, w), (0, w)), "hf", root, "--prefix-map", "=model.")
    restored(root, model=(state := {"w": torch.zeros(8, 3)}))
    assert torch.equal(state["w"], torch.cat([w, w])), "a copy is one"


def test_what_conversion_makes_equal_is_not_equal(cli: Cli, tmp_path: Path) -> None:
    one = torch.ones(2)
    source = shards(tmp_path / "a", (0, one), (0, one + 1e-6))
    flags = ("--job", JOB, "--storage-root", tmp_path / "root", "--dtype", "bf16")
    assert "other values of it" in " ".join(cli("import", source, "--from", "hf", *flags).err.split())


def by_hand(path: Path, header: str) -> Path:
    """A safetensors file with this header and 24 bytes."""
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(24))
    return path


def row(at: int, count: int, dtype: str = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": [count], "data_offsets": [at, at + 4 * count]})


def test_tensors_of_a_file_that_share_bytes(cli: Cli, tmp_path: Path) -> None:
    """safetensors itself refuses to open such a file."""
    cases = {
        f'{{"a": {row(0, 4)}, "empty": {row(12, 0)}, "b": {row(12, 3)}}}': "a and b lie over each other",
        f'{{"a": {row(0, 4)}, "b": {row(0, 4)}}}': "a and b lie over each other",
        f'{{"a": {row(0, 2)}, "a": {row(8, 2)}}}': "a is named twice",
        f'{{"a": {row(-4, 2)}}}': "a begins before the data",
        f'{{"a": {row(0, 2, "F7")}}}': "a has dtype F7, which is not known",
    }
    for header, why in cases.items():
        path = by_hand(tmp_path / "x.safetensors", header)
        with pytest.raises(SafetensorError):
            load_file(path)
        said = refused(cli, path, "hf", tmp_path / "root")
        assert why in said and str(path) in said


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------
def rewritten(folder: Path, change: Callable[[Metadata], object]) -> Path:
    """What torch's planner would have refused to plan."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    writer = dcp.FileSystemWriter(folder)
    writer.finish(metadata, [[WriteResult(index, 0, info) for index, info in metadata.storage_data.items()]])
    return folder


def boxes(metadata: Metadata, key: str, *chunks: tuple[list[int], list[int]], shape: list[int] | None = None) -> Metadata:
    """So ``key`` is told to consist of; each of them lies where its first one did."""
    facts: Any = metadata.state_dict_metadata[key]
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    facts.size = torch.Size(shape or facts.size)
    facts.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    for chunk in facts.chunks:
        metadata.storage_data[MetadataIndex(key, chunk.offsets)] = info
    return metadata


class Another(MetadataIndex):
    """Of the same tensor and place, and another key of a dict."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def another_place(metadata: Metadata) -> None:
    (index, info), *_ = metadata.storage_data.items()
    metadata.storage_data[Another(index.fqn, index.offset)] = type(info)("__1_0.distcp", info.offset, info.length)


@pytest.mark.filterwarnings("ignore")
def test_boxes_of_dcp_are_there_once(cli: Cli, tmp_path: Path) -> None:
    """w: six rows of two; a counter that a scheduler keeps, which is no tensor of the job's."""
    root, w = tmp_path / "root", torch.arange(12.0).reshape(6, 2)
    cases: dict[str, Callable[[Metadata], object]] = {
        "one file holds the same elements of it, and not as copies": lambda m: boxes(
            m, "model.w", ([0, 0], [6, 2]), ([3, 0], [6, 2]), shape=[9, 2]
        ),
        "torn: Box(offsets=(6, 0), sizes=(2, 2))": lambda m: boxes(m, "model.w", ([0, 0], [6, 2]), shape=[8, 2]),
        "torn: Box(offsets=(3,), sizes=(4,))": lambda m: boxes(m, "scheduler.seen", ([0], [3]), shape=[7]),
        "two places hold model.w: __0_0.distcp and ": another_place,
    }
    for number, (why, change) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        save({"model": {"w": w}, "scheduler": {"seen": torch.arange(3)}}, folder)
        said = refused(cli, rewritten(folder, change), "dcp", root)
        assert why in said, said
    save({"model": {"w": w}}, tmp_path / "twice")
    rewritten(tmp_path / "twice", lambda m: boxes(m, "model.w", ([0, 0], [6, 2]), ([0, 0], [6, 2])))
    run_import(cli, tmp_path / "twice", "dcp", root)
    restored(root, model=(state := {"w": torch.zeros(6, 2)}))
    assert torch.equal(state["w"], w), "as ranks save a number that they all have"
