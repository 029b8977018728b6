"""Every parser under atheris for as long as FUZZ_SECONDS says (in all; 600 unless told). `make soak`."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.findings import FOLDER
from tests.fuzz.registry import TARGETS
from tests.fuzz.soak import MISSING, ROOT, guided

SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_guided_by_coverage(name: str) -> None:
    """P13."""
    pytest.importorskip("atheris", reason=MISSING)
    found, said = guided(name, max(1, round(SECONDS / len(TARGETS))), ROOT / FOLDER)
    assert not found, f"{said[-3000:]}\n.venv/bin/python -m tests.fuzz {name} {found[0]}"
