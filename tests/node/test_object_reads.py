"""How often a bucket is asked for what a restore reads: a request takes as long as some MiB do."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptd.core.ids import SnapshotId
from ckptd.core.state_map.box import Box
from ckptd.core.state_map.layout import UNIQUE
from ckptd.core.state_map.layout_build import LayoutItem
from ckptd.persist.names import DATA, PART, step_dir
from ckptd.persist.reader import Checkpoint
from ckptd.persist.storage.base import Sight, StorageError
from ckptd.persist.storage.factory import storage_at
from ckptd.persist.storage.object_file import SPAN_BYTES
from ckptd.persist.storage.object_pointer import encode
from ckptd.persist.storage.object_windows import WINDOW_BYTES, WINDOWS_MAX, Windows
from ckptd.persist.verify import verify_at
from tests.node.checkpoints import JOB, check_all, make_world, save
from tests.object_server import Fault, ObjectServer, Request

SNAPSHOT = SnapshotId(1, 10)
SMALL = 300  # tensors


def gets(server: ObjectServer, since: int) -> int:
    """Of data files, since so many requests."""
    return sum(request.method == "GET" and DATA in request.path for request in server.requests[since:])


def test_many_small_tensors_are_a_few_requests_and_a_large_one_is_no_more(objects: ObjectServer, bucket: str) -> None:
    large = (24 << 20) // 4
    items = [LayoutItem(f"w{at:03}", "F32", (500,), Box.whole((500,)), "param", UNIQUE, 1) for at in range(SMALL)]
    items.append(LayoutItem("large", "F32", (large,), Box.whole((large,)), "param", UNIQUE, 1))
    storage, world = storage_at(bucket, create=True), make_world({0: items})
    save(storage, world, SNAPSHOT)
    with Checkpoint.open(storage_at(bucket), JOB, SNAPSHOT) as checkpoint:
        since = len(objects.requests)
        for at in range(SMALL):
            checkpoint.read(f"w{at:03}", Box.whole((500,)), memoryview(bytearray(2000)))
        assert gets(objects, since) <= 3, "they lie side by side"
        since = len(objects.requests)
        checkpoint.read("large", Box.whole((large,)), memoryview(bytearray(4 * large)))
        assert gets(objects, since) <= 4 * large // SPAN_BYTES + 1
        check_all(checkpoint, world)
    assert verify_at(storage_at(bucket), step_dir(JOB, SNAPSHOT)).ok


def test_who_opens_a_file_anew_reads_it_anew(objects: ObjectServer, bucket: str) -> None:
    """Verification sees what lies in the bucket, not what was read of it before."""
    storage = storage_at(bucket, create=True)
    items = [LayoutItem("w", "F32", (500,), Box.whole((500,)), "param", UNIQUE, 1)]
    save(storage, make_world({0: items}), SNAPSHOT)
    assert verify_at(storage, step_dir(JOB, SNAPSHOT)).ok
    (key,) = [key for key in objects.keys(bucket) if key.endswith(DATA)]
    name, _, prefix = bucket.removeprefix("s3://").partition("/")
    found = objects.client.get_object(Bucket=name, Key=f"{prefix}/{key}")["Body"].read()
    objects.client.put_object(Bucket=name, Key=f"{prefix}/{key}", Body=found[:-1] + bytes([found[-1] ^ 1]))
    report = verify_at(storage, step_dir(JOB, SNAPSHOT))
    assert report.damaged and "damaged block 0 of w" in report.problems[0]


def test_one_answer_that_is_wrong_costs_nothing(objects: ObjectServer, bucket: str) -> None:
    """Each one in turn: the newest step was given up for it, and an older one taken."""
    items = [LayoutItem(f"w{at}", "F32", (size,), Box.whole((size,)), "param", UNIQUE, 1) for at, size in enumerate((5, 300_000))]
    world = make_world({0: items})
    save(storage_at(bucket, create=True), world, SNAPSHOT)

    def read() -> int:
        since = len(objects.requests)
        with Checkpoint.open(storage_at(bucket), JOB, SNAPSHOT) as checkpoint:
            check_all(checkpoint, world)
        return sum(map(of_object, objects.requests[since:]))

    count = read()
    for fault in (Fault(flip=0), Fault(flip=777), Fault(status=404, code="NoSuchKey")):
        for number in range(count):
            met: list[Request] = []

            def wrong(request: Request, at: int = number, fault: Fault = fault, met: list[Request] = met) -> Fault | None:
                met += [request] if of_object(request) else []
                return fault if of_object(request) and len(met) == at + 1 else None

            with objects.failing(wrong):
                read()
            assert len(met) > number


def test_pointers_that_are_new_are_read_side_by_side(objects: ObjectServer, bucket: str) -> None:
    """A daemon that begins knows none of them, and a restore waits no longer than inventory_timeout_s for all."""
    storage, slow_s = storage_at(bucket, create=True), 0.4
    names = [f"step-{number:010}" for number in range(16)]
    for name in names:
        storage.put_if_absent(f"job/{name}.pointer", encode(f"{name}.a{PART}", Sight.SHOWN))
    since, began = len(objects.requests), time.monotonic()
    with objects.failing(lambda request: Fault(slow_s=slow_s, pieces=1) if request.path.endswith(".pointer") else None):
        assert [pointer.name for pointer in storage.pointers("job")] == names
    assert time.monotonic() - began < len(names) * slow_s / 2
    assert len(storage.pointers("job")) == len(names)
    assert sum(request.path.endswith(".pointer") for request in objects.requests[since:]) == len(names)


def of_object(request: Request) -> bool:
    """Not of a list."""
    file = request.method in ("GET", "HEAD") and not request.query and "leases" not in request.path
    return file and "." in request.path.rpartition("/")[2]


# --- windows ------------------------------------------------------------------------------------------------------
SIZE = 99 * WINDOW_BYTES + 5
DATA_OF = memoryview(bytes(range(251)) * (SIZE // 251 + 1))


class Store:
    """``asked``: for windows, (the first, how many)."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def fetch(self, at: int, nbytes: int) -> memoryview:
        assert at % WINDOW_BYTES == 0 and (nbytes % WINDOW_BYTES == 0 or at + nbytes == SIZE)
        self.asked.append((at // WINDOW_BYTES, -(-nbytes // WINDOW_BYTES)))
        return DATA_OF[at : at + nbytes]


def reads(windows: Windows, store: Store, at: int, nbytes: int = 1, reader: int = 1) -> None:
    found = bytearray(nbytes)
    windows.read_into(reader, store.fetch, SIZE, at, memoryview(found))
    assert found == DATA_OF[at : at + nbytes]


@pytest.mark.parametrize(
    ("at", "nbytes", "wanted"),
    [
        (0, 10, (0, 1)), (WINDOW_BYTES - 3, 10, (0, 2)), (SIZE - 10, 10, (98, 2)), (SIZE - 1, 1, (99, 1)),
        (3 * WINDOW_BYTES + 1, 3 * WINDOW_BYTES, (3, 4)), (2 * WINDOW_BYTES, 40 * WINDOW_BYTES, (2, 40)),
    ],
)  # fmt: skip
def test_a_range_comes_from_the_windows_that_it_touches(at: int, nbytes: int, wanted: tuple[int, int]) -> None:
    store, windows = Store(), Windows()
    for _ in range(2):
        reads(windows, store, at, nbytes)
    assert store.asked == [wanted]


def test_what_is_read_without_a_gap_is_few_requests() -> None:
    """Each as long as all before, up to a bound. None of it is asked for twice, nor anything behind what lies alone."""
    store, windows = Store(), Windows()
    for at in range(0, SIZE, WINDOW_BYTES // 7):
        reads(windows, store, at, min(WINDOW_BYTES // 7, SIZE - at))
    assert store.asked[:6] == [(0, 1), (1, 2), (3, 4), (7, 8), (15, 16), (31, 16)]
    assert store.asked[-1] == (95, 5) and sum(count for _, count in store.asked) == 100
    store, windows = Store(), Windows()
    for number in (2, 9, 40, 7, 8, 1):
        reads(windows, store, number * WINDOW_BYTES + 77)
    assert store.asked == [(2, 1), (9, 1), (40, 1), (7, 1), (8, 1), (1, 1)]


def test_so_many_are_kept_and_a_readers_go_with_it() -> None:
    store, windows = Store(), Windows()
    for reader in range(WINDOWS_MAX + 1):
        reads(windows, store, 0, reader=reader)
    asked = len(store.asked)
    reads(windows, store, 0)  # still there, and from now on the newest
    assert len(store.asked) == asked
    reads(windows, store, 0, reader=0)  # has gone, and drives another one out
    reads(windows, store, 0)
    assert len(store.asked) == asked + 1
    windows.drop(1)
    reads(windows, store, 0)
    assert len(store.asked) == asked + 2


def test_two_threads_ask_once_and_both_hear_of_a_failure() -> None:
    store, windows = Store(), Windows()
    inside, go_on = threading.Event(), threading.Event()

    def slowly(at: int, nbytes: int) -> memoryview:
        inside.set()
        assert go_on.wait(30)
        return store.fetch(at, nbytes)

    def away(at: int, nbytes: int) -> memoryview:
        inside.set()
        assert go_on.wait(30)
        raise StorageError("away")

    both = memoryview(bytearray(2 * WINDOW_BYTES))
    with ThreadPoolExecutor(2) as pool:
        for fetch, error in ((away, StorageError), (slowly, None)):
            inside.clear(), go_on.clear()
            first = pool.submit(windows.read_into, 1, fetch, SIZE, 0, both)
            assert inside.wait(30)
            second = pool.submit(windows.read_into, 1, store.fetch, SIZE, WINDOW_BYTES + 2, memoryview(bytearray(4)))
            go_on.set()
            assert isinstance(first.exception(30), error or type(None))
            assert isinstance(second.exception(30), (error, type(None)) if error else type(None))
    assert store.asked[-1] == (0, 2)
