"""Slots that an accelerator cannot copy into at full speed yet, and the grants that came for them (design D16)."""

from __future__ import annotations

from ckptd.wire import rank as wire


class Cold:
    """To the rank such a grant is still on its way: it comes when its slot is registered, and may be late then, as any other."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[wire.GrantSlot]] = {}  # by slot

    def begin(self, slot: int) -> None:
        self._waiting[slot] = []

    def keeps(self, grant: wire.GrantSlot) -> bool:
        if grant.slot not in self._waiting:
            return False
        self._waiting[grant.slot].append(grant)
        return True

    def take_back(self, number: int) -> bool:
        """True: it was here."""
        for grants in self._waiting.values():
            for grant in grants:
                if grant.grant == number:
                    grants.remove(grant)
                    return True
        return False

    def ready(self, slot: int) -> list[wire.GrantSlot]:
        return self._waiting.pop(slot, [])

    def clear(self) -> None:
        self._waiting.clear()
