"""Where the inputs of findings are kept: ``python -m tests.fuzz TARGET FILE`` runs one again."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.fuzz.target import Finding, Target

FOLDER = Path("fuzz-findings")
SAVED_PER_KIND_MAX = 3  # of one run


def save(target: Target, finding: Finding, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{target.name}-{hashlib.blake2b(finding.data, digest_size=6).hexdigest()}"
    file.write_bytes(finding.data)
    return file
