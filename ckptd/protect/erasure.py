"""The arithmetic of parity on buffers: sums of multiples over GF(2^8), which for coefficients of 1 is plain XOR.

``kernel()`` is the best there is: ISA-L (any coefficient at the speed of memory), else numpy (XOR at the same speed, other
coefficients from tables, many times slower, so that what was encoded can be recovered wherever it is needed). Which
coefficients: ckptd.core.redundancy.galois.

Buffers: anything that exports contiguous bytes (memoryview, bytearray, mmap, numpy), any alignment, any length; they are not
copied, and the GIL is released during the work. Kernels keep no state: threads may share one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptd.core.redundancy.galois import COLUMNS_MAX, products
from ckptd.core.redundancy.policies import Parity, Redundancy
from ckptd.protect.isal import Isal, candidates

if TYPE_CHECKING:
    from typing_extensions import Buffer as Exporter

HINT = "pip install 'ckptd[rs]', or install the system's ISA-L (libisal2 on Debian and Ubuntu)"
XOR_BLOCK_BYTES = 1 << 20  # of dest, kept in the cache while the sources are added to it
TABLE_BLOCK_BYTES = 64 << 10  # scratch of the table look-ups

log = logging.getLogger(__name__)
Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = "Exporter | npt.NDArray[Any]"


class Kernel(Protocol):
    """Both raise ValueError: lengths differ, dest is read-only or overlaps a source, a buffer is not contiguous, a coefficient
    is not 0..255, or there are more than COLUMNS_MAX terms."""

    name: str

    def add(self, dest: Buffer, source: Buffer, coefficient: int = 1) -> None:
        """dest += coefficient * source, byte by byte."""

    def combine(self, dest: Buffer, terms: Sequence[tuple[Buffer, int]]) -> None:
        """dest = the sum of coefficient * source over the terms, whatever dest held; no terms: zeros."""


class NumpyKernel:
    """XOR at the speed of memory, other coefficients by look-ups (about 1.4 GB/s)."""

    name = "numpy"

    def add(self, dest: Buffer, source: Buffer, coefficient: int = 1) -> None:
        into, (term,) = _operands(dest, [(source, coefficient)])
        _add(into, *term)

    def combine(self, dest: Buffer, terms: Sequence[tuple[Buffer, int]]) -> None:
        into, found = _operands(dest, terms)
        found = [term for term in found if term[1]]
        if not found:
            into[:] = 0
        for at in range(0, len(into) if found else 0, XOR_BLOCK_BYTES):
            block = slice(at, at + XOR_BLOCK_BYTES)
            _combine(into[block], [(source[block], coefficient) for source, coefficient in found])


class IsalKernel:
    """Any coefficients at the speed of memory, each source read and dest written once per call."""

    def __init__(self, library: Isal) -> None:
        self._library = library
        self.name = f"ISA-L {library.version}".strip()

    def add(self, dest: Buffer, source: Buffer, coefficient: int = 1) -> None:
        into, ((term, _),) = _operands(dest, [(source, coefficient)])
        if coefficient:
            self._library.add(into.ctypes.data, term.ctypes.data, coefficient, len(into))

    def combine(self, dest: Buffer, terms: Sequence[tuple[Buffer, int]]) -> None:
        into, found = _operands(dest, terms)
        found = [term for term in found if term[1]]
        if not found:
            into[:] = 0
            return
        sources = [source.ctypes.data for source, _ in found]
        self._library.combine(into.ctypes.data, sources, bytes(c for _, c in found), len(into))


# --- which one --------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def kernel() -> Kernel:
    """The fastest kernel of this machine that computes correctly."""
    return isal_kernel() or NumpyKernel()


def isal_kernel() -> IsalKernel | None:
    """The first ISA-L that loads and computes what numpy computes; None: there is none."""
    for path in candidates():
        try:
            found = IsalKernel(Isal(path))
        except (OSError, AttributeError):
            continue
        if agrees(found, NumpyKernel()):
            return found
        log.warning("%s computes wrongly on this processor and is not used", path)
    return None


def agrees(kernel: Kernel, other: Kernel) -> bool:
    """Do both compute the same of a few short, unaligned buffers? Some milliseconds; a wrong table would ruin every parity."""
    data = np.frombuffer(b"".join(products(c) for c in (29, 76, 143, 202)), np.uint8)
    for nbytes in (1, 31, 32, 63, 65, 200, 333):
        terms = [(data[at : at + nbytes], coefficient) for at, coefficient in ((1, 1), (258, 2), (515, 231))]
        results = []
        for one in (kernel, other):
            dest = np.full(nbytes + 2, 0x5A, np.uint8)
            one.combine(dest[1:-1], terms)
            one.add(dest[1:-1], data[7 : 7 + nbytes], 142)
            results.append(dest.tobytes())
        if results[0] != results[1]:
            return False
    return True


def describe() -> str:
    """For people: which kernel is in use."""
    found = kernel()
    return found.name if isinstance(found, IsalKernel) else "numpy: fast for XOR, slow for Reed-Solomon"


def slow_for(redundancy: Redundancy) -> str:
    """What is wrong with this policy on this machine; "": nothing, it needs no library or has it."""
    if not isinstance(redundancy, Parity) or redundancy.parity == 1 or isinstance(kernel(), IsalKernel):
        return ""
    return f"no ISA-L: parity for {redundancy.text} takes many times longer"


# --- operands ---------------------------------------------------------------------------------------------------
def _operands(dest: Buffer, terms: Sequence[tuple[Buffer, int]]) -> tuple[Bytes, list[tuple[Bytes, int]]]:
    into = _bytes(dest)
    found = [(_bytes(source), coefficient) for source, coefficient in terms]
    if not into.flags.writeable:
        raise ValueError("dest is read-only")
    if len(found) > COLUMNS_MAX:
        raise ValueError(f"{len(found)} terms, at most {COLUMNS_MAX}")
    for source, coefficient in found:
        if len(source) != len(into):
            raise ValueError(f"a source of {len(source)} bytes for a dest of {len(into)}")
        if not 0 <= coefficient <= 255:
            raise ValueError(f"coefficient {coefficient} is no byte")
        if abs(into.ctypes.data - source.ctypes.data) < len(into):
            raise ValueError("dest overlaps a source")
    return into, found


def _bytes(buffer: Buffer) -> Bytes:
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy's arrays are typed as buffers from Python 3.12 on
    if not view.c_contiguous:
        raise ValueError("a buffer is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


# --- numpy ------------------------------------------------------------------------------------------------------
def _combine(into: Bytes, terms: list[tuple[Bytes, int]]) -> None:
    """``terms``: at least one. Two sources of coefficient 1 are read in one go; otherwise dest begins as zeros."""
    plain = [source for source, coefficient in terms if coefficient == 1]
    if len(plain) >= 2:
        np.bitwise_xor(plain[0], plain[1], out=into)
        plain = plain[2:]
    elif plain:
        np.copyto(into, plain.pop())
    else:
        into[:] = 0
    for source in plain:
        np.bitwise_xor(into, source, out=into)
    for source, coefficient in terms:
        if coefficient != 1:
            _add(into, source, coefficient)


def _add(into: Bytes, source: Bytes, coefficient: int) -> None:
    if coefficient == 1:
        np.bitwise_xor(into, source, out=into)
    elif coefficient:
        table = np.frombuffer(products(coefficient), np.uint8)
        scratch = np.empty(min(TABLE_BLOCK_BYTES, len(into)), np.uint8)
        for at in range(0, len(into), TABLE_BLOCK_BYTES):
            block = slice(at, at + TABLE_BLOCK_BYTES)
            multiple = scratch[: len(into[block])]
            np.take(table, source[block], out=multiple, mode="clip")  # "raise" would go through a copy of out
            np.bitwise_xor(into[block], multiple, out=into[block])
