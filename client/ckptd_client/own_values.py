"""Values that turned out to be each rank's own while no rule speaks of them: told while the job runs, as a restore into a world of
another size would be refused for them (design D7, D18)."""

from __future__ import annotations

from collections.abc import Sequence

from ckptd.core.protocol.machine.waiting import shown
from ckptd_client.entries import matches
from ckptd_client.registry import Registry
from ckptd_client.rules import Own
from ckptd_client.tree import REF_MARK
from ckptd_client.troubles import Troubles


class OwnValues:
    """Its daemon tells one rank of a job, the lowest on the steward's node."""

    def __init__(self, registry: Registry, troubles: Troubles) -> None:
        self._registry, self._troubles = registry, troubles
        self._keys: dict[str, None] = {}  # in the order in which they came
        self._warned = False

    def differ(self, keys: Sequence[str]) -> None:
        """These tensors differ between ranks, says the daemon, and again when it was started again. Warns of the first ones that no
        rule covers, once. Tensors in an object (the state of a generator) are that object's, and take no rule."""
        self._keys.update((key, None) for key in keys if REF_MARK not in key)
        found = self.without_rule if keys and not self._warned else []
        if found:
            self._warned = True
            self._troubles.pass_on(_told(found), "")

    @property
    def without_rule(self) -> list[str]:
        """Those that a restore into a world of another size would be refused for, by what is registered now."""
        return [key for key in list(self._keys) if not self._has_rule(key)]

    def _has_rule(self, key: str) -> bool:
        for owner in list(self._registry.owners.values()):
            theirs = owner.key_map is not None or f"{key}.".startswith(f"{owner.name}.")
            if theirs and any(isinstance(rule, Own) and matches(key, [pattern]) for pattern, rule in owner.rules.items()):
                return True
        return False


def _told(keys: Sequence[str]) -> str:
    what = "1 tensor differs" if len(keys) == 1 else f"{len(keys)} tensors differ"
    return (
        f"{what} between ranks: {shown(keys)}. As many ranks each get their own back; a restore into another number of ranks is"
        f' refused without a rule, as register(rules={{"{_pattern(keys)}": own("mean")}}) is one, or "sum", "max", "first" ("mean"'
        " is of floats); what has one name and is another thing on each rank takes key_map="
    )


def _pattern(keys: Sequence[str]) -> str:
    """Of a rule for the first of these, and those of its kind."""
    last = f".{keys[0].rpartition('.')[2]}"
    return f"*{last}" if sum(key.endswith(last) for key in keys) > 1 else keys[0]
