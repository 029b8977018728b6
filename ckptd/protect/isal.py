"""Intel's ISA-L through ctypes: sums of multiples over GF(2^8), straight on the buffers, without the GIL.

The library comes with pyeclib (``pip install 'ckptd[rs]'``, whose wheels bundle it; nothing of pyeclib is imported) or from the
system (libisal2 on Debian and Ubuntu). Only pairs that ISA-L itself matches are called: ``ec_init_tables`` with ``ec_encode_data``
and ``ec_encode_data_update``. What its tables hold depends on the processor (with GFNI 8 bytes per coefficient, else 32), so no
table is made here, and these three, unlike gf_vect_mad and gf_vect_dot_prod, take any length (include/erasure_code.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from importlib import metadata

BUNDLED_IN = "pyeclib"
SYSTEM_NAME = "libisal.so.2"
TABLE_BYTES = 32  # per coefficient
PIECE_BYTES = 1 << 30  # ISA-L counts bytes in an int

_POINTERS = ctypes.POINTER(ctypes.c_void_p)


class Isal:
    """One loaded ISA-L. OSError: it cannot be loaded; AttributeError: it is too old."""

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        self._init_tables = library.ec_init_tables
        self._init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
        self._encode = library.ec_encode_data
        self._encode.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p, _POINTERS, _POINTERS]
        self._update = library.ec_encode_data_update
        self._update.argtypes = [ctypes.c_int] * 4 + [ctypes.c_void_p, ctypes.c_void_p, _POINTERS]
        for function in (self._init_tables, self._encode, self._update):
            function.restype = None
        self.version = _version(library)

    def combine(self, dest: int, sources: Sequence[int], coefficients: bytes, nbytes: int) -> None:
        """The ``nbytes`` at address ``dest`` become the sum of coefficient times the bytes at each of ``sources``."""
        tables = self._tables(coefficients)
        for at in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - at)
            self._encode(
                length, len(sources), 1, tables, _pointers([s + at for s in sources]), _pointers([dest + at])
            )

    def add(self, dest: int, source: int, coefficient: int, nbytes: int) -> None:
        """The ``nbytes`` at address ``dest`` get coefficient times those at ``source`` added."""
        tables = self._tables(bytes([coefficient]))
        for at in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - at)
            self._update(length, 1, 1, 0, tables, source + at, _pointers([dest + at]))

    def _tables(self, coefficients: bytes) -> ctypes.Array[ctypes.c_char]:
        tables = ctypes.create_string_buffer(TABLE_BYTES * len(coefficients))
        self._init_tables(len(coefficients), 1, coefficients, tables)
        return tables


def candidates() -> Iterator[str]:
    """Where an ISA-L may be: the one that the extra brought, the system's."""
    try:
        files = metadata.distribution(BUNDLED_IN).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libisal") and ".so" in file.name:
            yield str(file.locate())
    yield SYSTEM_NAME


def _pointers(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _version(library: ctypes.CDLL) -> str:
    """ISA-L tells its version since 2.31; "" before."""
    try:
        tell = library.isal_get_version_str
    except AttributeError:
        return ""
    tell.restype = ctypes.c_char_p
    return bytes(tell() or b"").decode("ascii", "replace")
