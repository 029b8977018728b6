"""What every Storage must do: one suite for POSIX directories, the memory fake and the crash model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.persist.storage.base import (
    NotFound,
    Storage,
    StorageError,
    list_or_empty,
    put_file,
    read_file,
    write_file,
)

BIG_BYTES = (9 << 20) + 4097  # more than one scratch buffer, no multiple of a page
MAX_BYTES = 64 << 20


def pattern(nbytes: int, salt: int = 0) -> bytes:
    return bytes((i * 7 + salt) & 255 for i in range(997)) * (nbytes // 997) + bytes(nbytes % 997)


class StorageConformance:
    """Subclasses give a ``storage`` fixture."""

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BIG_BYTES])
    def test_a_file_reads_back_as_written(self, storage: Storage, nbytes: int) -> None:
        data = pattern(nbytes)
        write_file(storage, "file", data)
        assert read_file(storage, "file", MAX_BYTES) == data

    def test_space_and_write_interleave(self, storage: Storage) -> None:
        out, expected = storage.create("mixed"), b""
        for turn in range(40):
            part = pattern(1000 * turn + 13, turn)
            if turn % 3:
                out.write(part)
                expected += part
            else:
                space = out.space()
                count = min(len(space), len(part))
                space[:count] = part[:count]
                space.release()
                out.advance(count)
                expected += part[:count]
            assert out.position == len(expected)
        assert out.finish() == len(expected)
        assert read_file(storage, "mixed", MAX_BYTES) == expected

    def test_a_large_view_is_written_whole(self, storage: Storage) -> None:
        data = memoryview(pattern(BIG_BYTES))
        out = storage.create("view")
        out.write(data[:100])
        out.write(data[100:])
        out.finish()
        assert read_file(storage, "view", MAX_BYTES) == data

    def test_ranges(self, storage: Storage) -> None:
        data = pattern(10_000)
        write_file(storage, "file", data)
        reader = storage.open("file")
        dest = bytearray(500)
        reader.read_into(1234, memoryview(dest))
        assert (reader.size, bytes(dest)) == (10_000, data[1234:1734])
        with pytest.raises(StorageError):
            reader.read_into(9_900, memoryview(dest))
        reader.close()

    def test_names_are_exclusive(self, storage: Storage) -> None:
        write_file(storage, "file", b"one")
        with pytest.raises(StorageError):
            storage.create("file")
        assert read_file(storage, "file", 10) == b"one"

    def test_publish_keeps_the_first(self, storage: Storage) -> None:
        write_file(storage, "a.part", b"a")
        write_file(storage, "b.part", b"b")
        assert storage.publish("a.part", "name")
        assert not storage.publish("b.part", "name")
        assert read_file(storage, "name", 10) == b"a"
        assert [entry.name for entry in storage.list("")] == ["b.part", "name"]
        with pytest.raises(NotFound):
            storage.publish("a.part", "other")

    def test_only_one_of_many_publishers_wins(self, storage: Storage) -> None:
        start = threading.Barrier(8)

        def race(index: int) -> bool:
            write_file(storage, f"p{index}.part", b"%d" % index)
            start.wait()
            return storage.publish(f"p{index}.part", "name")

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(race, range(8)))
        assert sum(won) == 1
        assert read_file(storage, "name", 10) == b"%d" % won.index(True)

    def test_move_dir_is_exclusive(self, storage: Storage) -> None:
        for name in ("one", "two"):
            storage.make_dir(f"top/{name}")
            write_file(storage, f"top/{name}/file", name.encode())
        assert storage.move_dir("top/one", "top/final")
        assert not storage.move_dir("top/two", "top/final")
        assert read_file(storage, "top/final/file", 10) == b"one"
        assert [entry.name for entry in storage.list("top")] == ["final", "two"]
        with pytest.raises(NotFound):
            storage.move_dir("top/one", "top/else")

    def test_make_dir_makes_parents_and_may_be_repeated(self, storage: Storage) -> None:
        storage.make_dir("a/b/c")
        storage.make_dir("a/b/c")
        storage.make_dir("a/b/d")
        assert [(entry.name, entry.is_dir) for entry in storage.list("a/b")] == [("c", True), ("d", True)]
        storage.sync_dir("a/b")

    def test_list_tells_sizes_and_ages(self, storage: Storage) -> None:
        write_file(storage, "first", b"12345")
        write_file(storage, "second", b"")
        first, second = storage.list("")
        assert (first.name, first.size, first.is_dir) == ("first", 5, False)
        assert first.mtime_s <= second.mtime_s

    def test_what_is_missing(self, storage: Storage) -> None:
        absent: list[Callable[[], object]] = [
            lambda: storage.open("none"),
            lambda: storage.open("none/below"),
            lambda: storage.list("none"),
            lambda: storage.create("none/file"),
            lambda: storage.sync_dir("none"),
        ]
        for call in absent:
            with pytest.raises(NotFound):
                call()
        assert list_or_empty(storage, "none") == []
        storage.delete("none")
        storage.delete("none/below")
        storage.delete_tree("none")
        storage.delete_tree("none/below")

    def test_delete(self, storage: Storage) -> None:
        storage.make_dir("top/inner")
        write_file(storage, "top/inner/file", b"x")
        write_file(storage, "top/file", b"x")
        storage.delete("top/file")
        assert [entry.name for entry in storage.list("top")] == ["inner"]
        storage.delete_tree("top")
        assert storage.list("") == []

    def test_put_file_appears_whole_and_once(self, storage: Storage) -> None:
        assert put_file(storage, "name", b"first")
        assert not put_file(storage, "name", b"second")
        assert read_file(storage, "name", 10) == b"first"
        assert [entry.name for entry in storage.list("")] == ["name"]

    def test_a_file_larger_than_expected_is_refused(self, storage: Storage) -> None:
        write_file(storage, "file", b"12345")
        with pytest.raises(StorageError, match="5 bytes"):
            read_file(storage, "file", 4)

    @pytest.mark.parametrize(
        "path", ["..", "a/../b", "/etc/passwd", "a//b", ".hidden", "a\0b", "x" * 201, "a b", "a/."]
    )
    def test_names_that_could_lead_away(self, storage: Storage, path: str) -> None:
        for call in (
            storage.make_dir,
            storage.open,
            storage.create,
            storage.list,
            storage.delete,
            storage.delete_tree,
        ):
            with pytest.raises(StorageError, match="unsafe"):
                call(path)

    def test_errors_name_the_place(self, storage: Storage) -> None:
        with pytest.raises(StorageError) as caught:
            storage.open("missing-file")
        assert storage.locate("missing-file") in str(caught.value)

    def test_abort_leaves_the_name_to_be_deleted(self, storage: Storage) -> None:
        out = storage.create("file.part")
        out.write(b"half")
        out.abort()
        out.abort()
        storage.delete("file.part")
        assert storage.list("") == []

    def test_free_bytes(self, storage: Storage) -> None:
        assert storage.free_bytes() > 0
