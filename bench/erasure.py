"""Parity's arithmetic on one core, beside the machine's own XOR of warm buffers in the same run.

python -m bench.erasure --json out.json

Sources and parity lie in the arena, as slots do; the work goes in chunks, as it arrives from peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from bench.common import GB, Report, Row, arguments, interleave
from bench.state import JOB, make_arena
from ckptd.arena.arena import Tenant
from ckptd.core.redundancy.galois import parity_matrix, recovery_row
from ckptd.core.redundancy.policies import Parity
from ckptd.protect import erasure, isal
from ckptd.protect.erasure import Bytes, Kernel, NumpyKernel
from ckptd.wire.bulk import CHUNK_BYTES

DATA, PARITY = 4, 2
XOR_FLOOR = 0.6
RS_GB_PER_S = 3.0
SLOW_PART = 16  # the table look-ups get this part of the bytes
ALIGNMENT = 64

Terms = list[tuple[Bytes, int]]


def warm_buffers(count: int, nbytes: int) -> list[Bytes]:
    """``count`` buffers of random bytes, in the arena."""
    arena, chance = make_arena(count, nbytes), np.random.default_rng(1)
    piece = chance.integers(0, 256, CHUNK_BYTES, dtype=np.uint8)
    made = []
    for rank in range(count):
        payload = arena.allocate(Tenant(JOB, rank, "own", 0), nbytes, 1 << 20).payload
        buffer = np.frombuffer(payload[:nbytes], np.uint8)
        for at in range(0, nbytes, CHUNK_BYTES):
            buffer[at : at + CHUNK_BYTES] = np.roll(piece, 7 * rank + at)[: nbytes - at]
        made.append(buffer)
    return made


# --- the machine's limit ----------------------------------------------------------------------------------------
def plain_xor(buffers: Sequence[Bytes]) -> Callable[[], None]:
    """c = a ^ b as numpy does it, over as many bytes read and written as the parity of DATA sources needs. Three buffers do
    for that: of each as much, one after the other, as makes up the same traffic."""
    nbytes = len(buffers[0])
    whole, rest = divmod((DATA + 1) * nbytes, 3 * nbytes)

    def run() -> None:
        a, b, c = buffers[0], buffers[1], buffers[-1]
        for length in [nbytes] * whole + [rest // 3]:
            for at in range(0, length, CHUNK_BYTES):
                block = slice(at, min(length, at + CHUNK_BYTES))
                np.bitwise_xor(a[block], b[block], out=c[block])

    return run


def raid_xor(sources: Sequence[Bytes], dest: Bytes) -> Callable[[], None] | None:
    """ISA-L's xor_gen, made for RAID: needs aligned buffers, writes past the cache. None: no ISA-L."""
    for path in isal.candidates():
        try:
            xor_gen = ctypes.CDLL(path).xor_gen
        except (OSError, AttributeError):
            continue
        arrays = [*sources, dest]
        if any(array.ctypes.data % ALIGNMENT for array in arrays):
            return None
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        return lambda: _checked(xor_gen(len(arrays), len(dest) // ALIGNMENT * ALIGNMENT, pointers))
    return None


def _checked(status: int) -> None:
    assert status == 0, f"xor_gen: {status}"


# --- what the daemon does ---------------------------------------------------------------------------------------
def combined(kernel: Kernel, dest: Bytes, terms: Terms) -> None:
    """All sources at hand, chunk by chunk."""
    for at in range(0, len(dest), CHUNK_BYTES):
        block = slice(at, at + CHUNK_BYTES)
        kernel.combine(dest[block], [(source[block], coefficient) for source, coefficient in terms])


def added(kernel: Kernel, dest: Bytes, terms: Terms) -> None:
    """One source after the other, as they arrive: dest is read and written for each."""
    for source, coefficient in terms:
        for at in range(0, len(dest), CHUNK_BYTES):
            block = slice(at, at + CHUNK_BYTES)
            kernel.add(dest[block], source[block], coefficient)


def encode(kernel: Kernel, sources: Sequence[Bytes], parities: Sequence[Bytes]) -> None:
    for row, parity in zip(parity_matrix(len(sources), len(parities)), parities, strict=True):
        combined(kernel, parity, list(zip(sources, row, strict=True)))


def recover(
    kernel: Kernel, sources: Sequence[Bytes], parities: Sequence[Bytes], into: Sequence[Bytes]
) -> None:
    """The first PARITY data columns from the others and the parity."""
    columns, have = [*sources, *parities], range(PARITY, DATA + PARITY)
    for want in range(PARITY):
        row = recovery_row(DATA, PARITY, have, want)
        combined(kernel, into[want], [(columns[i], c) for i, c in zip(have, row, strict=True)])


def main() -> int:
    args = arguments(__doc__ or "")
    nbytes = int(args.bytes) // DATA // 4096 * 4096
    buffers = warm_buffers(DATA + 2 * PARITY, nbytes)
    sources, parities, into = buffers[:DATA], buffers[DATA:-PARITY], buffers[-PARITY:]
    kernel, tables = erasure.kernel(), NumpyKernel()
    ones: Terms = [(source, 1) for source in sources]
    part = slice(0, nbytes // SLOW_PART)
    limits = {"numpy a ^ b": plain_xor([*sources, into[0]]), "xor_gen": raid_xor(sources, into[0])}
    contenders: dict[str, Callable[[], None] | None] = {
        **limits,
        "combine": lambda: combined(kernel, parities[0], ones),
        "combine numpy": lambda: combined(tables, parities[0], ones),
        "add": lambda: added(kernel, into[0], ones),
        "encode": lambda: encode(kernel, sources, parities),
        "recover": lambda: recover(kernel, sources, parities, into),
        "tables": lambda: encode(tables, [s[part] for s in sources], [p[part] for p in into]),
    }
    taken = interleave({name: run for name, run in contenders.items() if run is not None}, args.repeats)
    encode(kernel, sources, parities)
    recover(kernel, sources, parities, into)
    assert all(np.array_equal(a, b) for a, b in zip(sources[:PARITY], into, strict=True)), "not recovered"
    return tell(taken, nbytes, erasure.describe()).finish(args.json)


def tell(taken: dict[str, list[float]], nbytes: int, described: str) -> Report:
    report, state = Report(f"erasure: parity of {DATA} sources, one core"), DATA * nbytes
    plain = report.add(Row("XOR limit: numpy a ^ b of the same traffic", taken["numpy a ^ b"], state))
    best = plain
    if "xor_gen" in taken:
        raid = report.add(Row("XOR limit: ISA-L's xor_gen", taken["xor_gen"], state))
        fastest = [min(pair) for pair in zip(plain.seconds, raid.seconds, strict=True)]
        best = Row("the faster limit", fastest, state)
    asked = Row(f"{RS_GB_PER_S} GB/s", [state / RS_GB_PER_S / GB] * len(plain.seconds), state)
    report.add(Row(f"xor({DATA + 1}) encode", taken["combine"], state, floor=XOR_FLOOR), best)
    report.add(Row(f"xor({DATA + 1}) encode, numpy", taken["combine numpy"], state, floor=XOR_FLOOR), best)
    report.add(Row(f"xor({DATA + 1}) encode, source after source", taken["add"], state), best)
    fast = not erasure.slow_for(Parity(DATA, PARITY))
    report.add(Row(f"rs({DATA},{PARITY}) encode", taken["encode"], state, floor=1.0 if fast else None), asked)
    report.add(Row(f"rs({DATA},{PARITY}) recovery of {PARITY}", taken["recover"], PARITY * nbytes))
    report.add(
        Row(f"rs({DATA},{PARITY}) encode, numpy, 1/{SLOW_PART} of it", taken["tables"], state // SLOW_PART)
    )
    report.facts |= {"kernel": described, "bytes": state, "chunk bytes": CHUNK_BYTES}
    return report


if __name__ == "__main__":
    raise SystemExit(main())
