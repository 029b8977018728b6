"""Bytes per element by safetensors name: the one vocabulary for dtypes in layouts, on the wire and on disk."""

from __future__ import annotations

ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})  # what is converted into each other where somebody asks for it
