"""What worlds set in the modules of the core ends with the test that made them."""

from __future__ import annotations

import pytest

from ckptd.core.protocol.machine import slots
from ckptd.core.protocol.machine.steward import certify, steward


@pytest.fixture(autouse=True)
def modules_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests after these run in the same process (a core test saw a steward that paused)."""
    for module, names in (
        (steward, ("RANKS_AT_ONCE_MAX", "PAUSE_PER_RANK_S")),
        (certify, ("ASKED_AT_ONCE_MAX",)),
        (slots, ("LEAVES_BYTES",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
