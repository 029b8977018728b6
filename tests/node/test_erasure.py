"""Kernels of parity: one suite for all of them (numpy, the system's ISA-L, the one that the extra brings)."""

from __future__ import annotations

import itertools
import mmap
import random
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.redundancy.galois import parity_matrix, products, recovery_row
from ckptd.core.redundancy.policies import Parity, Replicas
from ckptd.protect import erasure, isal
from ckptd.protect.erasure import IsalKernel, Kernel, NumpyKernel
from ckptd.protect.isal import Isal


def made(name: str) -> Kernel:
    if name == "numpy":
        return NumpyKernel()
    bundled = [path for path in isal.candidates() if path != isal.SYSTEM_NAME]
    path = isal.SYSTEM_NAME if name == "system" else next(iter(bundled), "")
    if not path:
        pytest.skip("pyeclib is not installed: pip install -e '.[rs]'")
    try:
        return IsalKernel(Isal(path))
    except OSError:
        pytest.skip(f"{path} is not installed: deploy/os-packages.txt")


@pytest.fixture(scope="module", params=["numpy", "bundled", "system"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return made(request.param)


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def plainly(terms: list[tuple[bytes, int]], nbytes: int) -> bytes:
    """The definition, one byte after the other."""
    total = 0
    for source, coefficient in terms:
        total ^= int.from_bytes(source.translate(products(coefficient)), "little")
    return total.to_bytes(nbytes, "little")


def test_every_length_up_to_300_and_every_coefficient(kernel: Kernel) -> None:
    """Nothing beside dest is written, whatever the length: it lies between two bytes that stay."""
    for nbytes in range(301):
        terms = [(noise(nbytes, seed), (nbytes * 3 + seed * 89) % 256) for seed in range(4)]
        around = bytearray(noise(nbytes + 2, 9))
        before = bytes(around)
        dest = memoryview(around)[1 : nbytes + 1]
        kernel.combine(dest, terms)
        assert bytes(dest) == plainly(terms, nbytes)
        kernel.add(dest, terms[2][0], nbytes % 256)
        assert bytes(dest) == plainly([*terms, (terms[2][0], nbytes % 256)], nbytes)
        assert (around[0], around[-1]) == (before[0], before[-1])


@pytest.mark.parametrize("nbytes", [4096, erasure.TABLE_BLOCK_BYTES + 1, 3 * erasure.XOR_BLOCK_BYTES + 77])
def test_big_and_unaligned(kernel: Kernel, nbytes: int) -> None:
    for shift, coefficients in itertools.product((0, 1, 7, 33), ((1, 1, 1), (1, 231, 2), (142, 142, 0))):
        raw = [noise(nbytes + shift, seed) for seed in range(3)]
        terms = [(memoryview(r)[shift:], c) for r, c in zip(raw, coefficients, strict=True)]
        dest = memoryview(bytearray(nbytes + 64 - shift))[64 - shift :]
        kernel.combine(dest, terms)
        assert bytes(dest) == plainly(
            [(r[shift:], c) for r, c in zip(raw, coefficients, strict=True)], nbytes
        )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_encoded_then_lost_then_recovered_bit_by_bit(kernel: Kernel, data: st.DataObject) -> None:
    """Any m of k + m columns are lost; each comes back from any k of the rest, data and parity alike."""
    k, m = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    nbytes, shift = data.draw(st.integers(0, 700)), data.draw(st.integers(0, 65))
    group = [memoryview(bytearray(noise(nbytes + shift, seed)))[shift:] for seed in range(k)]
    for row in parity_matrix(k, m):
        parity = memoryview(bytearray(noise(nbytes + shift, 99)))[shift:]  # combine cares not what was there
        kernel.combine(parity, list(zip(group[:k], row, strict=True)))
        group.append(parity)
    have = data.draw(st.permutations(range(k + m)))[:k]
    for want in range(k + m):
        found = bytearray(nbytes)
        row = recovery_row(k, m, have, want)
        kernel.combine(found, [(group[i], c) for i, c in zip(have, row, strict=True)])
        assert found == group[want]


def test_added_one_by_one_is_combined_at_once(kernel: Kernel) -> None:
    """Parity is added to as chunks arrive, in any order."""
    nbytes = 100_003
    terms = [(noise(nbytes, seed), c) for seed, c in enumerate(parity_matrix(5, 3)[2])]
    at_once, one_by_one = bytearray(nbytes), bytearray(nbytes)
    kernel.combine(at_once, terms)
    for source, coefficient in reversed(terms):
        kernel.add(one_by_one, source, coefficient)
    assert at_once == one_by_one


def test_a_source_changed_later_is_taken_out_and_put_in_again(kernel: Kernel) -> None:
    nbytes = 5000
    old, new, other = (noise(nbytes, seed) for seed in range(3))
    parity = bytearray(nbytes)
    kernel.combine(parity, [(old, 231), (other, 7)])
    kernel.add(parity, old, 231)
    kernel.add(parity, new, 231)
    assert parity == plainly([(new, 231), (other, 7)], nbytes)


def test_all_kinds_of_buffers_and_no_copies_of_them(kernel: Kernel) -> None:
    import torch

    with mmap.mmap(-1, 8192) as mapped:
        mapped[:] = noise(8192, 1)
        weights = torch.arange(2048, dtype=torch.float32)
        terms = [(mapped, 3), (weights.numpy(), 1), (noise(8192, 2), 5), (bytearray(noise(8192, 3)), 1)]
        into = torch.full((1024,), 7.0, dtype=torch.float64)
        kernel.combine(into.numpy(), terms)
        raw = [(bytes(memoryview(source).cast("B")), c) for source, c in terms]
        assert into.numpy().tobytes() == plainly(raw, 8192)
        kernel.add(mapped, into.numpy(), 1)
        assert mapped[:] == plainly([*raw, (raw[0][0], 1)], 8192)
    # leaving the block closed the mapping: no view of it was kept


def test_sources_may_repeat_and_zeros_count_for_nothing(kernel: Kernel) -> None:
    source = noise(777)
    dest = bytearray(b"x" * 777)
    kernel.combine(dest, [(source, 6), (source, 6), (noise(777, 1), 0)])
    assert dest == bytes(777)
    kernel.combine(memoryview(dest), [])
    assert dest == bytes(777)
    kernel.add(dest, source, 0)
    assert dest == bytes(777)


def test_as_many_terms_as_a_group_can_have(kernel: Kernel) -> None:
    terms = [(noise(130, seed), seed) for seed in range(255)]
    dest = bytearray(130)
    kernel.combine(dest, terms)
    assert dest == plainly(terms, 130)
    with pytest.raises(ValueError, match="at most 255"):
        kernel.combine(dest, [*terms, (noise(130), 1)])


def test_what_would_go_wrong_is_refused_before_a_byte_is_written(kernel: Kernel) -> None:
    whole = bytearray(noise(100))
    before = bytes(whole)
    view = memoryview(whole)
    for dest, source, coefficient, why in [
        (view, noise(99), 1, "99 bytes"),
        (view, b"", 1, "0 bytes"),
        (view[:50], view[49:99], 1, "overlaps"),
        (view, view, 2, "overlaps"),
        (bytes(100), noise(100), 1, "read-only"),
        (view, noise(100), 256, "no byte"),
        (view, noise(100), -1, "no byte"),
        (view[::2], noise(50), 1, "contiguous"),
        (view[:50], memoryview(noise(100))[::2], 1, "contiguous"),
    ]:
        with pytest.raises(ValueError, match=why):
            kernel.add(dest, source, coefficient)
        with pytest.raises(ValueError, match=why):
            kernel.combine(dest, [(source, coefficient)])
    assert whole == before


def test_neighbours_in_one_memory_do_not_overlap(kernel: Kernel) -> None:
    """Slots of one arena segment lie side by side."""
    whole = bytearray(noise(200))
    view = memoryview(whole)
    expected = plainly([(bytes(whole[:100]), 1), (bytes(whole[100:]), 4)], 100)
    kernel.add(view[:100], view[100:], 4)
    assert whole[:100] == expected


def lets_others_run(work: Callable[[], object], calls_max: int) -> bool:
    """Does another thread, which asks for the GIL before the first call of ``work``, get it during some call? It would be
    handed over at the latest after the switch interval, which is longer than the test."""
    go, moved = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and moved.set())
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        go.set()
        return any(work() or moved.is_set() for _ in range(calls_max))
    finally:
        sys.setswitchinterval(interval)
        thread.join()


@pytest.mark.parametrize("coefficients", [(1, 1), (3, 5)])
def test_the_gil_is_free_during_the_work(kernel: Kernel, coefficients: tuple[int, int]) -> None:
    sources = [np.zeros(16 << 20, np.uint8) for _ in range(2)]
    terms, dest = list(zip(sources, coefficients, strict=True)), np.zeros(16 << 20, np.uint8)
    assert lets_others_run(lambda: kernel.combine(dest, terms), calls_max=3000)
    assert lets_others_run(lambda: kernel.add(dest, *terms[0]), calls_max=3000)


def test_a_held_gil_would_be_seen() -> None:
    held = bytes(4 << 20)
    assert not lets_others_run(lambda: held.translate(products(3)) and None, calls_max=30)


def test_threads_share_a_kernel(kernel: Kernel) -> None:
    """One kernel for all streams of a daemon."""
    sources = [noise(1 << 20, seed) for seed in range(3)]
    rows = [(1, 1, 1), (9, 8, 7), (200, 1, 31), (255, 254, 253)]
    dests = [bytearray(1 << 20) for _ in rows]

    def run(dest: bytearray, row: tuple[int, ...]) -> None:
        for _ in range(5):
            kernel.combine(dest, list(zip(sources, row, strict=True)))

    threads = [threading.Thread(target=run, args=both) for both in zip(dests, rows, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dest, row in zip(dests, rows, strict=True):
        assert dest == plainly(list(zip(sources, row, strict=True)), 1 << 20)


def test_longer_than_one_call_of_isa_l(monkeypatch: pytest.MonkeyPatch) -> None:
    """ISA-L counts in an int: what is longer goes in pieces."""
    kernel = made("bundled")
    monkeypatch.setattr(isal, "PIECE_BYTES", 64)
    terms = [(noise(1000, seed), seed + 2) for seed in range(3)]
    dest = bytearray(1000)
    kernel.combine(dest, terms)
    kernel.add(dest, terms[0][0], 77)
    assert dest == plainly([*terms, (terms[0][0], 77)], 1000)


# --- which kernel -----------------------------------------------------------------------------------------------
@pytest.fixture
def chosen_anew() -> Iterator[None]:
    erasure.kernel.cache_clear()
    yield
    erasure.kernel.cache_clear()


@pytest.mark.usefixtures("chosen_anew")
def test_isa_l_is_chosen_where_there_is_one() -> None:
    made("bundled")
    assert isinstance(erasure.kernel(), IsalKernel)
    assert erasure.describe().startswith("ISA-L")
    assert erasure.slow_for(Parity(4, 2)) == ""


@pytest.mark.usefixtures("chosen_anew")
def test_without_any_library_numpy_recovers_what_isa_l_encoded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(erasure, "candidates", lambda: [f"{tmp_path}/libisal.so.2", "libz.so.1"])
    assert isinstance(erasure.kernel(), NumpyKernel)
    assert "slow for Reed-Solomon" in erasure.describe()
    assert "rs(4,2)" in erasure.slow_for(Parity(4, 2))
    assert erasure.slow_for(Parity(4, 1)) == erasure.slow_for(Replicas(2)) == ""


@pytest.mark.usefixtures("chosen_anew")
def test_a_library_that_computes_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only coefficient 2 is wrong, as a table of another layout would make it."""
    made("bundled")
    honest = Isal.combine

    def wrong(self: Isal, dest: int, sources: list[int], coefficients: bytes, nbytes: int) -> None:
        honest(self, dest, sources, coefficients.replace(b"\x02", b"\x03"), nbytes)

    monkeypatch.setattr(Isal, "combine", wrong)
    assert isinstance(erasure.kernel(), NumpyKernel)
    assert "computes wrongly" in caplog.text
