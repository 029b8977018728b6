"""The index of a checkpoint: what comes back, and what is refused before anybody computes an address with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ckptd.core.state_map.columns import Column, Ints, pack, unpack
from ckptd.persist import index as module
from ckptd.persist.index import Chunk, Index, IndexFile, Names, Tensor, decode_index
from ckptd.persist.sums import FileDamage, digest

TENSORS = [
    Tensor("a", "F32", (4, 2), "param"),
    Tensor("b", "BF16", (), "buffer", 1),
    Tensor("b", "BF16", (3,), "buffer", 0),
]
CHUNKS = [
    [Chunk(0, 4096, 16, 0, (0, 0), (2, 2)), Chunk(1, 4096, 16, 0, (2, 0), (2, 2))],
    [Chunk(0, 4112, 2, 1, (), ())],
    [Chunk(1, 4112, 6, 1, (0,), (3,))],
]
ROWS = list(zip(TENSORS, CHUNKS, strict=True))


def columns() -> tuple[dict[str, Ints], IndexFile, bytes]:
    data, told = Index.of(ROWS).encode("index.columns")
    return unpack(data, told.columns, [column.name for column in told.columns]), told, data


def test_what_was_written_is_read() -> None:
    index = Index.of(ROWS)
    data, told = index.encode("index.columns")
    read = decode_index(data, told, index.names, "x")
    assert list(read.tensors()) == TENSORS == [read.tensor_at(at) for at in range(3)]
    assert [read.chunks_at(at) for at in range(3)] == CHUNKS
    assert [read.chunk(row) for row in range(4)] == [chunk for chunks in CHUNKS for chunk in chunks]
    assert read.owners() == [None, 1, 0]
    assert {column.type for column in told.columns} == {"<u1", "<u2"}, "no wider than the numbers are"
    assert all(column.at % 8 == 0 for column in told.columns)


def test_nothing_at_all() -> None:
    data, told = Index.of([]).encode("index.columns")
    read = decode_index(data, told, Names([], [], []), "x")
    assert (list(read.tensors()), data) == ([], b"")


def put(name: str, at: int, value: int) -> Callable[[dict[str, Ints]], None]:
    def edit(found: dict[str, Ints]) -> None:
        found[name][at] = value

    return edit


def cut(name: str) -> Callable[[dict[str, Ints]], None]:
    def edit(found: dict[str, Ints]) -> None:
        found[name] = found[name][:-1]

    return edit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("dtype", 0, 2), "no name"),
        (put("role", 0, 2), "no name"),
        (put("dims", 0, 65), "65 dimensions"),
        (put("offsets", 0, 3), "not sorted by offsets"),
        (put("shape", 0, 1 << 60), "more elements"),
        (put("tensor", 3, 3), "of no tensor"),
        (put("tensor", 0, 1), "not sorted by tensor"),
        (put("dims", 1, 1), "other dimensions"),
        (put("sizes", 0, -1), "below 0"),
        (put("at", 0, -1), "below 0"),
        *((cut(name), "different lengths") for name in ("rank", "dims", "file", "block", "nbytes", "at")),
        *((cut(name), "other dimensions") for name in ("shape", "offsets", "sizes")),
    ],
)
def test_numbers_that_are_none_of_chunks_are_refused(edit: Callable[[dict[str, Ints]], None], said: str) -> None:
    found, _, _ = columns()
    edit(found)
    with pytest.raises(ValueError, match=said):
        Index(Index.of(ROWS).names, found)


def test_a_file_of_such_numbers_is_damaged() -> None:
    found, told, _ = columns()
    found["dims"][0] = 65
    data, places = pack(found)
    forged = IndexFile(told.path, len(data), digest(data).hex(), places)
    with pytest.raises(FileDamage, match="65 dimensions"):
        decode_index(data, forged, Index.of(ROWS).names, "x")
    with pytest.raises(FileDamage, match="checksum"):
        decode_index(data, told, Index.of(ROWS).names, "x")
    del found["block"]
    data, places = pack(found)
    with pytest.raises(FileDamage, match="block"):
        decode_index(data, IndexFile(told.path, len(data), digest(data).hex(), places), Index.of(ROWS).names, "x")


def test_dtypes_that_nobody_knows_are_refused() -> None:
    found, _, _ = columns()
    with pytest.raises(ValueError, match="unknown dtypes"):
        Index(Names(["a", "b", "b"], ["BF16", "F7"], ["buffer", "param"]), found)


@pytest.mark.parametrize("of", ["tensors", "chunks"])
def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    monkeypatch.setattr(module, "ROWS_MAX", 2 if of == "tensors" else 3)
    with pytest.raises(ValueError, match="3 tensors and 4 chunks"):
        Index.of(ROWS)


@pytest.mark.parametrize(
    "chunk",
    [Chunk(0, 0, 4, 0, (0,), (1, 1)), Chunk(0, 0, 4, 0, (0, 0), (1,)), Chunk(0, 1 << 64, 4, 0, (0, 0), (1, 1))],
)
def test_chunks_of_version_1_that_are_none(chunk: Chunk) -> None:
    with pytest.raises(ValueError, match=r"other dimensions|64 bits"):
        Index.of([(TENSORS[0], [chunk])])


def test_memory_is_bounded_by_the_rows_and_not_by_the_one_with_the_most_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CELLS_MAX", 7)
    with pytest.raises(ValueError, match="too many rows for tensors of 2 dimensions"):
        Index.of(ROWS)


def test_a_rank_below_0_is_none() -> None:
    with pytest.raises(ValueError, match="rank below 0"):
        Index.of([(Tensor("a", "F32", (), "param", -1), [])])


def test_chunks_that_were_exchanged_are_not_taken_for_one_another() -> None:
    """As many dimensions in all as there should be."""
    flat, square = Chunk(0, 0, 8, 0, (0,), (2,)), Chunk(0, 0, 8, 0, (0, 0), (1, 2))
    with pytest.raises(ValueError, match="other dimensions"):
        Index.of([(Tensor("a", "F32", (1, 2), "param"), [flat]), (Tensor("b", "F32", (2,), "param"), [square])])


@pytest.mark.parametrize(
    "wrong",
    [
        [Column("a", "<f4", 0, 1)],
        [Column("a", "<u1", 0, 1), Column("a", "<u1", 0, 1)],
        [Column("a", "<u1", 0, 9)],
        [Column("a", "<u1", 8, 1)],
        [Column("a", "<u1", -1, 1)],
        [Column("a", "<u1", 0, -1)],
        [Column("a", "<i8", 0, 2)],
    ],
)
def test_columns_that_leave_their_file_or_are_none(wrong: list[Column]) -> None:
    assert unpack(b"12345678", [Column("a", "<u1", 0, 8)], "a")["a"].tolist() == list(b"12345678")
    assert unpack(b"12345678", wrong, "b") == {}, "what nobody reads may be of a later version"
    with pytest.raises(ValueError, match="column a"):
        unpack(b"12345678", wrong, "a")


@pytest.mark.parametrize(("most", "kind"), [(255, "<u1"), (256, "<u2"), (65536, "<u4"), (1 << 32, "<i8")])
def test_a_column_is_as_wide_as_its_largest_number(most: int, kind: str) -> None:
    data, (column,) = pack({"a": np.array([0, most], np.int64)})
    assert (column.type, unpack(data, [column], "a")["a"].tolist()) == (kind, [0, most])


def test_each_key_is_there_once_of_the_first_rank_that_has_all_of_it() -> None:
    whole, half, none = [Chunk(0, 0, 16, 0, (0,), (4,))], [Chunk(0, 16, 8, 0, (0,), (2,))], list[Chunk]()
    owned = {rank: Tensor("own", "F32", (4,), "buffer", rank) for rank in range(4)}
    parts = [Tensor("parts", "F32", (4,), "buffer", rank) for rank in (2, 3)]
    rows = [(Tensor("a", "F32", (4,), "param"), whole)]
    rows += [(owned[0], none), (owned[1], half), (owned[2], whole), (owned[3], whole), (parts[0], half), (parts[1], none)]
    assert Index.of(rows).once() == {"a": (rows[0][0], True), "own": (owned[2], True), "parts": (parts[0], False)}
