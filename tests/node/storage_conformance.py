"""What every Storage must do: one suite for POSIX directories, memory, the crash model and the simulator's.

A new backend gives a ``storage`` fixture to a subclass of StorageConformance in tests/node/test_persist_storage.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ckptd.persist.names import KEEP, MANIFEST, VERIFIED
from ckptd.persist.storage.base import NotFound, Pointer, Sight, Storage, StorageError, read_file

BIG_BYTES = (9 << 20) + 4097  # more than one scratch buffer, no multiple of a page
MAX_BYTES = 64 << 20
TOP = "1000/job/epoch-000001"
POINTER = f"{TOP}/step-0000000010"
ONE, OTHER = f"{POINTER}.one.part", f"{POINTER}.other.part"
RACERS = 8


def pattern(nbytes: int, salt: int = 0) -> bytes:
    return bytes((i * 7 + salt) & 255 for i in range(997)) * (nbytes // 997) + bytes(nbytes % 997)


def put(storage: Storage, path: str, data: bytes) -> None:
    writer = storage.put(path)
    writer.write(data)
    assert writer.finish() == len(data)


def begin(storage: Storage, attempt: str) -> str:
    """An attempt with two files."""
    storage.begin(attempt)
    for name in ("a.safetensors", "b.side"):
        put(storage, f"{attempt}/{name}", f"{attempt} {name}".encode())
    return attempt


def commit(storage: Storage, attempt: str, pointer: str = POINTER) -> bool:
    names = ["a.safetensors", "b.side"]
    return storage.commit_if_absent(attempt, pointer, names, {MANIFEST: f"manifest of {attempt}".encode()})


def committed(storage: Storage) -> str:
    """What a reader finds."""
    return read_file(storage, f"{POINTER}/{MANIFEST}", MAX_BYTES).decode()


def names(storage: Storage, path: str) -> list[str]:
    return [entry.name for entry in storage.list(path)]


def seen(storage: Storage) -> list[tuple[str, Sight]]:
    return [(pointer.name, pointer.sight) for pointer in storage.pointers(TOP)]


def together(calls: list[Callable[[], bool]]) -> list[bool]:
    """All at once, each in a thread."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], bool]) -> bool:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class StorageConformance:
    # --- files of an attempt ------------------------------------------------------------------------------------
    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BIG_BYTES])
    def test_a_file_reads_back_as_written(self, storage: Storage, nbytes: int) -> None:
        storage.begin(ONE)
        put(storage, f"{ONE}/file", pattern(nbytes))
        assert read_file(storage, f"{ONE}/file", MAX_BYTES) == pattern(nbytes)

    def test_space_and_write_interleave(self, storage: Storage) -> None:
        storage.begin(ONE)
        out, expected = storage.put(f"{ONE}/mixed"), b""
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
        assert read_file(storage, f"{ONE}/mixed", MAX_BYTES) == expected

    def test_a_large_view_is_written_whole(self, storage: Storage) -> None:
        data = memoryview(pattern(BIG_BYTES))
        storage.begin(ONE)
        out = storage.put(f"{ONE}/view")
        out.write(data[:100])
        out.write(data[100:])
        out.finish()
        assert read_file(storage, f"{ONE}/view", MAX_BYTES) == data

    def test_ranges(self, storage: Storage) -> None:
        data = pattern(10_000)
        storage.put_if_absent("file", data)
        reader = storage.open("file")
        dest = bytearray(500)
        reader.read_into(1234, memoryview(dest))
        assert (reader.size, bytes(dest)) == (10_000, data[1234:1734])
        with pytest.raises(StorageError):
            reader.read_into(9_900, memoryview(dest))
        reader.close()

    def test_a_files_name_is_taken_once(self, storage: Storage) -> None:
        storage.begin(ONE)
        put(storage, f"{ONE}/file", b"one")
        with pytest.raises(StorageError):
            storage.put(f"{ONE}/file")
        assert read_file(storage, f"{ONE}/file", 10) == b"one"

    def test_an_attempt_is_begun_by_each_of_its_writers(self, storage: Storage) -> None:
        for name in ("first", "second"):
            storage.begin(ONE)
            put(storage, f"{ONE}/{name}", name.encode())
        assert read_file(storage, f"{ONE}/first", 10) == b"first"

    def test_what_was_given_up_can_be_deleted(self, storage: Storage) -> None:
        storage.begin(ONE)
        out = storage.put(f"{ONE}/file")
        out.write(b"half")
        out.abort()
        out.abort()
        storage.delete(f"{ONE}/file")
        assert storage.list(ONE) == []

    # --- small files --------------------------------------------------------------------------------------------
    def test_a_name_is_given_once(self, storage: Storage) -> None:
        storage.begin("top")
        assert storage.put_if_absent("top/name", b"first")
        assert not storage.put_if_absent("top/name", b"second")
        assert read_file(storage, "top/name", 10) == b"first"
        assert names(storage, "top") == ["name"]

    def test_only_one_of_many_gets_a_name(self, storage: Storage) -> None:
        won = together([partial(storage.put_if_absent, "name", b"%d" % index) for index in range(RACERS)])
        assert sum(won) == 1
        assert read_file(storage, "name", 10) == b"%d" % won.index(True)

    def test_list_tells_sizes_and_ages(self, storage: Storage) -> None:
        storage.put_if_absent("first", b"12345")
        storage.put_if_absent("second", b"")
        first, second = storage.list("")
        assert (first.name, first.size, first.is_dir) == ("first", 5, False)
        assert first.mtime_s <= second.mtime_s

    def test_the_clock_is_the_one_that_stamps_files(self, storage: Storage) -> None:
        storage.begin("top")
        storage.put_if_absent("top/before", b"")
        now_s = storage.clock_s("top")
        storage.put_if_absent("top/later", b"")
        before, later = storage.list("top")
        assert before.mtime_s <= now_s <= later.mtime_s

    def test_what_lies_deeper_is_a_directory(self, storage: Storage) -> None:
        for path in ("a/b/c", "a/b/d"):
            storage.begin(path)
            storage.begin(path)
            storage.put_if_absent(f"{path}/file", b"")
        assert [(entry.name, entry.is_dir) for entry in storage.list("a/b")] == [("c", True), ("d", True)]
        storage.secure("a/b", "a/b/c")
        storage.discard("a/b/c")
        assert names(storage, "a/b") == ["d"]

    def test_what_is_missing(self, storage: Storage) -> None:
        for path in ("none", "none/below"):
            with pytest.raises(NotFound):
                storage.open(path)
            assert storage.list(path) == []
            assert storage.pointers(path) == []
            storage.delete(path)
            storage.discard(path)
            storage.sweep(path, 1e12)
            assert not (storage.hide(path) or storage.reveal(path) or storage.drop(path))
        with pytest.raises(NotFound):
            storage.mark(POINTER, KEEP, b"")
        with pytest.raises(NotFound):
            commit(storage, ONE)

    def test_a_file_larger_than_expected_is_refused(self, storage: Storage) -> None:
        storage.put_if_absent("file", b"12345")
        with pytest.raises(StorageError, match="5 bytes"):
            read_file(storage, "file", 4)

    @pytest.mark.parametrize(
        "path", ["..", "a/../b", "/etc/passwd", "a//b", ".hidden", "a\0b", "x" * 201, "a b", "a/."]
    )
    def test_names_that_could_lead_away(self, storage: Storage, path: str) -> None:
        calls: list[Callable[[str], object]] = [storage.begin, storage.open, storage.put, storage.list]
        calls += [
            storage.delete,
            storage.discard,
            storage.pointers,
            lambda path: storage.put_if_absent(path, b""),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="unsafe"):
                call(path)

    def test_errors_name_the_place(self, storage: Storage) -> None:
        with pytest.raises(StorageError) as caught:
            storage.open("missing-file")
        assert storage.locate("missing-file") in str(caught.value)

    def test_free_bytes(self, storage: Storage) -> None:
        assert storage.free_bytes() > 0

    # --- a commit -----------------------------------------------------------------------------------------------
    def test_it_appears_whole_and_by_the_commit_only(self, storage: Storage) -> None:
        begin(storage, ONE)
        assert storage.pointers(TOP) == []
        assert [name for name in names(storage, TOP) if "." not in name] == []
        assert commit(storage, ONE)
        assert storage.pointers(TOP) == [Pointer("step-0000000010", Sight.SHOWN)]
        assert names(storage, POINTER) == ["a.safetensors", "b.side", MANIFEST]
        assert names(storage, TOP) == ["step-0000000010"], "its attempt is no place of its own any more"
        assert read_file(storage, f"{POINTER}/b.side", 100) == f"{ONE} b.side".encode()
        assert committed(storage) == f"manifest of {ONE}"
        storage.secure(TOP)

    def test_the_first_commit_wins(self, storage: Storage) -> None:
        begin(storage, ONE)
        begin(storage, OTHER)
        assert commit(storage, OTHER)
        assert not commit(storage, ONE)
        storage.discard(ONE)
        assert committed(storage) == f"manifest of {OTHER}"
        assert names(storage, TOP) == ["step-0000000010"]

    def test_only_one_of_many_commits_wins(self, storage: Storage) -> None:
        attempts = [begin(storage, f"{POINTER}.{index}.part") for index in range(RACERS)]
        won = together([partial(commit, storage, attempt) for attempt in attempts])
        assert sum(won) == 1
        assert committed(storage) == f"manifest of {attempts[won.index(True)]}"

    def test_other_files_of_the_attempt_do_not_appear(self, storage: Storage) -> None:
        begin(storage, ONE)
        put(storage, f"{ONE}/stranger.safetensors", b"of a repeated write")
        commit(storage, ONE)
        assert names(storage, POINTER) == ["a.safetensors", "b.side", MANIFEST]

    def test_a_commit_that_lacks_a_file_does_not_happen(self, storage: Storage) -> None:
        storage.begin(ONE)
        put(storage, f"{ONE}/b.side", b"")
        with pytest.raises(NotFound):
            commit(storage, ONE)
        assert storage.pointers(TOP) == []

    def test_a_committed_attempt_is_not_discarded(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        storage.discard(ONE)
        assert read_file(storage, f"{POINTER}/b.side", 100) == f"{ONE} b.side".encode()

    def test_marks_stand_beside_its_own_files(self, storage: Storage) -> None:
        begin(storage, ONE)
        storage.commit_if_absent(ONE, POINTER, ["a.safetensors", "b.side"], {KEEP: b"", MANIFEST: b""})
        for _ in range(2):
            storage.mark(POINTER, VERIFIED, b"sum")
        (pointer,) = storage.pointers(TOP)
        assert pointer.marks == {KEEP, VERIFIED}
        assert read_file(storage, f"{POINTER}/{VERIFIED}", 10) == b"sum"

    def test_marks_go_one_by_one(self, storage: Storage) -> None:
        """Also while it is hidden, and under many hands; what is gone has none."""
        begin(storage, ONE)
        storage.commit_if_absent(ONE, POINTER, ["a.safetensors", "b.side"], {KEEP: b"", MANIFEST: b"it"})
        storage.mark(POINTER, VERIFIED, b"sum")
        assert any(together([partial(storage.unmark, POINTER, KEEP)] * RACERS))
        assert not storage.unmark(POINTER, KEEP)
        assert storage.pointers(TOP) == [Pointer("step-0000000010", Sight.SHOWN, frozenset({VERIFIED}))]
        assert committed(storage) == "it"
        storage.hide(POINTER)
        assert storage.unmark(POINTER, VERIFIED)
        storage.reveal(POINTER)
        assert storage.pointers(TOP) == [Pointer("step-0000000010", Sight.SHOWN)]
        storage.hide(POINTER)
        storage.drop(POINTER)
        with pytest.raises(NotFound):
            storage.unmark(POINTER, KEEP)

    def test_what_is_put_inside_a_commit_is_no_part_of_it(self, storage: Storage) -> None:
        with pytest.raises(NotFound):
            storage.place(POINTER)
        commit(storage, begin(storage, ONE))
        inner = f"{storage.place(POINTER)}/inner"
        for attempt in (f"{inner}.one.part", f"{inner}.other.part"):
            begin(storage, attempt)
        assert commit(storage, f"{inner}.one.part", inner)
        assert not commit(storage, f"{inner}.other.part", inner)
        storage.discard(f"{inner}.other.part")
        assert names(storage, storage.place(POINTER)) == names(storage, POINTER) == ["a.safetensors", "b.side", "inner", MANIFEST]
        assert names(storage, inner) == ["a.safetensors", "b.side", MANIFEST]
        assert read_file(storage, f"{inner}/b.side", 100) == f"{inner}.one.part b.side".encode()
        assert storage.pointers(TOP) == [Pointer("step-0000000010", Sight.SHOWN)]
        assert committed(storage) == f"manifest of {ONE}"

    def test_what_is_put_inside_a_commit_goes_with_it(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        inner = f"{storage.place(POINTER)}/inner"
        begin(storage, f"{inner}.one.part")
        assert commit(storage, f"{inner}.one.part", inner)
        storage.hide(POINTER)
        storage.reveal(POINTER)
        assert names(storage, inner) == ["a.safetensors", "b.side", MANIFEST]
        storage.hide(POINTER)
        storage.drop(POINTER)
        assert names(storage, TOP) == names(storage, inner) == []
        with pytest.raises(NotFound):
            storage.place(POINTER)

    # --- out of sight, and gone ---------------------------------------------------------------------------------
    def test_what_is_hidden_is_read_on_and_comes_back(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        assert not storage.reveal(POINTER) and not storage.drop(POINTER), "it is in sight"
        assert storage.hide(POINTER)
        (pointer,) = storage.pointers(TOP)
        assert pointer.sight is Sight.HIDDEN and pointer.hidden_s is not None and pointer.marks == frozenset()
        with pytest.raises(NotFound):
            committed(storage)
        assert read_file(storage, f"{POINTER}/a.safetensors", 100)
        assert not storage.hide(POINTER)
        assert storage.reveal(POINTER)
        assert storage.pointers(TOP) == [Pointer("step-0000000010", Sight.SHOWN)]
        assert committed(storage) == f"manifest of {ONE}"

    def test_since_when_it_is_hidden(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        storage.put_if_absent("before", b"")
        storage.hide(POINTER)
        storage.put_if_absent("after", b"")
        (pointer,) = storage.pointers(TOP)
        times = {entry.name: entry.mtime_s for entry in storage.list("")}
        assert pointer.hidden_s is not None
        assert times["before"] <= pointer.hidden_s <= times["after"]

    def test_a_hidden_one_keeps_its_name(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        storage.hide(POINTER)
        begin(storage, OTHER)
        assert not commit(storage, OTHER)
        storage.reveal(POINTER)
        assert committed(storage) == f"manifest of {ONE}"

    def test_what_is_dropped_is_gone_and_its_name_free(self, storage: Storage) -> None:
        commit(storage, begin(storage, ONE))
        storage.hide(POINTER)
        assert storage.drop(POINTER)
        assert storage.list(TOP) == []
        assert not storage.reveal(POINTER) and not storage.drop(POINTER)
        assert commit(storage, begin(storage, OTHER))
        assert committed(storage) == f"manifest of {OTHER}"

    def test_of_revealing_and_dropping_one_wins(self, storage: Storage) -> None:
        for turn in range(10):
            commit(storage, begin(storage, f"{POINTER}.t{turn}.part"))
            storage.hide(POINTER)
            revealed, dropped = together([partial(storage.reveal, POINTER), partial(storage.drop, POINTER)])
            assert revealed != dropped
            assert seen(storage) == ([("step-0000000010", Sight.SHOWN)] if revealed else [])
            if revealed:
                assert committed(storage).startswith("manifest")
                assert storage.hide(POINTER) and storage.drop(POINTER)
