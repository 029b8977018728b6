"""Real text that every machine has: the source files of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

TEXT_BYTES_MAX = 3_000_000  # enough that 500 steps of the demo never see a window twice
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "lib2to3", "idlelib"})
UNKNOWN = "?"  # stands for every character outside printable ASCII


@dataclass(frozen=True, slots=True)
class Text:
    """``tokens``: uint8, one per character; ``vocabulary[token]`` is the character."""

    tokens: torch.Tensor
    vocabulary: str

    @property
    def size(self) -> int:
        return len(self.vocabulary)


def source_files(root: Path | None = None) -> Iterator[Path]:
    """The library's modules in an order that does not depend on the file system."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = (p.relative_to(root) for p in root.rglob("*.py"))
    for path in sorted(found, key=lambda p: p.as_posix()):
        if not SKIPPED_FOLDERS.intersection(path.parts):
            yield root / path


def read_text(root: Path | None = None, limit: int = TEXT_BYTES_MAX) -> str:
    """At most ``limit`` characters; unreadable files are left out (a library is not always world-readable)."""
    parts: list[str] = []
    length = 0
    for path in source_files(root):
        try:
            part = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parts.append(part)
        length += len(part)
        if length >= limit:
            break
    return "".join(parts)[:limit]


def load_text(root: Path | None = None, limit: int = TEXT_BYTES_MAX) -> Text:
    """Same interpreter, same tokens: nothing here depends on the process, the time or the world size."""
    plain = read_text(root, limit).encode("ascii", errors="replace")  # errors="replace" writes UNKNOWN
    present = sorted(set(plain) | set(UNKNOWN.encode()))
    printable = [code for code in present if 32 <= code < 127 or code == 10]
    table = bytearray([printable.index(ord(UNKNOWN))] * 256)
    for token, code in enumerate(printable):
        table[code] = token
    tokens = torch.frombuffer(bytearray(plain.translate(bytes(table))), dtype=torch.uint8)
    return Text(tokens, bytes(printable).decode("ascii"))
