"""Every parser of bytes that another process or a disk made, by name. docs/TESTING.md shows the same list with who can send."""

from __future__ import annotations

from tests.fuzz import targets_client, targets_memory, targets_storage, targets_wire
from tests.fuzz.target import Target

_ROOMS = (targets_wire, targets_memory, targets_storage, targets_client)
TARGETS: dict[str, Target] = {target.name: target for room in _ROOMS for target in room.TARGETS}
